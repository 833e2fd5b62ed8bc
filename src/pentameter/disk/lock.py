"""Locks between processes, on `flock`: the kernel drops it with the process, however that ends.

`building` makes a folder while other processes wait. `scratch_folder` makes one that is removed
with its process, or when the next one is made. `RunLock` (run.lock) refuses others and names the
owner, so that one process at a time owns a run folder. The record in run.lock names the holder, and
decides if `flock` does not reach: another machine on a shared disk, or a file system without locks.
The owner raises a counter in the record (its beat) every two seconds. A newcomer watches whether
that counter still moves, and compares no file times, so a clock that jumps changes nothing.
`is_held` asks the same without taking the lock.

An owner that stood still for longer (a frozen machine, a suspended process) is replaced, and does
not know it when it goes on. So whoever writes into the folder asks the lock's `Fence` before.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pentameter.disk.atomic import (
    MissingFileError,
    make_folder,
    open_regular,
    refuse_existing,
    storage_error,
    storage_errors,
    sync,
    temporary_name,
)
from pentameter.disk.beat import Beat
from pentameter.disk.owner import Owner, current_owner, is_dead, is_same_machine
from pentameter.disk.record import record_of
from pentameter.errors import CorruptError, RunFolderInUseError, StorageError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_SCRATCH, _IN_USE = "pentameter-", "in-use.lock"  # a scratch folder's name begins so; its lock
BEAT_SECONDS = 2.0
_RECORD_BYTES = 4096  # one write, one page: a reader sees the old beat or the new one
_FENCE_READINGS, _FENCE_PAUSE_SECONDS = 3, 0.01  # a beat written meanwhile may be seen half


@dataclass(frozen=True)
class Fence:
    """Check of any process of a run, before it writes to the run folder, that the RunLock at `path`
    still belongs to `owner`. Without it, a process that was suspended while another took over the
    folder would go on to write there. A frozen record."""

    path: Path
    owner: Owner
    is_owner: bool = True
    """False in another process than the owner, which may see the lock released at the run's end."""

    def check(self) -> None:
        """Raise RunFolderInUseError if the lock names another owner; StorageError if it cannot be
        read.

        If the lock file is gone, or is no such file, the owner raises RunFolderInUseError too,
        since another process may have held the lock and ended. In the run's other processes nothing
        happens.
        """
        if (owner := self._now()) == self.owner:
            return
        folder = self.path.parent
        if owner is None:
            if not self.is_owner:
                return
            raise RunFolderInUseError(
                f"{self.path} is gone, so another process may have written to {folder}, and this "
                "one ends; the same command goes on from the last checkpoint"
            )
        raise RunFolderInUseError(
            f"{owner} has taken over {folder}, while this process stood still or after somebody "
            f"removed {self.path.name}, so this one ends; let that one train, or end it and give "
            "the same command again"
        )

    def _now(self) -> Owner | None:
        for _ in range(_FENCE_READINGS):
            try:
                if (seen := _record_at(self.path)) is not None:
                    return seen[0]
            except CorruptError as error:
                if isinstance(cause := error.__cause__, OSError) and cause.errno == errno.EIO:
                    raise storage_error(self.path, "read", cause) from cause
                return None  # a link, or a folder
            time.sleep(_FENCE_PAUSE_SECONDS)
        return None


