"""A folder in an object store (`s3://bucket/prefix`), or on another file system that `fsspec` opens
by URL. Objects are written whole and read back, read by name, listed and removed.

A request that fails is repeated after pauses that double, with jitter. A listing may be out of
date: it suggests names to look for, and never proves that an object exists or does not.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pentameter.config.urls import shown_url
from pentameter.disk.atomic import FileRecord, check_file, no_check, temporary_name
from pentameter.disk.file_systems import LOG_IN, has_folders, open_file_system, reason, status_of
from pentameter.disk.retrying import growing, retried
from pentameter.errors import ConfigError, CorruptError, PentameterError, StorageError

START_PAUSES = tuple(growing(1.0, 4))
"""Seconds between the attempts at a request while somebody waits for the run to start."""
PAUSES = tuple(growing(1.0, 10, longest=60.0))
"""Seconds between attempts while training goes on, before jitter shortens each by up to a half."""

BLOCK_BYTES = 8 * 2**20
N_BLOCKS = 4
"""Number of blocks of BLOCK_BYTES that are requested at once; a transfer takes so much memory."""

_PART_ATTEMPTS, _IN_PARTS_BYTES = 5, 64 * 2**20

_PUTS_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory")
"""Schemes whose objects appear whole or not at all, in folders that need not be created."""

SAY_AFTER_SECONDS = 5.0
"""Seconds for which requests must have failed before `Attempts.take_word` has a line for people."""

_JITTER = random.SystemRandom()

Result = TypeVar("Result")


class _UnequalError(Exception):
    """Raised when an object that was just written is absent, or is not what was written; another
    attempt may succeed."""


class Attempts:
    """The state of an object store whose requests fail: its latest error, since when it fails, and
    for how long requests are repeated. The thread that makes the requests reports to it; another
    thread may read it, limit the repeats, or end them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._since: float | None = None  # when the first request began that has not succeeded yet
        self._answer, self._rest_seconds, self._is_told = "", 0.0, False
        self._limited_at, self._limit_seconds = 0.0, math.inf
        self.is_abandoned = False

    def limit(self, seconds: float) -> None:
        """From now on, let failing requests be repeated for `seconds` in all, summed over requests.
        `take_word` will tell the new limit. Does nothing if there is a limit already."""
        with self._changed:
            if self._limit_seconds == math.inf:
                self._limited_at, self._limit_seconds = time.monotonic(), seconds
                self._is_told = False
                self._changed.notify_all()

    def abandon(self) -> None:
        """Make the requesting thread give up: it starts no further request and repeats none. For
        callers that need the result no longer."""
        with self._changed:
            self.is_abandoned = True
            self._changed.notify_all()

    @property
    def left_seconds(self) -> float:
        """Seconds of the limit that are left, negative if it is exceeded; infinite without one."""
        with self._changed:
            since = self._since
            now = time.monotonic()
            used = 0.0 if since is None else now - max(since, self._limited_at)
            return self._limit_seconds - used

    @property
    def answer(self) -> str | None:
        """The store's latest error in words; None if the latest request has succeeded."""
        return None if self._since is None else self._answer

    def failed(self, began_at: float, answer: str, pause: float, rest_seconds: float) -> bool:
        """Record that a request failed, and sleep for `pause` seconds. Return True if it may be
        made again; False, perhaps before the pause is over, if the limit is used up or requests
        were abandoned.

        began_at: when the request was first made (`time.monotonic`). answer: the error in words.
        rest_seconds: the sum of the pauses that would follow this one.
        """
        with self._changed:
            self._since = began_at if self._since is None else self._since
            self._answer, self._rest_seconds = answer, pause + rest_seconds
            end = time.monotonic() + pause
            while not self.is_abandoned and (left := self.left_seconds) > 0:
                if (now := time.monotonic()) >= end:
                    return True
                self._changed.wait(min(end - now, left))
        return False

    def succeeded(self) -> None:
        """Note that the latest request has succeeded, perhaps after it had failed."""
        with self._changed:
            self._limit_seconds = max(0.0, self.left_seconds)
            self._since, self._is_told = None, False

    def take_word(self) -> str | None:
        """Return a line to print about a store that fails: its latest error, and for how long at
        most requests are repeated. Each series of failures gives one line, once requests have
        failed for SAY_AFTER_SECONDS. Return None before that, and after the line was returned until
        a request succeeds or a limit is set."""
        with self._changed:
            if self._is_told or self._since is None:
                return None
            if time.monotonic() - self._since < SAY_AFTER_SECONDS:
                return None
            self._is_told = True
            seconds = max(0.0, min(self._rest_seconds, self.left_seconds))
            return f"{self._answer}; it is asked again for {seconds:.0f} s at most"


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
        self.attempts = Attempts()
        self.check_writer: Callable[[], None] = no_check  # one process alone writes
        self._depth = 0  # of requests within one another
        if not has_folders(url):
            raise ConfigError(
                f"{shown_url(url)}: nothing can be written over HTTP; name an object store "
                "(s3://, gs://, …) or another file system (file://, sftp://, …)"
            )
        options = {"skip_instance_cache": True, "use_listings_cache": False, **_asked_once(url)}
        self._fs, path = open_file_system(url, "writing", "leave checkpoint.copy_to out", **options)
        self._path = path.rstrip("/")
        self._repeats = isinstance(getattr(self._fs, "retries", None), int)  # s3fs does
        self._let_repeat(1)
        self._puts_whole = urlsplit(url).scheme.lower() in _PUTS_WHOLE

    def __str__(self) -> str:
        return shown_url(self.url)

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """Return an object's content; None if the object does not exist. Raises CorruptError if it
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
        """Write an object, replacing one of that name; on return it has been read back and is
        equal. Return its name (the last part), size and sha256."""
        record = FileRecord.of(name.rpartition("/")[2], content)
        self._put(name, record, lambda path: self._fs.pipe_file(path, content))
        return record

    def put_file(self, name: str, source: Path, record: FileRecord) -> None:
        """Write an object with the content of the file `source`; on return it reads back as
        `record` says. Raises CorruptError if the file itself differs from its record."""

        def send(path: str) -> None:
            check_file(source.parent, record, hash_content=False)
            # Of what is sent in parts, the client repeats a part; else all would be sent again.
            self._let_repeat(_PART_ATTEMPTS if record.n_bytes > _IN_PARTS_BYTES else 1)
            try:
                self._fs.put_file(str(source), path)
            finally:
                self._let_repeat(1)

        self._put(name, record, send, lambda: check_file(source.parent, record, hash_content=True))

    def _let_repeat(self, n_attempts: int) -> None:
        """Set how many attempts s3fs itself makes at a request; other file systems have no such
        setting. It is usually 1, as requests are repeated in this class."""
        if self._repeats:
            self._fs.retries = n_attempts

    def _put(
        self,
        name: str,
        record: FileRecord,
        write: Callable[[str], object],
        check_source: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the object `name` and read it back, again and again until its content is what
        `record` says. On a file system with folders, it is written under a temporary name and
        renamed.

        write: writes the content to the path that it is given. check_source: called after each
        failed attempt, raises an error if the source itself is damaged, so that no attempt could
        succeed.
        """
        self.check_writer()
        path = self._at(name)

        def attempt() -> None:
            try:
                if self._puts_whole:
                    write(path)
                else:
                    self._put_renamed(path, write)
                try:
                    stored = self.blocks(name, record.n_bytes, self.pauses[:3])
                    is_equal = _sha256(stored) == record.sha256
                except PentameterError as error:
                    raise _UnequalError(str(error)) from error
                if not is_equal:
                    raise _UnequalError("what was stored does not read back")
            except Exception:
                check_source()
                raise

        self._retried("write", name, attempt)

    def _put_renamed(self, path: str, write: Callable[[str], object]) -> None:
        """Call `write` with a temporary path, and rename what is there to `path`."""
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

    def blocks(
        self, name: str, n_bytes: int, pauses: Sequence[float] | None = None
    ) -> Iterator[bytes]:
        """Yield an object's `n_bytes` bytes in order, N_BLOCKS blocks requested at a time. `pauses`
        replaces the folder's own. Raises CorruptError if it has another size or is not there,
        StorageError if it cannot be read."""
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

    def remove(self, name: str, pauses: Sequence[float] | None = None) -> None:
        """Remove an object; one that is gone is fine. `pauses` replaces the folder's own."""
        self.check_writer()

        def ask() -> None:
            with suppress(FileNotFoundError, KeyError):
                self._fs.rm_file(self._at(name))

        self._retried("remove", name, ask, pauses)

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
        where, began_at = f"{self}/{name}".rstrip("/"), time.monotonic()

        def told_of(error: Exception) -> str:
            return str(error) if isinstance(error, _UnequalError) else reason(self.url, error)

        def failed(error: Exception, n_attempts: int) -> PentameterError:
            return _failure(doing, where, error, told_of(error), n_attempts)

        # Not keyed: nodes that failed together must not come back together. Nor does it draw from
        # the generator of a user's code.
        pauses = self.pauses if pauses is None else pauses
        jitter = [pause * _JITTER.uniform(0.5, 1.0) for pause in pauses]
        rest = sum(jitter)

        def wait(error: Exception, pause: float) -> bool:
            nonlocal rest
            rest -= pause
            answer = f"cannot {doing} {where}: {told_of(error)}"
            return self.attempts.failed(began_at, answer, pause, rest)

        if self.attempts.is_abandoned:
            raise StorageError(f"cannot {doing} {where}: it was given up")
        self._depth += 1
        try:
            result = retried(ask, jitter, failed, wait)
        finally:
            self._depth -= 1
        if not self._depth:
            self.attempts.succeeded()
        return result


