"""Passages of text into token ids: here, or in processes beside this one, in order either way.

Processes rather than threads: words are found in Python, which has one lock, and what the
`tokenizers` library returns becomes arrays in Python too.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.prepare.splits import Passage
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.load import load_tokenizer
from pentameter.errors import PentameterError, StorageError
from pentameter.machine.threads import usable_cores

BATCH_CHARACTERS = 1 << 19
WORTH_PROCESSES_BYTES = 1 << 23  # they take about half a second to start
BATCHES_AHEAD = 2  # per process: one at work, one waiting

# The process loads this very package, whichever others could be found. Its folder comes last on the
# path: what lies beside the package must not stand in for the standard library.
_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("pentameter", sys.argv[1])
sys.modules["pentameter"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["pentameter"])
sys.path.append(str(Path(sys.argv[1]).parents[1]))
from pentameter.data.prepare.encoders import main
main(sys.argv[2])
"""

Passages = list[Passage]
Encoded = tuple[Passages, list[npt.NDArray[Any]]]


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
        self._idle: SimpleQueue[_Encoder] = SimpleQueue()
        self._threads = ThreadPoolExecutor(n_processes)
        with ExitStack() as stack:  # undone from its end, now if a process cannot be started
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pentameter-"))
            path = Path(folder) / "tokenizer.json"
            tokenizer.save(path)
            stack.callback(self._threads.shutdown)
            for _ in range(n_processes):
                encoder = _Encoder(path)
                stack.callback(encoder.stop)
                self._idle.put(encoder)
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
        encoder = self._idle.get()
        try:
            return encoder.encode(texts)
        finally:
            self._idle.put(encoder)


class _Encoder:
    """One process: texts go in through its pipe, ids come out."""

    def __init__(self, tokenizer: Path) -> None:
        # A fresh interpreter rather than `multiprocessing`: forking a process with threads is
        # unsafe, and spawning would run the user's script again. -P: the folder that this process
        # happens to be in may hold a `numpy.py` of somebody's.
        package = Path(__file__).parents[2] / "__init__.py"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(package), str(tokenizer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise StorageError(
                f"cannot start {sys.executable} to encode text: {error.strerror}; start again "
                "when fewer processes run"
            ) from error

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The ids of each text; raises what the process raised."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(texts, stdin, protocol=5)
            stdin.flush()
            answer = pickle.load(stdout)  # written by our own process
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise StorageError(
                f"a process that encoded text ended (exit code {self._process.wait()}; -9 is often "
                "a lack of memory); start again"
            ) from error
        if isinstance(answer, PentameterError):
            raise answer
        ids, lengths = answer
        result: list[npt.NDArray[Any]] = np.split(ids, np.cumsum(lengths)[:-1])
        return result

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # what it no longer read
                    stream.close()


# -- in the process that encodes ------------------------------------------------------------------


def serve(tokenizer: Tokenizer, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each list of texts with (all their ids, their lengths), or with the error raised."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    while True:
        try:
            texts = pickle.load(requests)  # written by the process that started this one
        except EOFError:
            return
        answer: object
        try:
            ids = tokenizer.encode_batch(texts)
            answer = np.concatenate(ids).astype(dtype), [len(part) for part in ids]
        except PentameterError as error:
            answer = error
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def main(tokenizer: str) -> None:
    """Run one of the processes, until the one that started it closes the pipe; `tokenizer` is a
    file in a temporary folder of its own."""
    # Ctrl-C reaches the whole group of processes; the one that started this ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(load_tokenizer(tokenizer), sys.stdin.buffer, sys.stdout.buffer)
    with suppress(OSError):  # who started this process was killed, or it would have ended this one
        Path(tokenizer).unlink(missing_ok=True)
        Path(tokenizer).parent.rmdir()
