"""Tokenizes a text ahead of training. One process per machine writes a token stream's parts in the
background, as far as the run will read; all processes of the run wait for the tokens that they
need."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pentameter.data.prepare.from_text import TextPreparation
from pentameter.data.prepare.preparation import cached_folder, holds_tokenizer
from pentameter.data.prepare.token_stream_writer import Origin, origin_of
from pentameter.data.progress import BEGINNING
from pentameter.data.shards.dataset import Dataset
from pentameter.data.shards.token_stream import (
    Source,
    is_token_stream,
    n_parts_of,
    n_tokens_of,
    open_token_stream,
    part_header,
)
from pentameter.disk.atomic import make_folder, read_json, write_atomic
from pentameter.errors import ConfigError, CorruptError, PentameterError, StorageError
from pentameter.machine.child import ChildEndedError, PythonChild

POLL_SECONDS = 0.05
_RUN = (
    "PENTAMETER_LAUNCH_FOLDER", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)  # fmt: skip
"""Environment variables that are equal in the processes of a run, and differ between runs."""
_ERRORS: Mapping[str, type[PentameterError]] = {
    error.__name__: error for error in (ConfigError, CorruptError, StorageError)
}


def failure_file(folder: Path) -> Path:
    """Return the path of the file, in the folder of a text that is tokenized during training, to
    which the writing process writes its error, for the other processes of the run to read. Its name
    contains the run's, as other runs may write the same text and fail for reasons of their own."""
    run = "\0".join(os.environ.get(name, "") for name in _RUN)
    return folder / f"failed-{hashlib.sha256(run.encode()).hexdigest()[:12]}.json"


class Ahead(Source):
    """The `Source` that makes the tokens of a text while training goes on, in the leading process
    of a machine: a child process, which ends with this one, writes them in the background, part
    after part.

    origin: the text with its tokenizer and splits.
    folder: the folder in the cache for the parts.
    """

    def __init__(self, origin: Origin, folder: Path) -> None:
        super().__init__(folder)
        self._origin = origin
        self._n_wanted = 0
        self._thread: threading.Thread | None = None
        self._child: PythonChild | None = None
        self._is_closing = False
        self._error: Exception | None = None

    def prepare(self, n_tokens: int) -> None:
        """Start to tokenize more text in the background, until the shards on disk hold `n_tokens`
        training tokens in all or the text has ended. Return at once."""
        self._n_wanted = max(self._n_wanted, n_tokens)
        if self._thread is None or not self._thread.is_alive():
            failure_file(self._folder).unlink(missing_ok=True)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def wait(self, n_tokens: int) -> None:
        """Have more text tokenized in the background, as `prepare` does, and sleep for
        POLL_SECONDS. The caller then looks whether `n_tokens` training tokens are on disk, and
        calls again if not. Raises the error with which the background work failed."""
        if self._error is not None:
            raise self._error
        self.prepare(n_tokens)
        time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the background process. The part that it is writing is lost; finished parts stay."""
        self._n_wanted, self._is_closing = 0, True
        if self._child is not None:
            self._child.kill()
        if self._thread is not None:
            self._thread.join()
        if self._child is not None:
            self._child.close()
            self._child = None

    def _run(self) -> None:
        """Body of the background thread: have parts written until they hold the tokens asked for or
        the text has ended. An error is kept for `wait`, and a PentameterError also written to
        `failure_file`, for other processes."""
        n_ready = number = 0
        try:
            while True:
                while (header := part_header(self._folder, number)).exists():
                    n_ready, number = n_ready + n_tokens_of(header), number + 1
                if n_ready >= self._n_wanted or n_parts_of(self._folder) is not None:
                    break
                self._write_next()
        except Exception as error:  # raised where somebody waits
            if self._is_closing:
                return  # the child was killed for it
            self._error = error
            if not isinstance(error, PentameterError):
                return
            known = next(each for each in type(error).__mro__ if each.__name__ in _ERRORS)
            failure = {"error": known.__name__, "message": str(error)}
            write_atomic(failure_file(self._folder), json.dumps(failure).encode())

    def _write_next(self) -> None:
        """Have the child process write the stream's next part, and wait until it has. The first
        call starts the child. Raises the child's error; StorageError if it cannot be started, or is
        killed."""
        request = None
        try:
            if self._child is None:
                make_folder(self._folder)
                self._child = PythonChild(
                    "pentameter.data.prepare.token_stream_writer:preparer", task="tokenize the text"
                )
                request = (self._origin, self._folder)
                if self._is_closing:  # since before there was a process to kill
                    self._child.kill()
            self._child.ask(request)
        except ChildEndedError as error:
            raise StorageError(
                f"the process that tokenizes the text {error}; start again"
            ) from error


class Follower(Source):
    """The `Source` for a machine's other processes while a text is tokenized during training: it
    writes nothing, and waits for the parts that the leading process writes into `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = failure_file(folder)
        self._before = self._written_at()  # by an earlier run

    def wait(self, n_tokens: int) -> None:
        """Sleep for POLL_SECONDS, while another process tokenizes the text; `n_tokens` is not read.
        Raises the error that the other process has recorded, if it failed since this object was
        made."""
        if (at := self._written_at()) is not None and at != self._before:
            failure = read_json(self._file)
            raise _ERRORS.get(str(failure.get("error")), StorageError)(str(failure.get("message")))
        time.sleep(POLL_SECONDS)

    def _written_at(self) -> int | None:
        """Return when the failure file was written, in nanoseconds; None if there is none."""
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None


@dataclass(frozen=True)
class TokenStreamPreparation(TextPreparation):
    """A text with `data.order = "streamed"`: a run reads its first tokens while later ones are
    encoded."""

    def open_cached(self, setting: str, *, verify: bool, warnings: list[str]) -> Dataset:
        """Open the text as a token stream in the cache; wait until its first part is written.

        setting: `data.tokenizer`. If `tokenizer` is a trained model's and equals the one that this
        setting made from the text, the stream that this model was trained on is opened, so that
        nothing is encoded twice. verify: whether this process has the parts written, and checks
        their hashes; one process per machine does, the others wait for the parts. warnings: unused.
        Raises ConfigError for a tokenizer or split that needs the whole text, and for an empty one;
        CorruptError for damage; StorageError if reading or writing fails.
        """
        origin = origin_of(self.corpus, self.tokenizer, self.splitting)
        made = replace(origin, tokenizer=setting)
        if holds_tokenizer(part_header(cached_folder(made.key), 0).parent, setting, self.tokenizer):
            origin = made  # the stream that the model was trained on
        folder = cached_folder(origin.key)
        if not is_token_stream(folder):
            self.progress(BEGINNING, 0, self.corpus.n_bytes)
        source = Ahead(origin, folder) if verify else Follower(folder)
        return open_token_stream(folder, source, verify=verify, progress=self.progress)
