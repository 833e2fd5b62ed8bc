"""Encoding passages (pieces of text) to token ids, in this process or several, in order either way.

Processes rather than threads: words are found in Python, which has one lock, and results from the
`tokenizers` library become arrays in Python too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.chunking import batches
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.disk.lock import scratch_folder
from pentameter.errors import StorageError
from pentameter.machine.child import ChildEndedError, PythonChild
from pentameter.machine.cores_and_memory import n_usable_cores

if TYPE_CHECKING:  # each process imports this file, and needs nothing of what reads text
    from pentameter.data.prepare.splits import Passage

    Passages = list[Passage]
    Encoded = tuple[Passages, list[npt.NDArray[Any]]]

BATCH_CHARACTERS = 1 << 19
WORTH_PROCESSES_BYTES = 1 << 23  # they take about half a second to start
BATCHES_AHEAD = 2  # per process: one at work, one waiting


def _counted(passage: Passage) -> int:
    """Return the size at which a passage counts in a batch: its characters plus 16, so that a batch
    of very short passages does not get too many."""
    return len(passage.text) + 16


def processes_for(tokenizer: Tokenizer, n_bytes: int) -> int:
    """Return how many processes to start for encoding `n_bytes` of text: one per usable core, or 0,
    which means encoding in this process, for a character tokenizer, for less than
    WORTH_PROCESSES_BYTES and on a single core."""
    # Characters are looked up in one NumPy call, faster than they would go through a pipe.
    if tokenizer.kind == "char" or n_bytes < WORTH_PROCESSES_BYTES:
        return 0
    n_cores = n_usable_cores()
    return n_cores if n_cores > 1 else 0


def encoded_passages(
    passages: Iterable[Passage], tokenizer: Tokenizer, n_bytes: int
) -> Iterator[Encoded]:
    """Tokenize passages of text, in as many processes as `processes_for` gives for `n_bytes` of
    UTF-8. Yield, batch after batch and in order, the batch's passages and a list with each one's
    ids (n_tokens,). For a character tokenizer each batch is one passage. Raises any error from the
    tokenizer, StorageError if a process cannot be started or ends early."""
    # A passage alone where a character may be unknown, so that it is known which.
    size = 1 if tokenizer.kind == "char" else BATCH_CHARACTERS
    cut = batches(passages, size, _counted)
    return encoded(cut, tokenizer, processes_for(tokenizer, n_bytes))


def encoded(
    batches: Iterable[Passages], tokenizer: Tokenizer, n_processes: int
) -> Iterator[Encoded]:
    """Tokenize batches of passages. Yield, in order, each batch and a list with each passage's ids
    (n_tokens,). `n_processes` child processes do it, or this process if that is 0. At most
    BATCHES_AHEAD batches per process are held in memory.

    Raises any error from the tokenizer, StorageError if a process cannot be started or ends early.
    """
    if n_processes == 0:
        for batch in batches:
            yield batch, tokenizer.encode_batch([passage.text for passage in batch])
        return
    with _started(tokenizer, n_processes) as children:
        idle: SimpleQueue[PythonChild] = SimpleQueue()
        for child in children:
            idle.put(child)
        threads = ThreadPoolExecutor(n_processes)  # each waits for the process that it asked
        waiting: deque[tuple[Passages, Future[list[npt.NDArray[Any]]]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, threads.submit(_ask, idle, [part.text for part in batch])))
                if len(waiting) >= BATCHES_AHEAD * n_processes:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for batch, future in waiting:
                yield batch, future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()
            threads.shutdown()  # which waits, so that nobody asks any more


def _ask(idle: SimpleQueue[PythonChild], texts: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Have the first idle child process encode texts; return each text's ids (n_tokens,). Waits
    until one is idle. Raises StorageError if the child ends."""
    child = idle.get()
    try:
        ids, lengths = child.ask(texts)
    except ChildEndedError as error:
        raise StorageError(f"a process that encoded text {error}; start again") from error
    finally:
        idle.put(child)
    return np.split(ids, np.cumsum(lengths)[:-1])


@contextmanager
def _started(tokenizer: Tokenizer, n_processes: int) -> Iterator[list[PythonChild]]:
    """Context manager that yields `n_processes` child processes running `encoder`, and closes them
    on exit; StorageError if one cannot be started."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        tokenizer.save(folder / "tokenizer.json")
        children: list[PythonChild] = []
        for _ in range(n_processes):
            child = PythonChild(
                f"{__name__}:encoder",
                str(folder / "tokenizer.json"),
                environment={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                folder=folder,
                task="encode text",
            )
            stack.callback(child.close)
            children.append(child)
        yield children


def encoder(tokenizer_file: str) -> Callable[[Sequence[str]], object]:
    """Return the function that a child process serves. It maps a list of texts to (all their ids in
    one array, each text's number of ids); the array is uint16 if all ids fit, else uint32.
    tokenizer_file: the path of a saved tokenizer."""
    tokenizer = load_tokenizer(tokenizer_file)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def encode(texts: Sequence[str]) -> object:
        ids = tokenizer.encode_batch(texts)
        return np.concatenate(ids).astype(dtype), [len(part) for part in ids]

    return encode
