"""Text as pieces that can be read again: files, folders, generators; memory stays bounded.

Files are read as bytes and decoded as UTF-8, so line ends stay as they are; a byte order mark at
the start of a file is an encoding mark, not text, and is dropped. Files follow one another with
nothing between them.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentameter.errors import ConfigError, CorruptError, StorageError

# Small on purpose: decoding pieces of a MiB left holes in glibc's heap that it did not fill again
# (0.4 GB more after each GB read); at 64 KiB memory stays flat, and the work in the fast cache.
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Text:
    """A corpus before it is cut into tokens."""

    name: str
    """Letters, digits, `.`, `_`, `-`: names the prepared files."""
    pieces: Callable[[], Iterator[str]]
    """Starts a new pass over the text; pieces have at most about `PIECE_BYTES` characters."""
    n_bytes: int
    """About how many UTF-8 bytes a pass yields; for progress only."""
    identity: str | None = None
    """Names the content where it is known without reading it (generated text)."""


def text_from_paths(paths: Sequence[Path], name: str | None = None) -> Text:
    """The text of files and folders, one after another in the order given.

    A folder stands for the files below it, sorted by path; hidden files and folders,
    `__pycache__`, links to folders and what is not a regular file (pipes, sockets) are left out.
    Raises ConfigError for a path that does not exist or holds no file, StorageError for one that
    cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        files += files_below(path) if path.is_dir() else [_regular_file(path)]
    return text_from_files(files, name or safe_name(paths[0].absolute().stem))


def text_from_files(files: Sequence[Path], name: str) -> Text:
    """The text of exactly these files, read lazily, one after another."""
    try:
        n_bytes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error

    def pieces() -> Iterator[str]:
        for file in files:
            yield from read_pieces(file)

    return Text(name, pieces, n_bytes)


def files_below(folder: Path, skip: Collection[str] = ("__pycache__",)) -> list[Path]:
    """The regular files below a folder, sorted by the parts of their path; see text_from_paths.

    Folders named in `skip` are not entered.
    """
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise StorageError(f"cannot list {error.filename}: {error.strerror}") from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for name in files:
            path = Path(parent, name)
            # A link to nowhere is kept: reading it then fails with its name.
            regular = path.is_file() or (path.is_symlink() and not path.exists())
            if regular and not name.startswith("."):
                found.append(_refuse_jsonl(path))
    if not found:
        raise ConfigError(f"no text file below {folder}; hidden files do not count")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def read_pieces(file: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of at most about `piece_bytes` bytes.

    Raises CorruptError, with the byte offset, where the file is not UTF-8 text or holds a NUL
    (binary data); StorageError when it cannot be read.
    """
    offset = 0  # of the first byte of `data` in the file
    data = b""
    try:
        with file.open("rb", buffering=0) as stream:
            while True:
                block = stream.read(piece_bytes)
                data += block
                text, used = _decode(data, offset, file, final=not block)
                if offset == 0 and text.startswith("\ufeff"):
                    text = text[1:]
                if text:
                    yield text
                offset, data = offset + used, data[used:]
                if not block:
                    return
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error


def _decode(data: bytes, offset: int, file: Path, *, final: bool) -> tuple[str, int]:
    """The characters that `data` completes, and how many bytes they take."""
    try:
        text, used = codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        hint = "convert it to UTF-8, or leave it out"
        if offset == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            hint = "it looks like UTF-16; convert it to UTF-8"
        raise CorruptError(
            f"{file} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset "
            f"{offset + error.start} ({error.reason}); {hint}"
        ) from error
    if (nul := data.find(b"\0", 0, used)) >= 0:
        raise CorruptError(
            f"{file} is binary, not text: NUL byte at offset {offset + nul}; leave it out"
        )
    return text, used


def first_bytes(text: Text, max_bytes: int) -> Text:
    """The longest start of `text` that fits in `max_bytes` UTF-8 bytes; no character is cut."""

    def pieces() -> Iterator[str]:
        left = max_bytes
        for piece in text.pieces():
            data = piece.encode()
            if len(data) > left:
                start = codecs.utf_8_decode(data[:left], "strict", False)[0]
                if start:
                    yield start
                return
            left -= len(data)
            yield piece

    identity = None if text.identity is None else f"{text.identity}, first {max_bytes} bytes"
    return Text(text.name, pieces, min(text.n_bytes, max_bytes), identity)


def safe_name(name: str) -> str:
    """`name` with everything but letters, digits, `.`, `_`, `-` made `-`; never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "text"


def _regular_file(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"{path} does not exist (in {Path.cwd()}); give a text file or a folder")
    if not path.is_file():
        raise ConfigError(f"{path} is neither a regular file nor a folder; save the text to a file")
    return _refuse_jsonl(path)


def _refuse_jsonl(path: Path) -> Path:
    if path.suffix.lower() in {".jsonl", ".ndjson"}:
        raise ConfigError(
            f"{path}: JSONL is not available in this version; "
            "write each record's text to a .txt file"
        )
    return path
