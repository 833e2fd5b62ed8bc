"""A run's append-only logs, log.txt and metrics.jsonl. They grow by whole lines, and a failed write
never ends a run.

metrics.jsonl holds one JSON object per line, with the key `event` first. When a run resumes from a
checkpoint, `rewind_metrics` truncates the file to its content at that save, so that events are
neither missing nor repeated. Resumes since that save stay, as do copies of what was saved by then:
they are not made again.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pentameter.disk.atomic import (
    no_check,
    read_regular,
    storage_error,
    storage_errors,
    sync,
    sync_descriptor,
    write_atomic,
)
from pentameter.errors import RunFolderInUseError, StorageError
from pentameter.record.events import (
    UNKNOWN,
    CheckpointMetrics,
    CopyMetrics,
    Event,
    RunResume,
    line_of,
    read_line,
)

MAX_METRICS_BYTES = 2**32  # ten million lines
MAX_UNWRITTEN = 10_000  # lines kept if a disk refuses them; beyond, the oldest are lost


@dataclass(frozen=True)
class Reached:
    """Progress of an earlier start of a run: the highest step in metrics.jsonl before the resume,
    and the time of the last event, in seconds since 1970 (UTC)."""

    step: int
    time: float


class LogFile:
    """A file that lines are appended to; the first line creates it. If somebody removes the file,
    it is written again. A half-written line is cut off before another follows.

    warn: called with one line, once, when a write fails (a full disk, a missing folder). Failed
        lines are kept, at most MAX_UNWRITTEN, and written in order at the next chance.
    check_folder: called before each write. It raises StorageError if the path does not lead to the
        run's folder at the moment, and RunFolderInUseError if another process has taken the folder
        over. Nothing is written any more then, since that process writes its lines there.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], None], check_folder: Callable[[], None] = no_check
    ) -> None:
        self.path = path
        self._check_folder = check_folder
        self.unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN)
        """Lines that are not in the file yet."""
        self.is_closed_for_good = False
        """True once another process has taken over the folder."""
        self._warn = warn
        self._has_warned = False
        self._fd: int | None = None
        self._is_name_synced = False  # else a power loss may leave no file of this name
        self._torn_at: int | None = None  # offset of a half-written line still in the file

    def append(self, line: str) -> None:
        """Append a line, given without its newline. Never raises for a failed write."""
        self.unwritten.append(line.encode(errors="replace") + b"\n")
        self._attempt(self._write)

    def sync(self) -> int:
        """Write the lines still waiting, sync to disk, and return the size of the complete lines in
        bytes (0 if there is no file)."""
        self._attempt(self._write_and_sync)
        with suppress(OSError):
            return self._size()
        return 0

    def close(self, check_folder: Callable[[], None] | None = None) -> None:
        """Write the lines still waiting, and close the file. A later `append` opens it again; from
        then on the given `check_folder`, if any, is called before each write."""
        if self.unwritten:
            self._attempt(self._write)
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None
        self._check_folder = check_folder or self._check_folder

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            if not self.is_closed_for_good:
                self._check_folder()
                work()
        except RunFolderInUseError:  # the loop ends the run
            self.is_closed_for_good = True
        except (OSError, StorageError) as error:
            if self._has_warned:
                return
            self._has_warned = True  # before the warning, which may be for this very file
            reason = error.__cause__ if isinstance(error, StorageError) else error
            assert isinstance(reason, OSError)  # a StorageError's cause
            told = str(storage_error(self.path, "write", reason)).rstrip("?.")
            self._warn(f"warning: {told}. Training goes on; lines are added once that is possible")

    def _write(self) -> None:
        fd = self._at_path()
        while self.unwritten:
            self._append(fd, self.unwritten[0])
            self.unwritten.popleft()

    def _write_and_sync(self) -> None:
        self._write()
        sync_descriptor(self._at_path())
        if not self._is_name_synced:
            sync(self.path.parent)
            self._is_name_synced = True

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
        """Return an open descriptor for the file that is now at `path`: the one in use, a newly
        opened one, or after a removal the file with its content written again. Raises OSError if it
        is no regular file."""
        if self._fd is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self.path), os.fstat(self._fd)):
                    return self._fd
            if not self.path.exists():
                write_atomic(self.path, os.pread(self._fd, self._size(), 0))
            os.close(self._fd)
            self._fd = self._torn_at = None
        # No symlink, which could lead anywhere, and no pipe, which might have no reader.
        how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, how, mode=0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is a pipe or a device")
        self._fd, self._is_name_synced = fd, False
        return fd

    def _size(self) -> int:
        if self._torn_at is not None:
            return self._torn_at
        return (os.stat(self.path) if self._fd is None else os.fstat(self._fd)).st_size