def _failure(
    doing: str, where: str, error: Exception, told: str, n_attempts: int
) -> PentameterError:
    """Return the error to raise after the last attempt at `doing` something at `where`; `told` are
    the words for its `error`."""
    if isinstance(error, _UnequalError) and doing == "read":
        return CorruptError(f"{where} is damaged: {error}")
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return StorageError(f"cannot {doing} {where}: {told}; {LOG_IN}")
    if isinstance(error, FileNotFoundError):
        return StorageError(f"cannot {doing} {where}: {told}; is there such a bucket?")
    times = f" after {n_attempts} attempts" if n_attempts > 1 else ""
    look = "check the network" if status_of(error) is None else "the store itself fails"
    return StorageError(f"cannot {doing} {where}{times}: {told}; {look}")


def _asked_once(url: str) -> dict[str, Any]:
    """Return the options for `fsspec` that have an S3 client make a single attempt at each request;
    {} for other stores. Its own retries, inside each attempt made here, would take minutes, and
    burden a store that asks for fewer requests."""
    if urlsplit(url).scheme.lower() not in ("s3", "s3a"):
        return {}
    import fsspec

    known = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    retries = {**known.get("retries", {}), "total_max_attempts": 1}
    return {"config_kwargs": {**known, "retries": retries}}


def _sha256(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
