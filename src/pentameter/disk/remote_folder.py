"""A folder in an object store (`s3://bucket/prefix`), or on another file system that `fsspec` opens
by URL: objects are written whole and read back, read by name, listed and removed.

A request that fails is repeated after pauses that double, with jitter. What a listing says may be
old: it names what to look for, and never says that an object is there or is not.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pentameter.config.urls import shown_url
from pentameter.disk.atomic import FileRecord, check_hash, storage_errors, temporary_name
from pentameter.disk.file_systems import LOG_IN, has_folders, open_file_system, reason, retried
from pentameter.errors import ConfigError, CorruptError, PentameterError, StorageError

START_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between the attempts at a request while somebody waits for the run to start."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)
"""Seconds between the attempts while training goes on; at most, as each is cut by up to a half."""

BLOCK_BYTES = 8 * 2**20
N_BLOCKS = 4
"""Blocks of BLOCK_BYTES that are requested together; so much memory a transfer takes."""

_PUTS_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory")
"""Schemes whose objects appear whole or not at all, in folders that need not be created."""

Result = TypeVar("Result")


def any_writer() -> None:
    """Do nothing: the default check, for a folder that one process alone writes to."""


class _UnequalError(Exception):
    """An object is not there, or not what was written; that may pass."""


class RemoteFolder:
    """The folder at a URL. Names of objects in it are relative and may contain `/`.

    Errors are StorageError after the last attempt and for one that will not pass (permission), with
    the URL without secrets. `pauses` are the seconds between attempts, and may be changed; so may
    `check_writer`, which is called before each object is written or removed, and may raise.
    """

    def __init__(self, url: str) -> None:
        """Open the file system. Raises ConfigError, with the pip command, if its package is not
        installed, and for a scheme that is unknown or cannot be written."""
        self.url = url.rstrip("/")
        self.pauses: Sequence[float] = START_PAUSES
        self.check_writer: Callable[[], None] = any_writer
        if not has_folders(url):
            raise ConfigError(
                f"{shown_url(url)}: nothing can be written over HTTP; name an object store "
                "(s3://, gs://, …) or another file system (file://, sftp://, …)"
            )
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        self._fs, path = open_file_system(url, "writing", "leave checkpoint.copy_to out", **options)
        self._path = path.rstrip("/")
        self._puts_whole = urlsplit(url).scheme.lower() in _PUTS_WHOLE

    def __str__(self) -> str:
        return shown_url(self.url)

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """Return an object's content, None if there is none of that name. Raises CorruptError if it
        is larger than `max_bytes`."""

        def ask() -> bytes | None:
            try:
                data: bytes = self._fs.cat_file(self._at(name), start=0, end=max_bytes + 1)
                return data
            except FileNotFoundError:
                return None

        data = self._retried("read", name, ask)
        if data is not None and len(data) > max_bytes:
            raise CorruptError(f"{self}/{name} is larger than {max_bytes:,} bytes")
        return data

    def put(self, name: str, content: bytes) -> FileRecord:
        """Write an object, replacing one of that name whole; it reads back equal on return. Returns
        its name (the last part), size and sha256."""
        sha256 = hashlib.sha256(content).hexdigest()
        record = FileRecord(name.rpartition("/")[2], len(content), sha256)
        self._put(name, record, lambda path: self._fs.pipe_file(path, content))
        return record

    def put_file(self, name: str, source: Path, record: FileRecord) -> None:
        """Write an object with the content of the file `source`; on return it reads back as
        `record` says. Raises CorruptError if the file itself differs from its record."""
        try:
            self._put(name, record, lambda path: self._fs.put_file(str(source), path))
        except StorageError:
            with storage_errors(source, "read"), source.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            check_hash(source, record, sha256)
            raise

    def _put(self, name: str, record: FileRecord, write: Callable[[str], object]) -> None:
        """Call `write` with a path until what lies under `name` reads back as `record` says. A file
        system with folders gets it under a temporary name, which is renamed."""
        self.check_writer()
        path = self._at(name)

        def attempt() -> None:
            if self._puts_whole:
                write(path)
            else:
                folder, _, last = path.rpartition("/")
                temporary = f"{folder}/{temporary_name(last)}"
                self._fs.makedirs(folder, exist_ok=True)
                try:
                    write(temporary)
                    self._fs.mv(temporary, path)
                except BaseException:
                    with suppress(Exception):
                        self._fs.rm_file(temporary)
                    raise
            try:
                is_equal = self._sha256(name, record.n_bytes) == record.sha256
            except PentameterError as error:
                raise _UnequalError(str(error)) from error
            if not is_equal:
                raise _UnequalError("what was stored does not read back")

        self._retried("write", name, attempt)

    def _sha256(self, name: str, n_bytes: int) -> str:
        digest = hashlib.sha256()
        for block in self._blocks(name, n_bytes, self.pauses[:3]):
            digest.update(block)
        return digest.hexdigest()

    def blocks(self, name: str, n_bytes: int) -> Iterator[bytes]:
        """Yield an object's `n_bytes` bytes in order, N_BLOCKS blocks requested at a time. Raises
        CorruptError if it has another size or is not there, StorageError if it cannot be read."""
        return self._blocks(name, n_bytes, self.pauses)

    def _blocks(self, name: str, n_bytes: int, pauses: Sequence[float]) -> Iterator[bytes]:
        path = self._at(name)
        for first in range(0, n_bytes, BLOCK_BYTES * N_BLOCKS):
            starts = [*range(first, min(first + BLOCK_BYTES * N_BLOCKS, n_bytes), BLOCK_BYTES)]
            ends = [min(start + BLOCK_BYTES, n_bytes) for start in starts]

            def ask(starts: list[int] = starts, ends: list[int] = ends) -> list[bytes]:
                beyond = [end + (end == n_bytes) for end in ends]  # a byte too many would show
                try:
                    found = self._fs.cat_ranges(
                        [path] * len(ends), starts, beyond, on_error="raise"
                    )
                except FileNotFoundError as error:  # a store may show late what was just written
                    raise _UnequalError("it is not there") from error
                for start, end, block in zip(starts, ends, found, strict=True):
                    if len(block) != end - start:
                        raise _UnequalError(f"it does not have {n_bytes:,} bytes")
                return list(found)

            yield from self._retried("read", name, ask, pauses)

    def remove(self, name: str) -> None:
        """Remove an object; one that is gone is fine."""
        self.check_writer()

        def ask() -> None:
            with suppress(FileNotFoundError, KeyError):
                self._fs.rm_file(self._at(name))

        self._retried("remove", name, ask)

    def names(self) -> list[str]:
        """List the objects in the folder and below it, sorted. The list may be old."""

        def ask() -> list[str]:
            self._fs.invalidate_cache()
            return [str(each) for each in self._fs.find(self._path)]

        prefix = f"{self._path}/"
        found = self._retried("list", "", ask)
        return sorted(each.removeprefix(prefix) for each in found if each.startswith(prefix))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _retried(
        self,
        doing: str,
        name: str,
        ask: Callable[[], Result],
        pauses: Sequence[float] | None = None,
    ) -> Result:
        where = f"{self}/{name}".rstrip("/")

        def failed(error: Exception, n_attempts: int) -> PentameterError:
            if isinstance(error, _UnequalError) and doing == "read":
                return CorruptError(f"{where} is damaged: {error}")
            told = str(error) if isinstance(error, _UnequalError) else reason(self.url, error)
            if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                return StorageError(f"cannot {doing} {where}: {told}; {LOG_IN}")
            if isinstance(error, FileNotFoundError):
                return StorageError(f"cannot {doing} {where}: {told}; is there such a bucket?")
            times = f" after {n_attempts} attempts" if n_attempts > 1 else ""
            return StorageError(f"cannot {doing} {where}{times}: {told}; check the network")

        # Not keyed: nodes that failed together must not come back together.
        jitter = [pause * random.uniform(0.5, 1.0) for pause in pauses or self.pauses]
        return retried(ask, jitter, failed)
