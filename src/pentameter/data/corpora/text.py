"""Text as documents that can be read again: files, folders, generators; memory stays bounded.

A document is an iterator of chunks, so that any length streams. Files follow one another with
nothing between them; `pentameter.data.corpora.files` reads inside a file.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pentameter.config.naming import name_of
from pentameter.data.corpora.file_kinds import table_warning
from pentameter.data.corpora.files import UTF8, FileContents, estimated_bytes, read_documents
from pentameter.errors import ConfigError, StorageError, near_files

Documents = Iterator[Iterator[str]]
"""Each document's chunks, to be read before the next document is asked for."""


@dataclass(frozen=True)
class Text:
    """A corpus before it is tokenized."""

    name: str
    """A name as `config/naming.py` allows; names the prepared files."""
    documents: Callable[[], Documents]
    """Starts a new pass over the text. Only a JSONL record's chunk may be large."""
    n_bytes: int
    """Approximate UTF-8 bytes that a pass yields; for progress only."""
    identity: str | None = None
    """Identifies the content if it is known without reading (generated text)."""
    held_out: Mapping[str, Text] = field(default_factory=dict)
    """`val` and `test`, if they are texts themselves."""
    warning: str | None = None
    """Warnings about its files, for the user."""

    def chunks(self) -> Iterator[str]:
        """Start a pass over the text without regard to documents."""
        for document in self.documents():
            yield from document


def text_of_chunks(
    name: str, chunks: Callable[[], Iterator[str]], n_bytes: int, identity: str | None = None
) -> Text:
    """Build a text with one document; `chunks` starts a new pass over it."""
    return Text(name, lambda: iter([chunks()]), n_bytes, identity)


def text_from_paths(
    paths: Sequence[Path], name: str | None = None, contents: FileContents = UTF8
) -> Text:
    """Return the text in files and folders, one after another in the order given.

    A folder stands for the files below it, sorted by path; hidden files and folders, `__pycache__`,
    links to folders and special files (pipes, sockets) are left out. Raises ConfigError for a path
    that does not exist or holds no file, StorageError for one that cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist (in {Path.cwd()}){near_files(path)}; give a text file "
                "or a folder"
            )
        if not path.is_dir() and not path.is_file():
            raise ConfigError(
                f"{path} is neither a regular file nor a folder; save the text to a file"
            )
        files += files_below(path) if path.is_dir() else [path]
    return text_from_files(files, name or name_of(paths[0].absolute().stem), contents)


def text_from_files(files: Sequence[Path], name: str, contents: FileContents = UTF8) -> Text:
    """Return the text in exactly these files, read lazily, one after another."""
    n_bytes = sum(estimated_bytes(file) for file in files)

    def documents() -> Documents:
        for file in files:
            yield from read_documents(file, contents)

    return Text(name, documents, n_bytes, warning=table_warning(files))


def files_below(folder: Path, skip: Collection[str] = ("__pycache__",)) -> list[Path]:
    """List the regular files below a folder, sorted by the parts of their path; see
    text_from_paths.

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
                found.append(path)
    if not found:
        raise ConfigError(f"no text file below {folder}; hidden files do not count")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def first_bytes(text: Text, max_bytes: int) -> Text:
    """Truncate `text` to the longest start that fits in `max_bytes` UTF-8 bytes without splitting a
    character.

    Held-out texts stay whole.
    """

    def documents() -> Documents:
        left = max_bytes

        def shortened(document: Iterator[str]) -> Iterator[str]:
            nonlocal left
            for chunk in document:
                data = chunk.encode()
                if len(data) <= left:
                    left -= len(data)
                    yield chunk
                    continue
                start = codecs.utf_8_decode(data[:left], "strict", False)[0]
                left = 0
                if start:
                    yield start
                return

        for document in text.documents():
            yield shortened(document)
            if left == 0:
                return

    identity = None if text.identity is None else f"{text.identity}, first {max_bytes} bytes"
    n_bytes = min(text.n_bytes, max_bytes)
    return replace(text, documents=documents, n_bytes=n_bytes, identity=identity)


def utf8_size(text: str) -> int:
    """Count the UTF-8 bytes of a text."""
    return len(text) if text.isascii() else len(text.encode())
