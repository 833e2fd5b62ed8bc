"""Where data lies on disk: the data folder, the cache, downloads, and folders built in one go."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pentameter.errors import ConfigError, CorruptError, StorageError

DOWNLOAD_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class PublicFile:
    """A public file of known content."""

    place: str
    """Its path below PENTAMETER_DATA_DIR or the cache, such as `shakespeare/input.txt`."""
    url: str
    sha256: str | None
    n_bytes: int
    """Its size; at most so many bytes where only git's id is known."""
    git_blob: str | None = None
    """Instead of sha256: the id that git gives the content."""

    def checksum(self) -> str:
        """The known one, with what it is: `sha256 86c4…`."""
        return f"sha256 {self.sha256}" if self.sha256 else f"git blob id {self.git_blob}"

    def checksum_of(self, content: bytes) -> str:
        """The same of any content."""
        if self.sha256:
            return f"sha256 {hashlib.sha256(content).hexdigest()}"
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        return f"git blob id {blob.hexdigest()}"


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/pentameter`, or `~/.cache/pentameter`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative value is invalid and must be ignored.
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "pentameter"


def data_folder() -> Path | None:
    """`$PENTAMETER_DATA_DIR`, where public files are looked for first; None when it is not set."""
    folder = os.environ.get("PENTAMETER_DATA_DIR")
    return Path(folder) if folder else None


def public_file(file: PublicFile) -> Path:
    """The local path of a public file, checked against its checksum.

    It is looked for below PENTAMETER_DATA_DIR, then in the cache, then downloaded into the cache.
    Raises CorruptError when a file or the download has another one, StorageError when it is
    nowhere and cannot be downloaded or written.
    """
    path = local_file(file)
    if path is not None:
        try:
            found = file.checksum_of(path.read_bytes())
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        if found != file.checksum():
            raise CorruptError(
                f"{path} is not the expected file: {found}, expected {file.checksum()}; "
                "delete it and it is downloaded again"
            )
        return path
    target = cache_folder() / file.place
    content = _download(file, _public_folders())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(content)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def local_file(file: PublicFile) -> Path | None:
    """Where a public file lies on this machine, unchecked; None where it must be downloaded."""
    paths = (folder / file.place for folder in _public_folders())
    return next((path for path in paths if path.exists()), None)


def _public_folders() -> list[Path]:
    """Where public files are looked for, in this order."""
    given = data_folder()
    return [cache_folder()] if given is None else [given, cache_folder()]


def _download(file: PublicFile, folders: list[Path]) -> bytes:
    try:
        with urllib.request.urlopen(file.url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
            content: bytes = response.read(file.n_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise StorageError(
            f"{file.place} is in none of {', '.join(map(str, folders))}, and downloading "
            f"{file.url} failed ({reason}). Without a network: put the file "
            f"({file.checksum()}) at {folders[0] / file.place}, or set "
            f"PENTAMETER_DATA_DIR to a folder that has it as {file.place}"
        ) from error
    found = file.checksum_of(content)
    if found != file.checksum():
        raise CorruptError(
            f"{file.url} gave other content than expected: {found}, expected {file.checksum()}; "
            "nothing was kept"
        )
    return content


def refuse_existing(folder: Path) -> None:
    """Raise ConfigError unless `folder` can be made anew: it is absent, or an empty folder."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ConfigError(
            f"{folder} exists and is not an empty folder; choose another, or delete it where you "
            "need nothing in it"
        )


@contextlib.contextmanager
def building(target: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target`, in one rename, on leaving.

    An error on the way removes it and leaves nothing. If `target` has appeared meanwhile, it is
    kept when `keep_existing` (another process prepared the same), else ConfigError is raised.
    Temporary folders whose process is gone are removed first. Raises StorageError when writing
    fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        owner = f"{socket.gethostname()}-{os.getpid()}"
        folder = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex[:12]}-{owner}"
        folder.mkdir()
        try:
            yield folder
            _finish(folder, target, keep_existing)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or target}: {error.strerror}; "
            "free space or choose another folder"
        ) from error


@contextlib.contextmanager
def building_alone(
    target: Path, *, keep_existing: bool = False, waiting: Callable[[], None] | None = None
) -> Iterator[Path | None]:
    """As `building`, one process at a time: others call `waiting` and wait for the first.

    None when `target` has appeared meanwhile and `keep_existing`, else ConfigError. What a killed
    process left, on whichever machine, is removed first. Where the file system has no locks, this
    is `building`. Raises StorageError when writing fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), waiting) as locked:
            if keep_existing and target.exists():
                yield None
                return
            refuse_existing(target)
            if not locked:
                with building(target, keep_existing=keep_existing) as folder:
                    yield folder
                return
            folder = target.with_name(f".{target.name}.part")  # of whoever has the lock
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
                _finish(folder, target, keep_existing)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or target}: {error.strerror}; "
            "free space or choose another folder"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None] | None) -> Iterator[bool]:
    """Hold the lock of a file, which is made for it and removed after; False without locks."""
    descriptor = _lock(path, waiting)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # first, so that who waits finds it gone, and makes it
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # children may have inherited the file
            os.close(descriptor)


def _lock(path: Path, waiting: Callable[[], None] | None) -> int | None:
    """The descriptor that holds the file's lock; None where there are no locks."""
    while True:
        try:
            # A file, and writable: NFS has no other locks.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None  # another user's, or a folder that nobody may write: that is told later
        try:
            _wait_for(descriptor, waiting)
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass  # its owner removed it while this process waited
        except OSError:
            # The file stays: another process may hold it, where locks only fail now and then.
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _wait_for(descriptor: int, waiting: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is not None:
            waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _finish(folder: Path, target: Path, keep_existing: bool) -> None:
    sync(folder)
    _rename(folder, target, keep_existing)
    sync(target.parent)


def _rename(folder: Path, target: Path, keep_existing: bool) -> None:
    try:
        folder.rename(target)  # an empty folder is replaced, one with content is not
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        if not keep_existing:
            refuse_existing(target)
            raise


def _remove_abandoned(parent: Path) -> None:
    """Remove temporary folders that processes of this machine left when they were killed."""
    for folder in parent.glob(".*.tmp-*"):
        name, _, pid = folder.name.rpartition("-")
        if name.endswith("-" + socket.gethostname()) and pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks whether the process is there
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def sync(path: Path) -> None:
    """Make a file, or the list of a folder's files, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
