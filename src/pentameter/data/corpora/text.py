"""Text as documents that can be read again: files, folders, generators; memory stays bounded.

A document is an iterator of chunks, so that any length streams. Files follow one another with
nothing between them; `pentameter.data.corpora.files` reads inside a file.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pentameter.data.corpora.file_kinds import table_warning
from pentameter.data.corpora.files import UTF8, FileContents, read_documents
from pentameter.data.corpora.inputs import (
    InputFile,
    input_bytes,
    input_name,
    inputs_at,
    local_path,
)
from pentameter.data.corpora.remote import RemoteFile

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
    """Identifies the content, held-out texts included, if it is known without reading: generated
    text, remote files."""
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
    paths: Sequence[str | Path], name: str | None = None, contents: FileContents = UTF8
) -> Text:
    """Return the text in files, folders, patterns and URLs, one after another in the order given,
    with the texts that their names hold out; see `inputs_at`.

    Raises ConfigError for a path that does not exist or holds no file, StorageError for one that
    cannot be read.
    """
    inputs = inputs_at(paths)
    name = name or input_name(paths[0])
    text = text_from_files(inputs.files, name, contents)
    held_out = {
        split: text_from_files(files, f"{name}-{split}", contents)
        for split, files in inputs.held_out.items()
    }
    said = [*inputs.warnings, *([] if text.warning is None else [text.warning])]
    return replace(text, held_out=held_out, warning="; ".join(said) or None)


def text_from_files(files: Sequence[InputFile], name: str, contents: FileContents = UTF8) -> Text:
    """Return the text in exactly these files, read lazily, one after another. Its identity is known
    if all are remote and have versions."""
    n_bytes = sum(map(input_bytes, files))

    def documents() -> Documents:
        for file in files:
            yield from read_documents(local_path(file), contents)

    keys = [file.key for file in files if isinstance(file, RemoteFile) and file.version is not None]
    identity = None
    if keys and len(keys) == len(files):
        identity = (
            f"remote, version 1, {json.dumps([keys, contents.encoding, contents.text_field])}"
        )
    return Text(name, documents, n_bytes, identity, warning=table_warning(files))


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
