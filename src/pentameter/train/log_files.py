"""The logs of a run: log.txt and metrics.jsonl grow by whole lines, and never end the run.

metrics.jsonl holds one JSON object a line, `event` first. `rewind_metrics` cuts it back to where a
checkpoint was saved, so that a run that continues from it writes it on without gap or repeat.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import read_regular, storage_error, storage_errors, write_atomic
from pentameter.errors import StorageError

MAX_METRICS_BYTES = 2**32  # ten million lines
MAX_UNWRITTEN = 10_000  # lines kept for a disk that refuses them; beyond, the oldest are lost


def any_folder() -> None:
    """Take the folder of a log for the right one, whichever it is."""


class LogFile:
    """Appends lines to `path`, which is created with the first one.

    A failing write (a full disk, a folder that is gone) calls `warn` with one line, once; what
    could not be written is kept, and written in order as soon as it can be. No line is ever left
    half-written before another one. A file that somebody removes is put back, unless `check_folder`
    raises StorageError because the folder is not that of the run any more.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        check_folder: Callable[[], None] = any_folder,
    ) -> None:
        self.path = path
        self._check_folder = check_folder
        self.unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN)
        """Lines that are not in the file yet."""
        self._warn = warn
        self._has_warned = False
        self._fd: int | None = None
        self._torn_at: int | None = None  # where a half-written line begins that could not be cut

    def append(self, line: str) -> None:
        """Add a line, given without its newline."""
        self.unwritten.append(line.encode(errors="replace") + b"\n")
        self._attempt(self._write)

    def sync(self) -> int:
        """Write and sync what is left, and return the bytes of whole lines in the file."""
        self._attempt(self._write_and_sync)
        with suppress(OSError):
            return self._size()
        return 0

    def close(self) -> None:
        """Write what is left and close the file; it is opened again by another line."""
        if self.unwritten:
            self._attempt(self._write)
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, StorageError) as error:
            if self._has_warned:
                return
            self._has_warned = True  # before the warning, which may be for this very file
            reason = error.__cause__ if isinstance(error, StorageError) else error
            assert isinstance(reason, OSError)  # which a StorageError tells
            told = str(storage_error(self.path, "write", reason)).rstrip("?.")
            self._warn(f"warning: {told}. Training goes on; lines are added once that is possible")

    def _write(self) -> None:
        fd = self._at_path()
        while self.unwritten:
            self._append(fd, self.unwritten[0])
            self.unwritten.popleft()

    def _write_and_sync(self) -> None:
        self._write()
        os.fsync(self._at_path())

    def _append(self, fd: int, line: bytes) -> None:
        if self._torn_at is not None:
            os.ftruncate(fd, self._torn_at)
            self._torn_at = None
        start, n_written = os.fstat(fd).st_size, 0
        try:
            while n_written < len(line):
                n_written += os.write(fd, line[n_written:])
        except OSError:
            if n_written:
                self._torn_at = start
                with suppress(OSError):
                    os.ftruncate(fd, start)
                    self._torn_at = None
            raise

    def _at_path(self) -> int:
        """The descriptor of the file that `path` names now, opened anew or put back if need be."""
        if self._fd is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self.path), os.fstat(self._fd)):
                    return self._fd
            self._check_folder()
            if not self.path.exists():
                write_atomic(self.path, os.pread(self._fd, self._size(), 0))
            os.close(self._fd)
            self._fd = self._torn_at = None
        # No link, which could lead anywhere, and no pipe, which nobody may read.
        how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, how, mode=0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is a pipe or a device")
        self._fd = fd
        return fd

    def _size(self) -> int:
        if self._torn_at is not None:
            return self._torn_at
        return (os.stat(self.path) if self._fd is None else os.fstat(self._fd)).st_size


def rewind_metrics(
    path: Path,
    *,
    n_bytes: int,
    unwritten: Sequence[str] = (),
    checkpoint: Mapping[str, Any] | None,
) -> None:
    """Cut `path` back to a checkpoint: what was there when it was saved, and its own event.

    `n_bytes` is the file's size just before the checkpoint was written, `unwritten` the lines that
    waited for the disk then. Lines after it come from steps that are about to be run again, except
    the one that says the checkpoint was saved; a kill may have prevented that line, so `checkpoint`
    holds its values. None goes back to the start of the run. Raises CorruptError where `path` is
    no regular file, or of a size that no run writes.
    """
    if not path.exists() and not unwritten:
        return
    raw = read_regular(path, max_bytes=MAX_METRICS_BYTES) if path.exists() else b""
    kept = raw[:n_bytes]
    kept = kept[: kept.rfind(b"\n") + 1]  # a half-written last line is not an event
    rest = raw[len(kept) :]
    kept += "".join(f"{line}\n" for line in unwritten).encode()
    if checkpoint is not None and not _find_checkpoint(kept, checkpoint["step"]):
        # A checkpoint that was saved again has its line in what is kept.
        line = _find_checkpoint(rest, checkpoint["step"])
        kept += line or f"{event_line('checkpoint', checkpoint)}\n".encode()
    if raw.startswith(kept):  # needs no room on a full disk
        with storage_errors(path, "write"):
            os.truncate(path, len(kept))
    else:
        write_atomic(path, kept)


def checkpoint_event(step: int, path: Path, n_bytes: int, seconds: float | None) -> dict[str, Any]:
    """The values of a `checkpoint` line; the path is relative to the run folder, which may move."""
    return {"step": step, "path": f"checkpoints/{path.name}", "bytes": n_bytes, "seconds": seconds}


def _find_checkpoint(lines: bytes, step: int) -> bytes | None:
    """The complete line of the `checkpoint` event of `step`; None without one."""
    for line in lines.splitlines(keepends=True):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            is_event = isinstance(record, dict) and record.get("event") == "checkpoint"
            if is_event and record.get("step") == step and line.endswith(b"\n"):
                return line
    return None


def event_line(event: str, values: Mapping[str, Any]) -> str:
    """The line of metrics.jsonl for an event."""
    return json.dumps({"event": event, **strict(values)}, ensure_ascii=False, default=str)


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as strict JSON has them, which every reader accepts: NaN and infinity are null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