def rewind_metrics(
    path: Path, *, n_bytes: int, unwritten: Sequence[str] = (), checkpoint: CheckpointMetrics | None
) -> Reached | None:
    """Truncate metrics.jsonl at `path` to its content when a checkpoint was saved. That
    checkpoint's own event stays, and so do later `resume` events and later `copy` events of
    checkpoints up to it. Other later lines belong to steps that will run again.

    n_bytes: the file's size just before the checkpoint was written.
    unwritten: lines, without newline, that the disk had refused by then; they are written now.
    checkpoint: that checkpoint's event, which is added as a line if a kill prevented that; None to
        rewind to the run's start.

    Return the highest step that was recorded after the save, else the highest before it, and the
    last event's time; None if no event has both. Raises CorruptError if `path` is not a regular
    file, or exceeds MAX_METRICS_BYTES.
    """
    if not path.exists() and not unwritten:
        return None
    raw = read_regular(path, max_bytes=MAX_METRICS_BYTES) if path.exists() else b""
    kept = raw[:n_bytes]
    kept = kept[: kept.rfind(b"\n") + 1]  # a half-written last line is not an event
    later = list(_events(raw[len(kept) :]))
    kept += "".join(f"{line}\n" for line in unwritten).encode()
    if checkpoint is not None and not _find_checkpoint(_events(kept), checkpoint.step):
        # A checkpoint that was saved again already has its line in `kept`.
        line = _find_checkpoint(later, checkpoint.step)
        kept += line or f"{line_of(checkpoint, None)}\n".encode()
    if checkpoint is not None:
        refused = {f"{line}\n".encode() for line in unwritten}  # written since, or just now
        for line, event in later:
            is_copy = isinstance(event, CopyMetrics) and event.step <= checkpoint.step
            if (is_copy or isinstance(event, RunResume)) and line not in refused:
                kept += line
    if raw.startswith(kept):  # needs no space on a full disk
        with storage_errors(path, "write"):
            os.truncate(path, len(kept))
    else:
        write_atomic(path, kept)
    return _reached(later) or _reached(_events(kept[kept.rfind(b"\n", 0, -1) + 1 :]))


def _reached(events: Iterable[tuple[bytes, Event]]) -> Reached | None:
    """Return the highest step and the last time among these lines with their events; None if no
    event has both."""
    found = [
        Reached(event.step, event.time)
        for _, event in events
        if event.step != UNKNOWN and not math.isnan(event.time)
    ]
    return Reached(max(each.step for each in found), found[-1].time) if found else None


def _find_checkpoint(events: Iterable[tuple[bytes, Event]], step: int) -> bytes | None:
    """Return the line, newline included, with the `checkpoint` event for `step`; None if there is
    none. `events` are lines with their events."""
    for line, event in events:
        if isinstance(event, CheckpointMetrics) and event.step == step:
            return line
    return None


def _events(lines: bytes) -> Iterator[tuple[bytes, Event]]:
    """Yield each complete line that holds an event, newline included, with the event."""
    for line in lines.splitlines(keepends=True):
        if line.endswith(b"\n") and (event := read_line(line)) is not None:
            yield line, event
