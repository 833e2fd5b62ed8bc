"""A file that grows by whole lines, and never ends the run that writes it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pentameter.disk.atomic import storage_error, write_atomic
from pentameter.errors import StorageError

MAX_UNWRITTEN = 10_000  # lines kept for a disk that refuses them; beyond, the oldest are lost


class LogFile:
    """Appends lines to `path`, which is created with the first one.

    A failing write (a full disk, a folder that is gone) calls `warn` with one line, once; what
    could not be written is kept, and written in order as soon as it can be. No line is ever left
    half-written before another one. A file that somebody removes is put back.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
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
        """Bytes of whole lines in the file, on disk where the disk allows it."""
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
        """The open file that `path` names now."""
        if self._fd is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                    return self._fd
            if not self.path.exists():
                write_atomic(self.path, os.pread(self._fd, self._size(), 0))
            os.close(self._fd)
            self._fd = self._torn_at = None
        self._fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode=0o666
        )
        return self._fd

    def _size(self) -> int:
        if self._torn_at is not None:
            return self._torn_at
        return (os.stat(self.path) if self._fd is None else os.fstat(self._fd)).st_size
