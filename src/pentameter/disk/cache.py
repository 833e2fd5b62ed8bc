"""Data and cache folders, and public files (corpora, vocabularies), downloaded once and
verified."""

from __future__ import annotations

import hashlib
import http.client
import os
import stat
import tempfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pentameter.config.tables import packaged_table
from pentameter.config.urls import given_path
from pentameter.disk.atomic import make_folder, storage_errors, write_atomic
from pentameter.errors import CorruptError, StorageError

DOWNLOAD_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class PublicFile:
    """A file on the public web whose content is known by its checksum: where it is downloaded from,
    and what it must hold."""

    path: str
    """Path below PENTAMETER_DATA_DIR or the cache, such as `shakespeare/input.txt`."""
    url: str
    n_bytes: int
    """Size in bytes; an upper bound if only git's id is known."""
    sha256: str | None = None
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


@cache
def known_files() -> Mapping[str, PublicFile]:
    """Return the public files that corpora and tokenizers are made from, in `public_files.toml`, by
    name."""
    table = packaged_table("disk/public_files.toml")
    return {name: PublicFile(**values) for name, values in table.items()}


def cache_folder() -> Path:
    """Return the cache folder: `$XDG_CACHE_HOME/pentameter`, else `~/.cache/pentameter`. If there
    is no home folder, or none that can be written, it is `pentameter-UID` in the system's temporary
    folder, and a warning says so.

    Raises StorageError if another user owns that last folder or may write to it, since programs are
    run from the cache.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative value is invalid and must be ignored.
    if os.path.isabs(base):
        return Path(base) / "pentameter"
    home = os.path.expanduser("~")  # stays "~" without $HOME and an entry in the system's list
    folder = Path(home, ".cache", "pentameter")
    if os.path.isabs(home) and _can_be_there(folder):
        return folder
    own = Path(tempfile.gettempdir(), f"pentameter-{os.getuid()}")
    with storage_errors(own, "make"):
        own.mkdir(mode=0o700, exist_ok=True)
        about = own.lstat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o022 or own.is_symlink():
        raise StorageError(f"{own} is not this user's alone; {CACHE_REMEDY}")
    why = f"{folder} cannot be written" if os.path.isabs(home) else "there is no home folder"
    warnings.warn(f"{why}, so the cache is {own}; {CACHE_REMEDY}", stacklevel=2)
    return own


CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that can be written and stays"


def _can_be_there(folder: Path) -> bool:
    """Return whether a folder exists, or could be created: its nearest parent that exists is a
    folder that this user may write to."""
    if folder.is_dir():
        return True
    nearest = next(each for each in folder.parents if os.path.lexists(each))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


@contextmanager
def telling_of_the_cache() -> Iterator[None]:
    """Context manager: if its body raises a StorageError whose message names a path in the cache
    folder, CACHE_REMEDY, which says how to move that folder, is added to the message."""
    try:
        yield
    except StorageError as error:
        if str(cache_folder()) not in str(error) or CACHE_REMEDY in str(error):
            raise
        raise StorageError(f"{error}, or {CACHE_REMEDY}") from error


def find_folder_for_matplotlib() -> None:
    """If Matplotlib could not write to its usual folder, set MPLCONFIGDIR to one in this package's
    cache, so that it does not print warnings. Call it before Matplotlib is imported."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if not _can_be_there(Path(base, "matplotlib").absolute()):
        with suppress(StorageError):
            os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))


def data_folder() -> Path | None:
    """Return `$PENTAMETER_DATA_DIR`, searched first for public files; None if it is not set."""
    folder = os.environ.get("PENTAMETER_DATA_DIR")
    return Path(given_path(folder)) if folder else None


def public_file(file: PublicFile) -> Path:
    """Return a public file's local path, with its checksum verified.

    Searches PENTAMETER_DATA_DIR, then the cache, then downloads it into the cache. Raises
    CorruptError if a file or the download has another checksum, StorageError if it is nowhere and
    cannot be downloaded or written.
    """
    path = local_file(file)
    if path is not None:
        with storage_errors(path, "read"):
            found = file.checksum_of(path.read_bytes())
        if found != file.checksum():
            raise CorruptError(
                f"{path} is not the expected file: {found}, expected {file.checksum()}; "
                "delete it and it is downloaded again"
            )
        return path
    target = cache_folder() / file.path
    content = _download(file, _public_folders())
    with telling_of_the_cache():
        make_folder(target.parent)
        write_atomic(target, content)
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
