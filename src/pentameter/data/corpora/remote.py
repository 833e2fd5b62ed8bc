"""Remote files: any URL that `fsspec` opens (`https://`, `s3://`, `hf://`, …), copied into the
cache.

A file is identified by its URL, size and version (its ETag, checksum or modification time, as the
server reports it). It is copied once, when it is first read: in one stream, resumed after a failure
if the server can, otherwise begun again. A copy is accepted only with exactly the size that the
server reported, so a truncated body never becomes text. URLs are shown without user and query,
which may hold secrets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from pentameter.config.naming import LONGEST_NAME, LONGEST_NAME_BYTES, name_of
from pentameter.config.urls import is_remote, last_part, shown_url, url_problem, url_within
from pentameter.data.corpora.files import FileContents, read_documents, read_records
from pentameter.data.corpora.records.rows import Rows
from pentameter.disk.atomic import (
    FolderExistsError,
    check_free_space,
    sha256_of,
    storage_errors,
    sync,
)
from pentameter.disk.cache import cache_folder
from pentameter.disk.file_systems import (
    LOG_IN,
    has_folders,
    is_passing,
    open_file_system,
    reason,
    status_of,
)
from pentameter.disk.lock import building
from pentameter.disk.retrying import growing, retried
from pentameter.errors import ConfigError, CorruptError, PentameterError, StorageError

ATTEMPTS = 5
"""Requests in a row, each bringing less than `PROGRESS_BYTES`, after which a file counts as
unreadable."""
FIRST_WAIT_SECONDS = 1.0
"""Seconds before the second attempt; doubled before each further one."""
PROGRESS_BYTES = BLOCK_BYTES = 1 << 20

_VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "md5", "content_md5", "Content-MD5", "Digest", "checksum",
    "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created",
)  # fmt: skip
"""Keys under which `fsspec`'s file systems report a file's version, better ones first."""

_PAGE = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype\s+html|html)\b", re.I | re.S
)
_PAGE_SUFFIXES = (".html", ".htm", ".xhtml", ".shtml", ".php", ".asp", ".aspx", ".jsp", ".cgi")
_LOGIN = re.compile(r"log-?in|log-?on|sign-?in|sso|auth|saml|session", re.IGNORECASE)


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL that `fsspec` opens, as an `InputFile`. `str()` gives the URL without
    secrets."""

    url: str = field(repr=False)
    n_bytes: int
    version: str | None
    """ETag, checksum or modification time; None if the server reports none."""

    @property
    def name(self) -> str:
        """The last part of the URL's path."""
        return last_part(self.url)

    @property
    def key(self) -> list[str | int | None] | None:
        """JSON values that identify the content; None if the server reports no version."""
        return None if self.version is None else self.address

    @property
    def address(self) -> list[str | int | None]:
        """JSON values that identify the local copy: URL, size, version (may be None)."""
        return [self.url, self.n_bytes, self.version]

    @property
    def is_resumable(self) -> bool:
        """Whether an interrupted copy may be continued: the version guarantees that the bytes are
        the same. Without a version, or with a weak ETag, parts of two versions could be joined
        unnoticed."""
        return self.version is not None and not self.version.startswith("W/")

    def sha256(self) -> str:
        """Return the sha256, in hex, of the local copy, which is downloaded if absent."""
        return sha256_of(cached_file(self))

    def documents(self, contents: FileContents) -> Iterator[Iterator[str]]:
        """Yield the documents in the local copy (downloaded if absent), each as an iterator of text
        chunks."""
        return read_documents(cached_file(self), contents)

    def records(self, contents: FileContents, fields: Sequence[str]) -> Rows:
        """Yield the rows in the local copy (downloaded if absent), each with its file and line
        or row."""
        return read_records(cached_file(self), contents, fields)

    def __str__(self) -> str:
        return shown_url(self.url)


def remote_files(url: str) -> tuple[list[RemoteFile], str]:
    """Return (files, root) for a URL: the file there, those that match its `*`, or those below its
    folder, sorted by path, without hidden ones. `root` is the URL if it is a pattern or a folder,
    else "".

    Over HTTP, which has no folders, a URL is always one file. Raises ConfigError for a missing
    package, an unknown scheme, or no such file; StorageError if the server does not answer after
    `ATTEMPTS`, or reports no size.
    """

    if (problem := url_problem(url)) is not None:
        raise ConfigError(problem)

    def find() -> tuple[list[RemoteFile], str]:
        fs, path = _file_system(url)
        fs.invalidate_cache()
        root, parent = url, path.partition("*")[0].rpartition("/")[0] if "*" in path else path
        if "*" in path:
            found = fs.glob(path, detail=True)
        elif has_folders(url) and fs.isdir(path):
            found = fs.find(path, detail=True)
        else:
            root, found = "", {path: fs.info(path)}
        files = {name: info for name, info in found.items() if info.get("type") != "directory"}
        listed = [
            _remote_file(fs, url, name, info)
            for name, info in sorted(files.items())
            if name == path or not _is_hidden(name.removeprefix(parent), path.removeprefix(parent))
        ]
        return listed, root

    files, root = retried(find, growing(FIRST_WAIT_SECONDS, ATTEMPTS - 1), partial(_failure, url))
    if not files:
        raise ConfigError(f"{shown_url(url)} holds no file, or matches none")
    return files, root


