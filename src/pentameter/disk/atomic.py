"""Crash-safe files and folders: written under a temporary name, synced, then renamed. Also safe
reading: a file that another program may have placed is opened without blocking, read up to a
maximum size, and verified.

Everything goes through `os` functions, one system call each, so that a test can stop a save before
any single one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

from pentameter.errors import ConfigError, CorruptError, StorageError

_BLOCK_BYTES = 4 * 2**20  # handed to the hashing thread at once
_INLINE_BYTES = 2**20  # below this a thread costs more than it saves
_MAX_UNHASHED = 64  # pieces the hashing may lag behind: what a save keeps in memory

LIMIT_BYTES = 1 << 28
"""Maximum size in bytes when another program's file is read whole."""
MAX_JSON_BYTES = 64 * 2**20
"""Maximum size in bytes of a JSON file of our own: they are small; more is an attack or a mistake.
"""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}$")

_REMEDIES = {
    errno.ENOSPC: "free some space or use another folder",
    errno.EDQUOT: "the disk quota is used up; free some space or use another folder",
    errno.EROFS: "the file system is read-only; use another folder",
    errno.EACCES: "permission denied; use a folder you may write to",
    errno.EPERM: "permission denied; use a folder you may write to",
    errno.EFBIG: "a file-size limit is in force; raise it (ulimit -f)",
    errno.EIO: "the disk reports an error; check it, or use another disk",
    errno.ENOENT: "it is not there (any more); was it removed or unmounted?",
    errno.ENOTDIR: "a file stands where a folder should be; use another path",
    errno.ELOOP: "a symbolic link stands there, which could lead anywhere; remove it",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
}
_OTHER_REMEDY = "check the disk, or use another folder"
_FOR_READING = {
    errno.EACCES: "this user may not read it; have its permissions changed, or name another",
    errno.EPERM: "this user may not read it; have its permissions changed, or name another",
    errno.EISDIR: "a folder stands where a file should be; name a file",
}
_OTHER_FOR_READING = "check the disk"


@dataclass(frozen=True)
class FileRecord:
    """The name, the size in bytes and the sha256 (hex) that a file must have. A frozen record."""

    name: str
    n_bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        """Return the record of a file with this name and content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest())


def storage_error(path: Path | str, doing: str, error: OSError) -> StorageError:
    """Return, without raising it, a StorageError for an OSError at `path`, with the message `cannot
    DOING PATH: reason; remedy`. `doing` is a verb: with `read` and `list` the remedy suits a
    reader, with any other a writer."""
    remedies, other = _REMEDIES, _OTHER_REMEDY
    if doing in ("read", "list"):
        remedies, other = _REMEDIES | _FOR_READING, _OTHER_FOR_READING
    remedy = remedies.get(error.errno or 0, other)
    return StorageError(f"cannot {doing} {path}: {error.strerror or error}; {remedy}")


@contextmanager
def storage_errors(path: Path | str, doing: str) -> Iterator[None]:
    """Turn an OSError in the `with` body into a StorageError, `cannot DOING PATH: reason; remedy`;
    `doing` is a verb."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, doing, error) from error


def temporary_name(name: str) -> str:
    """Return `name.tmp-<uuid>`, which readers ignore as unfinished; unique at each call."""
    return f"{name}.tmp-{uuid.uuid4().hex}"


def is_temporary(name: str) -> bool:
    """Return whether `name` ends as `temporary_name` makes it: `.tmp-` and a UUID in hex."""
    return _TEMPORARY.search(name) is not None


def sync_descriptor(fd: int) -> None:
    """Make what was written to an open file survive a power loss; raises OSError. macOS's `fsync`
    leaves it in the drive's cache, which F_FULLFSYNC empties where the file system knows it."""
    import fcntl  # planning alone needs none of it, and Windows has none

    command = getattr(fcntl, "F_FULLFSYNC", None)
    if command is not None:
        with suppress(OSError):
            fcntl.fcntl(fd, command)
            return
    os.fsync(fd)