class RunLock:
    """Context manager that makes this process the owner of the folder that contains `path`
    (`…/run.lock`); creates the folder.

    Entering raises RunFolderInUseError, naming the owner, if another process holds the lock. A dead
    owner's lock is taken over: at once if the owner was on this machine, after `stale_seconds`
    without a sign of life if it was on another. The sign of life is a counter in the file, which a
    thread raises every `beat_seconds` until the context ends or another process has taken over.
    """

    def __init__(
        self,
        path: Path,
        *,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = 15.0,
        waiting: Callable[[str], None] | None = None,
    ) -> None:
        """path: the lock file. beat_seconds: time between two increments of the heartbeat counter
        in it. stale_seconds: how long the counter of an owner on another machine must stand still
        until the lock is taken over. waiting: called with a sentence for people before that wait
        begins."""
        self.path = Path(path)
        self._waiting = waiting
        self.beat_seconds = beat_seconds
        self.stale_seconds = stale_seconds
        self._owner: Owner | None = None
        self._fd = -1
        self._beat: Beat | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def fence(self) -> Fence:
        """The lock's Fence; only while the lock is held."""
        assert self._owner is not None
        return Fence(self.path, self._owner)

    def acquire(self) -> None:
        """Take the lock, and start the thread that raises the counter in its file, by which others
        see that this process lives. Raises RunFolderInUseError if another process holds the lock,
        StorageError if the file cannot be written."""
        if self._owner is not None:
            raise RuntimeError(f"{self.path} is already held by this object")
        make_folder(self.path.parent)
        watched: tuple[Owner, int] | None = None  # an owner elsewhere whose beat stood still
        while self._owner is None:
            with storage_errors(self.path, "lock"), _folder_guard(self.path.parent) as guarded:
                remote = self._try_once(guarded, watched)
            if remote is not None:
                if self._waiting is not None and remote != watched:
                    self._waiting(
                        f"{remote[0]} had {self.path.parent}, on another machine or before a "
                        f"restart; waiting {self.stale_seconds:g} s to see whether it trains"
                    )
                pause = min(self.beat_seconds, self.stale_seconds) / 4
                if (moved := _await_beat(self.path, remote, self.stale_seconds, pause)) is not None:
                    raise self._in_use(moved)
                watched = remote
        fence, beats = self.fence, itertools.count(1)
        self._beat = Beat(lambda: self._raise_counter(fence, next(beats)), self.beat_seconds)

    def release(self) -> None:
        """Stop the heartbeat, remove the lock file and release the lock; does nothing if it is not
        held.

        If another process has taken over, its file stays. A forked child only closes its copy of
        the file, so that the parent keeps the lock.
        """
        if self._owner is None:
            return
        if self._owner.pid == os.getpid():
            if self._beat is not None:
                self._beat.close()
            try:
                self.fence.check()
            except (RunFolderInUseError, StorageError):
                _unlock(self._fd)
            else:
                _release_file(self._fd, self.path)
        else:
            os.close(self._fd)
        self._owner, self._fd = None, -1

    def _try_once(
        self, guarded: bool, watched: tuple[Owner, int] | None
    ) -> tuple[Owner, int] | None:
        """Make one attempt at taking the lock. It ends in one of three ways:

        - The lock is taken: sets `_owner` and `_fd`, and returns None.
        - The lock file was removed, by its last owner or here, as its owner is dead: `_owner` stays
          None, and None is returned. Call again.
        - A process that may live, on another machine or before a restart, owns the lock: returns
          (owner, beat) from the file. A live owner keeps raising `beat`, its heartbeat counter.

        guarded: whether no other process on this machine tries at the same time (`_folder_guard`).
        watched: an (owner, beat) that was returned before, if the counter has not moved for
        `stale_seconds` since; that owner counts as dead. None if none was watched. Raises
        RunFolderInUseError if a process on this machine holds the lock, or another one takes it at
        the same time.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            locked = _flock(fd)
            if locked is not None and not _is_same_file(fd, self.path):
                return None  # its owner removed it between our two calls: try again
            record = _read_record(fd)
            me = current_owner()
            if locked is False:
                if not (guarded and record and is_dead(record[0], me)):
                    raise self._in_use(record)
                # Its owner is dead, but a forked child inherited the lock. Leave it that file.
                os.unlink(self.path)
                return None
            if record is not None and not _is_free(record[0], me, locked=locked is True):
                if is_same_machine(record[0], me):
                    raise self._in_use(record)
                if record != watched:
                    return record
                # It may only be frozen: leave it that file, so that no late beat of it is seen.
                os.unlink(self.path)
                return None
            _write_record(fd, me, 0)
            if locked is None:  # the last writer wins: does ours still stand after a moment?
                time.sleep(0.2)
                record = _record_at(self.path)
                if record is None or record[0] != me:
                    raise self._in_use(record)
            self._owner, self._fd, fd = me, fd, -1
            return None
        finally:
            if fd >= 0:
                os.close(fd)

    def _in_use(self, record: tuple[Owner, int] | None) -> RunFolderInUseError:
        owner = str(record[0]) if record else "another process"
        return RunFolderInUseError(
            f"{self.path.parent} is in use by {owner}; "
            "wait for it, end it, or use another --run-dir"
        )

    def _raise_counter(self, fence: Fence, beat: int) -> bool:
        """Write the heartbeat counter's next value, `beat`, into the lock file. Return False if
        another process has taken over, else True, even if writing failed."""
        # A full disk must not end the run; the lock itself holds.
        with suppress(OSError, StorageError):
            try:
                fence.check()
            except RunFolderInUseError:
                return False  # told to whoever writes next
            _write_record(self._fd, fence.owner, beat)
        return True


def owner_of(path: Path) -> Owner | None:
    """Return the process that the RunLock file `path` names, dead or alive; None if the file is
    absent or damaged."""
    with suppress(CorruptError, StorageError):
        seen = _record_at(path)
        return None if seen is None else seen[0]
    return None


def is_held(path: Path, *, watch_seconds: float = 3 * BEAT_SECONDS) -> bool:
    """Return whether a live process holds the RunLock at `path`, without writing to the file or
    taking its lock. An owner on another machine counts as alive if its heartbeat counter moves
    within `watch_seconds`."""
    with suppress(CorruptError, StorageError):
        seen = _record_at(path)
        if seen is None:
            return False
        me = current_owner()
        if is_same_machine(seen[0], me):
            return not is_dead(seen[0], me)
        return _await_beat(path, seen, watch_seconds, BEAT_SECONDS / 4) is not None
    return False


def _await_beat(
    path: Path, seen: tuple[Owner, int], seconds: float, pause: float
) -> tuple[Owner, int] | None:
    """Return the new (owner, beat) at `path` as soon as it differs from `seen`, the one read
    before; None if it stays the same for `seconds`. It is read every `pause` seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(pause)
        record = _record_at(path)
        if record is not None and record != seen:
            return record
    return None


