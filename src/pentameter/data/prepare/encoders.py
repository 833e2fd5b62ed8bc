"""Passages of text into token ids: here, or in processes beside this one, in order either way.

Processes rather than threads: words are found in Python, which has one lock, and what the
`tokenizers` library returns becomes arrays in Python too.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.load import load_tokenizer
from pentameter.errors import StorageError
from pentameter.machine.child import ChildEndedError, PythonChild
from pentameter.machine.threads import usable_cores

if TYPE_CHECKING:  # each process imports this file, and needs nothing of what reads text
    from pentameter.data.prepare.splits import Passage

    Passages = list[Passage]
    Encoded = tuple[Passages, list[npt.NDArray[Any]]]

BATCH_CHARACTERS = 1 << 19
WORTH_PROCESSES_BYTES = 1 << 23  # they take about half a second to start
BATCHES_AHEAD = 2  # per process: one at work, one waiting


def batches(
    passages: Iterable[Passage], n_characters: int = BATCH_CHARACTERS
) -> Iterator[Passages]:
    """The passages in lists of about `n_characters` characters."""
    batch: Passages = []
    held = 0
    for passage in passages:
        batch.append(passage)
        held += len(passage.text) + 16  # many tiny documents make a batch too
        if held >= n_characters:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def processes_for(tokenizer: Tokenizer, n_bytes: int) -> int:
    """The number of processes that a text of that size is worth; 0 to encode in this one."""
    # Characters are looked up in one NumPy call, faster than they would go through a pipe.
    if tokenizer.kind == "char" or n_bytes < WORTH_PROCESSES_BYTES:
        return 0
    n_cores = len(usable_cores())
    return n_cores if n_cores > 1 else 0


def encoded(
    batches: Iterable[Passages], tokenizer: Tokenizer, n_processes: int
) -> Iterator[Encoded]:
    """Each batch with the ids of each of its passages, in order; bounded memory.

    Raises what the tokenizer raises, StorageError when a process is lost.
    """
    if n_processes == 0:
        for batch in batches:
            yield batch, list(tokenizer.encode_batch([passage.text for passage in batch]))
        return
    with _Pool(tokenizer, n_processes) as pool:
        waiting: deque[tuple[Passages, Future[list[npt.NDArray[Any]]]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit([passage.text for passage in batch])))
            if len(waiting) >= BATCHES_AHEAD * n_processes:
                first, future = waiting.popleft()
                yield first, future.result()
        for batch, future in waiting:
            yield batch, future.result()


class _Pool:
    """Processes that encode, each fed by a thread of this one."""

    def __init__(self, tokenizer: Tokenizer, n_processes: int) -> None:
        self._idle: SimpleQueue[PythonChild] = SimpleQueue()
        self._threads = ThreadPoolExecutor(n_processes)
        with ExitStack() as stack:  # undone from its end, now if a process cannot be started
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="pentameter-")))
            tokenizer.save(folder / "tokenizer.json")
            children = []
            for _ in range(n_processes):
                children.append(_start_encoder(folder))
                stack.callback(children[-1].close)
                self._idle.put(children[-1])
            stack.callback(self._threads.shutdown)  # which waits, so that nobody asks any more
            for child in children:
                stack.callback(child.kill)
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def submit(self, texts: Sequence[str]) -> Future[list[npt.NDArray[Any]]]:
        """The future ids of each text."""
        return self._threads.submit(self._encode, texts)

    def _encode(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        child = self._idle.get()
        try:
            ids, lengths = child.ask(texts)
        except ChildEndedError as error:
            raise StorageError(
                f"a process that encoded text ended (exit code {error.code}; -9 is often a lack of "
                "memory); start again"
            ) from error
        finally:
            self._idle.put(child)
        result: list[npt.NDArray[Any]] = np.split(ids, np.cumsum(lengths)[:-1])
        return result


def _start_encoder(folder: Path) -> PythonChild:
    """A process that encodes with the tokenizer saved in a temporary folder."""
    try:
        return PythonChild(
            f"{__name__}:encoder",
            str(folder / "tokenizer.json"),
            environment={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            folder=folder,
        )
    except OSError as error:
        raise StorageError(
            f"cannot start {sys.executable} to encode text: {error.strerror}; start again when "
            "fewer processes run"
        ) from error


def encoder(tokenizer_file: str) -> Callable[[Sequence[str]], object]:
    """The function with which a process of the pool answers: texts to (all their ids, lengths)."""
    tokenizer = load_tokenizer(tokenizer_file)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def encode(texts: Sequence[str]) -> object:
        ids = tokenizer.encode_batch(texts)
        return np.concatenate(ids).astype(dtype), [len(part) for part in ids]

    return encode