def sync(path: Path) -> None:
    """Make a file, or a folder's entries (creations, renames), survive a power loss.

    A file system that refuses to sync folders (some network ones) is accepted. Raises StorageError.
    """
    with storage_errors(path, "sync"):
        fd = os.open(path, os.O_RDONLY)
        try:
            sync_descriptor(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
                raise
        finally:
            os.close(fd)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, each synced into its parent; an existing one is fine. Raises
    StorageError."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    for folder in reversed(missing):
        with storage_errors(folder, "create the folder"):
            with suppress(FileExistsError):
                os.mkdir(folder)
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        sync(folder.parent)


def write_atomic(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file's whole content. A reader finds the old content or the new one, never a mix.

    With `durable` that also holds after a crash or a power loss, and the new content is on disk on
    return. mode: the file's permission bits, before the process's umask takes some away. Raises
    StorageError if writing fails; the old file is unchanged then.
    """
    temporary = path.with_name(temporary_name(path.name))
    try:
        with storage_errors(path, "write"):
            _write_hashed(temporary, [data], durable=durable, mode=mode)
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync(path.parent)


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file from `chunks` (its bytes, in order), sync it, and return its name, size and
    sha256.

    A second thread hashes behind the writing and during the final sync, so a large file costs about
    the slower of the two. Raises StorageError if the file exists or writing fails; the partial file
    is left for the caller to remove.
    """
    with storage_errors(path, "write"):
        return _write_hashed(path, chunks)


def _write_hashed(
    path: Path, chunks: Iterable[bytes | memoryview], *, durable: bool = True, mode: int = 0o666
) -> FileRecord:
    """Write, sync (if `durable`) and hash a new file as `write_hashed` does, but raise OSError."""
    digest = hashlib.sha256()
    n_bytes = 0
    unhashed: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as pool:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), _BLOCK_BYTES):
                    block = view[start : start + _BLOCK_BYTES]
                    if len(block) < _INLINE_BYTES and not unhashed:
                        digest.update(block)
                    else:
                        unhashed.append(pool.submit(digest.update, block))
                    n_bytes += len(block)
                    rest = block
                    while rest:
                        rest = rest[os.write(fd, rest) :]
                    while len(unhashed) > _MAX_UNHASHED or (unhashed and unhashed[0].done()):
                        unhashed.popleft().result()
            if durable:
                sync_descriptor(fd)
        finally:
            os.close(fd)
        for hashing in unhashed:
            hashing.result()
    return FileRecord(path.name, n_bytes, digest.hexdigest())