def _record_at(path: Path) -> tuple[Owner, int] | None:
    """Return a lock file's record (owner, beat); None if the file is absent or holds none. Raises
    CorruptError if it is no regular file, StorageError if it cannot be read."""
    # Opened anew each time: that is what makes a network file system look again.
    with suppress(MissingFileError), open_regular(path) as file:
        return _read_record(file.fileno())
    return None


@contextmanager
def _folder_guard(folder: Path) -> Iterator[bool]:
    """Context manager that lets one process on this machine at a time try to take the lock in
    `folder`, by a `flock` on the folder. Yields True; yields False if the file system has no locks,
    in which case several processes may try at once."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _flock(fd, wait=True) is not None
    finally:
        os.close(fd)


def _flock(fd: int, *, wait: bool = False) -> bool | None:
    """Try to lock the open file `fd` exclusively; with `wait`, wait until another process releases
    it. Return True if the lock is now this process's, False if another holds it, None if the file
    system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _release_file(fd: int, path: Path) -> None:
    """Remove the locked file and release its lock. Processes that wait for the lock then find the
    file gone."""
    with suppress(OSError):
        if _is_same_file(fd, path):
            os.unlink(path)
    _unlock(fd)


def _unlock(fd: int) -> None:
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # children may have inherited the file
    os.close(fd)