def _is_hidden(name: str, pattern: str) -> bool:
    """Return whether a part of the path `name` begins with a dot, unless a part of the user's
    `pattern` does, too. Both are relative to the folder that the user named."""
    parts, asked = ([*path.split("/")] for path in (name, pattern))
    return any(part[:1] == "." for part in parts) and not any(part[:1] == "." for part in asked)


def cached_file(file: RemoteFile) -> Path:
    """Return the path to a remote file's copy in the cache, downloading it if it is not there.

    One process at a time copies a file, others wait. An incomplete copy is kept, and a later call
    continues from there if the server reports versions. Raises StorageError after `ATTEMPTS`
    failures in a row, each with less than `PROGRESS_BYTES` received, and if the disk lacks the
    space; ConfigError if the file does not exist.
    """
    digest = hashlib.sha256(json.dumps(file.address).encode()).hexdigest()
    folder = cache_folder() / "remote" / f"{name_of(file.name)[:60]}-{digest[:24]}"
    # A name that is too long keeps its end, which tells the format.
    is_short = len(file.name) <= LONGEST_NAME and len(file.name.encode()) <= LONGEST_NAME_BYTES
    path = folder / name_of(file.name if is_short else file.name[-LONGEST_NAME // 2 :])
    if not path.exists():
        partial = folder.with_name(f".{folder.name}.download")
        with suppress(FolderExistsError), building(folder) as unfinished:
            check_free_space(folder.parent, file.n_bytes - _n_kept(file, partial))
            _download(file, partial)
            sync(partial)
            os.replace(partial, unfinished / path.name)
    if (size := path.stat().st_size) != file.n_bytes:
        raise StorageError(
            f"{path}, the copy of {file}, has {size:,} bytes and not {file.n_bytes:,}; delete "
            f"{folder} and start again"
        )
    return path


def _n_kept(file: RemoteFile, partial: Path) -> int:
    """Return how many bytes of an incomplete copy, `partial`, can be kept. If the file is not
    resumable, the copy is deleted, and none is kept."""
    if not file.is_resumable:
        partial.unlink(missing_ok=True)
    return partial.stat().st_size if partial.exists() else 0


def _download(file: RemoteFile, partial: Path) -> None:
    """Append to `partial` until it holds the whole file, retrying after failures. Raises
    StorageError after ATTEMPTS in a row that brought less than PROGRESS_BYTES, or at once for an
    error that will not pass; ConfigError if the file does not exist."""
    n_failures = most = 0
    while True:
        before = _n_kept(file, partial)
        try:
            if before < file.n_bytes or not partial.exists():
                _append(file, partial, before)
            _check_whole(file, partial)
            return
        except PentameterError:
            raise
        except Exception as error:  # each kind of file system has errors of its own
            after = partial.stat().st_size if partial.exists() else 0
            n_failures = 1 if after - max(before, most) >= PROGRESS_BYTES else n_failures + 1
            most = max(most, after)
            if n_failures >= ATTEMPTS or not is_passing(error):
                kept = f"; {after:,} bytes are kept" if file.is_resumable else ""
                raise _failure(file.url, error, n_failures, kept) from error
        time.sleep(FIRST_WAIT_SECONDS * 2 ** (n_failures - 1))


class _IncompleteError(Exception):
    """Raised when the bytes received are not the whole file that the server announced."""


def _append(file: RemoteFile, partial: Path, offset: int) -> None:
    """Append the file's bytes from `offset` on to `partial`. If the server ignores the offset and
    sends all bytes, they replace its content. Raises _IncompleteError if the server sends more or
    fewer bytes than `file.n_bytes`."""
    with _body(file, offset) as (stream, begins), _opened(partial, begins) as copy:
        n_left = file.n_bytes - begins
        while block := stream.read(min(BLOCK_BYTES, n_left + 1)):
            if n_left == file.n_bytes:
                _refuse_page(file, stream, block)
            if len(block) > n_left:
                copy.truncate(0)
                raise _IncompleteError(f"more than the {file.n_bytes:,} bytes announced")
            with storage_errors(partial, "write"):  # a full disk is no failure of the server
                copy.write(block)
            n_left -= len(block)
    if n_left:
        raise _IncompleteError(
            f"the body ended after {file.n_bytes - n_left:,} of {file.n_bytes:,} bytes"
        )


def _refuse_page(file: RemoteFile, stream: Any, start: bytes) -> None:
    """Raise CorruptError if an HTTP server sends a web page instead of the file: the body begins as
    HTML (`start`), and either the file's name is not a page's, or the request was redirected to a
    login."""
    response = getattr(stream, "r", None)  # of fsspec's HTTP
    if response is None or not _PAGE.match(start[:4096]):
        return
    is_page = "html" in response.headers.get("Content-Type", "").lower()
    is_named_so = PurePosixPath(file.name).suffix.lower() not in ("", *_PAGE_SUFFIXES)
    leads_to_login = bool(response.history) and _LOGIN.search(response.url.path) is not None
    if is_page and (is_named_so or leads_to_login):
        raise CorruptError(
            f"{file} is not sent: the server answers with a web page instead, perhaps to log in; "
            f"{LOG_IN}, or download the file and name it"
        )


def _opened(partial: Path, n_bytes: int) -> BinaryIO:
    """Open the file `partial` for writing at its byte `n_bytes`; what it has after that is dropped,
    and the file is created if it does not exist. Raises StorageError if that fails."""
    with storage_errors(partial, "write"):
        copy = partial.open("r+b" if partial.exists() else "wb", buffering=0)
        copy.truncate(n_bytes)
        copy.seek(n_bytes)
        return copy


@contextmanager
def _body(file: RemoteFile, offset: int) -> Iterator[tuple[Any, int]]:
    """Context manager that yields the file's bytes as a stream, and the offset at which the stream
    begins (0 if the server ignores the range)."""
    fs, path = _file_system(file.url)
    if has_folders(file.url):
        with fs.open(path, "rb", block_size=8 * BLOCK_BYTES, cache_type="readahead") as stream:
            stream.seek(offset)
            yield stream, offset
        return
    headers = {"Accept-Encoding": "identity"}  # else the size is of compressed bytes
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if file.version is not None:
            headers["If-Range"] = file.version  # a changed file comes whole
    with fs.open(path, "rb", block_size=0, size=file.n_bytes, headers=headers) as stream:
        response = stream.r
        response.raise_for_status()
        if response.status not in (200, 203, 206):  # no content, or a redirect to nowhere
            raise ConfigError(
                f"{file} is no file: the server answers HTTP status {response.status} and sends "
                "none; check the URL, or download the file and name it"
            )
        is_rest = response.status == 206
        told = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if is_rest and (
            told is None or int(told[1]) != offset or told[2] not in ("*", str(file.n_bytes))
        ):
            raise _IncompleteError("a range that was not asked for")
        yield stream, offset if is_rest else 0


def _check_whole(file: RemoteFile, partial: Path) -> None:
    """Raise _IncompleteError, and delete `partial`, if its size is wrong, or the file on the server
    has another size or version by now, so that the copy may hold parts of two."""
    fs, path = _file_system(file.url)
    fs.invalidate_cache()
    now = _remote_file(fs, file.url, path, fs.info(path))
    if partial.stat().st_size != file.n_bytes or now.address[1:] != file.address[1:]:
        partial.unlink()
        raise _IncompleteError("it changed while it was copied; start again")


def _remote_file(fs: Any, url: str, name: str, info: dict[str, Any]) -> RemoteFile:
    """Return the RemoteFile for the path `name` in the file system `fs`. info: the file's record
    there, with size and version. url: the one by which it was found. Raises StorageError if the
    server reports no size."""
    if info.get("size") is None:
        info = {**info, **fs.info(name)}
    whole = name if is_remote(name) else url_within(url, name) or fs.unstrip_protocol(name)
    if info.get("size") is None:
        raise StorageError(
            f"{shown_url(whole)}: the server does not say how long the file is, so a copy that was "
            "cut short could not be told; download it, and name the file"
        )
    version = next((info[key] for key in _VERSIONS if info.get(key) is not None), None)
    if isinstance(version, datetime):  # a listing may have the same time as a number
        version = version.timestamp()
    return RemoteFile(whole, int(info["size"]), None if version is None else str(version))


def _file_system(url: str) -> tuple[Any, str]:
    """Return the `fsspec` file system for a URL, and the path within it. Raises ConfigError for a
    missing package or an unknown scheme."""
    return open_file_system(url, "reading", "download the file and name it")


def _failure(url: str, error: BaseException, n_attempts: int, kept: str = "") -> PentameterError:
    """Return the error for a file that could not be read after `n_attempts`: ConfigError if the
    server says that it does not exist, else StorageError. Its message has the URL, the reason of
    `error`, a remedy, and `kept`, a note on the bytes that were kept."""
    status, where = status_of(error), shown_url(url)
    is_missing = isinstance(error, FileNotFoundError) and error.__cause__ is None
    if status in (404, 410) or is_missing:
        return ConfigError(f"{where} does not exist (the server says so); check the URL")
    if status in (401, 403) or isinstance(error, PermissionError):
        return StorageError(
            f"{where} may not be read ({reason(url, error)}); {LOG_IN}, or download it and name "
            "the file"
        )
    times = f" after {n_attempts} attempts" if n_attempts > 1 else ""
    return StorageError(
        f"{where} could not be read{times} ({reason(url, error)}{kept}); check the network and "
        "start again, or download it and name the file"
    )