def write_verified(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file from `chunks`, sync it, read it back and compare; return its name, size and
    sha256.

    Raises StorageError if the file exists, writing fails or the content read differs.
    """
    record = write_hashed(path, chunks)
    try:
        check_file(path.parent, record, hash_content=True)
    except CorruptError as error:
        raise StorageError(
            f"what was written does not read back: {error}; this disk loses data, use another"
        ) from error
    return record


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the file system with `folder`. Raises
    StorageError."""
    with storage_errors(folder, "ask for the free space of"):
        status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


SPARE_BYTES = 2**20
"""Bytes that stay free beside what is written: for folder entries, block rounding and logs."""


def check_free_space(folder: Path, n_bytes: int) -> None:
    """Raise StorageError unless the file system with `folder` has `n_bytes` bytes free, and
    SPARE_BYTES more."""
    free = free_bytes(folder)
    if free < n_bytes + SPARE_BYTES:
        raise StorageError(
            f"cannot write {n_bytes:,} bytes to {folder}, beside {SPARE_BYTES:,} that stay free: "
            f"{free:,} bytes are free; free some space or use another folder"
        )


class FolderExistsError(ConfigError):
    """Raised when a folder that is to be created exists already and is not empty."""


def refuse_existing(folder: Path) -> None:
    """Raise FolderExistsError unless `folder` is absent or an empty folder."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise FolderExistsError(
            f"{folder} exists and is not an empty folder; choose another, or delete it where you "
            "need nothing in it"
        )


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a symlink or a file alone, without following symlinks;
    one already gone is fine. Raises StorageError."""
    with storage_errors(path, "remove"), suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def read_regular(path: Path, *, max_bytes: int, follow_symlinks: bool = False) -> bytes:
    """Return a regular file's content. Raises CorruptError if it is larger than `max_bytes`, no
    regular file, or a symlink without `follow_symlinks`; MissingFileError if it is absent;
    StorageError if it cannot be read."""
    with open_regular(path, follow_symlinks=follow_symlinks) as file:
        is_larger = os.fstat(file.fileno()).st_size > max_bytes
        data = b"" if is_larger else file.read(max_bytes + 1)
    if is_larger or len(data) > max_bytes:
        raise CorruptError(f"{path} is larger than {max_bytes:,} bytes, so it is not what it says")
    return data


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """Return the UTF-8 text in another program's file; symlinks are followed.

    Raises ConfigError if it is absent, CorruptError if it is no text, no regular file or larger
    than `limit_bytes`, StorageError if it cannot be read.
    """
    return _utf8(_read_foreign(path, limit_bytes), path)


def read_json(path: Path, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """Return the JSON object in another program's file; symlinks are followed.

    Raises ConfigError if it is absent, CorruptError if it is no JSON object, no regular file or
    larger than `limit_bytes`, StorageError if it cannot be read.
    """
    return decode_json(_read_foreign(path, limit_bytes), path)


def read_own_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that this package wrote; no symlink is followed. Raises
    CorruptError if it is missing or damaged, StorageError if it cannot be read."""
    return decode_json(read_regular(path, max_bytes=MAX_JSON_BYTES), path)


def decode_json(data: bytes, path: Path) -> dict[str, Any]:
    """Parse UTF-8 `data` as a JSON object; CorruptError, naming `path` (the data's source), for
    anything else."""
    try:
        content = json.loads(_utf8(data, path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path} is malformed: it is not a JSON object")
    return content


def _read_foreign(path: Path, limit_bytes: int) -> bytes:
    try:
        return read_regular(path, max_bytes=limit_bytes, follow_symlinks=True)
    except MissingFileError as error:
        raise ConfigError(f"{path} does not exist") from error


def _utf8(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path} is damaged: not UTF-8 at byte {error.start}") from error


def no_check() -> None:
    """Do nothing: the default for a callback that a long operation calls again and again, and that
    may raise an error to end it."""


def check_file(
    folder: Path, record: FileRecord, *, hash_content: bool, go_on: Callable[[], None] = no_check
) -> None:
    """Raise CorruptError, naming the file, unless `folder` has a regular file with the record's
    name and size and, with `hash_content`, its sha256; StorageError if the file cannot be read.
    `go_on` is called after each block that was hashed; an error that it raises ends the check."""
    path = folder / record.name
    with open_regular(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes != record.n_bytes:
            raise CorruptError(
                f"{path} is damaged: it has {n_bytes:,} bytes, its manifest says {record.n_bytes:,}"
            )
        if hash_content:
            digest, block = hashlib.sha256(), memoryview(bytearray(_INLINE_BYTES))
            while n_read := file.readinto(block):
                digest.update(block[:n_read])
                go_on()
            check_hash(path, record, digest.hexdigest())


def check_files(
    folder: Path,
    records: Collection[FileRecord],
    *,
    hash_content: bool = True,
    n_threads: int = 8,
    go_on: Callable[[], None] = no_check,
) -> None:
    """Raise CorruptError naming the first file in `folder` that does not match its record.

    Sizes are compared first: they reveal most damage without reading gigabytes. With
    `hash_content`, sha256 hashes follow, in up to `n_threads` threads; `go_on` is called after each
    block that was hashed, and an error that it raises ends the check.
    """
    for record in records:
        check_file(folder, record, hash_content=False)
    if hash_content:
        check = partial(check_file, folder, hash_content=True, go_on=go_on)
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(check, records))


def read_checked(
    folder: Path, records: Iterable[FileRecord], name: str, *, max_bytes: int
) -> bytes:
    """Return the content of the small file `name` in `folder`, verified against its record.

    `records` say which size and sha256 the folder's files must have. Raises CorruptError if no
    record has this name, the file is missing, larger than `max_bytes`, or its sha256 differs;
    StorageError if it cannot be read.
    """
    path = folder / name
    record = next((each for each in records if each.name == name), None)
    if record is None:
        raise CorruptError(f"{folder} has no file {name!r}")
    data = read_regular(path, max_bytes=min(record.n_bytes, max_bytes))
    check_hash(path, record, hashlib.sha256(data).hexdigest())
    return data


def sha256_of(path: Path) -> str:
    """Return a file's sha256, in hex; symlinks are followed. Raises StorageError if it cannot be
    read."""
    with storage_errors(path, "read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(content: Any) -> str:
    """Return the sha256, in hex, over JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_hash(path: Path | str, record: FileRecord, sha256: str) -> None:
    """Raise CorruptError, naming the file at `path`, unless its hash `sha256`, which the caller has
    computed, equals the one in `record`."""
    if sha256 != record.sha256:
        raise CorruptError(f"{path} is damaged: its sha256 is not the one in its manifest")


class MissingFileError(CorruptError):
    """Raised when a file that is to be read does not exist."""


@contextmanager
def open_regular(path: Path, *, follow_symlinks: bool = False) -> Iterator[BufferedReader]:
    """Open a regular file for reading that another program may have placed.

    Never waits for a pipe or reads a device, which may have no end. A symlink at `path` is followed
    only with `follow_symlinks`; folders in the path may be symlinks. Raises CorruptError for a
    symlink without it and for anything but a regular file, MissingFileError if it is absent,
    StorageError if it cannot be read.
    """
    try:
        # Non-blocking, so that a pipe planted under the name cannot hang the reader.
        not_followed = 0 if follow_symlinks else os.O_NOFOLLOW
        fd = os.open(path, os.O_RDONLY | not_followed | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CorruptError(f"{path} is not a regular file")
            with open(fd, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise MissingFileError(f"{path} is missing") from error
        if error.errno == errno.ELOOP and path.is_symlink():
            raise CorruptError(f"{path} is a symbolic link, which could lead anywhere") from error
        if error.errno == errno.ENXIO:  # what a socket answers
            raise CorruptError(f"{path} is not a regular file") from error
        if error.errno == errno.EIO:
            raise CorruptError(f"{path} cannot be read: {error.strerror}") from error
        raise storage_error(path, "read", error) from error