@contextmanager
def building(target: Path, waiting: Callable[[], None] | None = None) -> Iterator[Path]:
    """Context manager that yields a temporary folder, which on leaving is synced and renamed to
    `target`.

    One process at a time builds: the others call `waiting`, if it is given, and wait for the first.
    An error leaves nothing behind; what a killed process left, on whichever machine, is removed
    first. If the file system has no locks, each process builds in its own folder. Raises
    FolderExistsError if `target` exists, also if it has appeared meanwhile, StorageError if writing
    fails.
    """
    with storage_errors(target, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock, part = (target.with_name(f".{target.name}.{kind}") for kind in ("lock", "part"))
        fd = _await_lock(lock, waiting)
        folder = part.with_name(temporary_name(part.name)) if fd is None else part
        try:
            refuse_existing(target)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
            sync(folder)
            try:
                folder.rename(target)  # an empty folder is replaced, one with content is not
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    refuse_existing(target)
                raise
            sync(target.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if fd is not None:
                _release_file(fd, lock)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Context manager that yields a private temporary folder, and removes it on leaving. First it
    removes those that killed processes have left.

    A file in the folder stays locked while this process lives, so a folder whose lock can be taken
    has no owner any more. If the file system has no locks, a killed process's folder stays.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*/{_IN_USE}"):
        _remove_if_left(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        try:
            fd = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # see below
        with suppress(OSError):
            _write_record(fd, current_owner(), 0)
        if _flock(fd) is not False and _is_same_file(fd, folder / _IN_USE):
            break
        os.close(fd)  # another process took it for one that was left, before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _remove_if_left(path: Path) -> None:
    """Remove the scratch folder that contains the file `path`, if the process that made the folder
    has certainly ended."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            record = _read_record(fd)
            if record is None or os.fstat(fd).st_uid != os.getuid() or not _flock(fd):
                return
            if _is_free(record[0], current_owner(), locked=True):
                shutil.rmtree(path.parent, ignore_errors=True)
        finally:
            os.close(fd)


def _await_lock(path: Path, waiting: Callable[[], None] | None) -> int | None:
    """Wait for the `flock` on the file `path`, created if absent, and return its descriptor.
    `waiting` is called each time another process holds it. Returns None if the file system has no
    locks or the file cannot be created."""
    while True:
        try:
            # A file, and writable: NFS has no other locks.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            return None  # another user's, or a folder that nobody may write
        is_ours = False
        try:
            is_locked = _flock(fd)
            if is_locked is False:
                if waiting is not None:
                    waiting()
                is_locked = _flock(fd, wait=True)
            if is_locked is None:
                # The file stays: another process may hold it, where locks only fail now and then.
                return None
            if is_ours := _is_same_file(fd, path):
                return fd
        except OSError:
            return None
        finally:
            if not is_ours:
                os.close(fd)


def _is_same_file(fd: int, path: Path) -> bool:
    """Return whether `path` still names the open file `fd`; False if it was removed or replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write_record(fd: int, owner: Owner, beat: int) -> None:
    # The beat comes last: it may get longer, and what is read meanwhile has the owner whole.
    text = json.dumps({**asdict(owner), "beat": beat}, indent=1) + "\n"
    os.pwrite(fd, text.encode().ljust(_RECORD_BYTES), 0)
    os.fsync(fd)  # no more: a beat need not survive a power loss


def _read_record(fd: int) -> tuple[Owner, int] | None:
    """Return the lock record (owner, beat) in the open file; None if it is empty or damaged by a
    crash."""

    def seen(pid: int, beat: int, **owner: Any) -> tuple[Owner, int]:
        return Owner(int(pid), **owner), int(beat)

    return record_of(os.pread(fd, _RECORD_BYTES, 0), seen)


def _is_free(owner: Owner, me: Owner, *, locked: bool) -> bool:
    """Return whether the process that a lock file names, `owner`, has certainly ended, as far as
    this process, `me`, can tell. `locked`: whether this process holds the file's `flock`."""
    if locked and (is_same_machine(owner, me) or (owner.boot == me.boot and owner.boot)):
        return True  # one kernel keeps both locks: had the owner lived, we would not have got it
    return is_dead(owner, me)
