"""Data and cache folders, and public files (corpora, vocabularies), downloaded once and
verified."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from pentameter.disk.atomic import make_folder, write_atomic
from pentameter.errors import CorruptError, StorageError

DOWNLOAD_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class PublicFile:
    """A file on the public web with known content."""

    path: str
    """Path below PENTAMETER_DATA_DIR or the cache, such as `shakespeare/input.txt`."""
    url: str
    sha256: str | None
    n_bytes: int
    """Size in bytes; an upper bound if only git's id is known."""
    git_blob: str | None = None
    """git's blob id (SHA-1, hex) for the content, if its sha256 is unknown."""

    def checksum(self) -> str:
        """Return the known checksum with its kind, `sha256 86c4…` or `git blob id …`."""
        return f"sha256 {self.sha256}" if self.sha256 else f"git blob id {self.git_blob}"

    def checksum_of(self, content: bytes) -> str:
        """Return the checksum that `content` has, in the same kind as `checksum`, so that the two
        can be compared."""
        if self.sha256:
            return f"sha256 {hashlib.sha256(content).hexdigest()}"
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        return f"git blob id {blob.hexdigest()}"


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/pentameter`, or `~/.cache/pentameter`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative value is invalid and must be ignored.
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "pentameter"


def data_folder() -> Path | None:
    """Return `$PENTAMETER_DATA_DIR`, searched first for public files; None if it is not set."""
    folder = os.environ.get("PENTAMETER_DATA_DIR")
    return Path(folder) if folder else None


def public_file(file: PublicFile) -> Path:
    """Return a public file's local path, with its checksum verified.

    Searches PENTAMETER_DATA_DIR, then the cache, then downloads it into the cache. Raises
    CorruptError if a file or the download has another checksum, StorageError if it is nowhere and
    cannot be downloaded or written.
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
    target = cache_folder() / file.path
    content = _download(file, _public_folders())
    try:
        make_folder(target.parent)
        write_atomic(target, content)
    except StorageError as error:
        raise StorageError(f"{error}, or set XDG_CACHE_HOME to a writable folder") from error
    return target


def local_file(file: PublicFile) -> Path | None:
    """Return a public file's path on this machine, unchecked: below PENTAMETER_DATA_DIR, else in
    the cache. None if it must be downloaded."""
    paths = (folder / file.path for folder in _public_folders())
    return next((path for path in paths if path.exists()), None)


def _public_folders() -> list[Path]:
    """Return the folders to search for public files, in order: PENTAMETER_DATA_DIR if it is set,
    then the cache."""
    given = data_folder()
    return [cache_folder()] if given is None else [given, cache_folder()]


def _download(file: PublicFile, folders: list[Path]) -> bytes:
    try:
        with urllib.request.urlopen(file.url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
            content: bytes = response.read(file.n_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise StorageError(
            f"{file.path} is in none of {', '.join(map(str, folders))}, and downloading "
            f"{file.url} failed ({reason}). Without a network: put the file "
            f"({file.checksum()}) at {folders[0] / file.path}, or set "
            f"PENTAMETER_DATA_DIR to a folder that has it as {file.path}"
        ) from error
    found = file.checksum_of(content)
    if found != file.checksum():
        raise CorruptError(
            f"{file.url} gave other content than expected: {found}, expected {file.checksum()}; "
            "nothing was kept"
        )
    return content
