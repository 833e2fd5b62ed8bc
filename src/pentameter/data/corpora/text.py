"""A corpus as files that follow one another, and text as documents that can be read again.

A document is an iterator of chunks, so that any length streams and memory stays bounded.
`files.py` reads inside a file; `registry.py` opens a corpus by its name or its paths.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from pentameter.data.corpora.files import UTF8, FileContents, InputFile

Documents = Iterator[Iterator[str]]
"""Each document's chunks, to be read before the next document is asked for."""


@dataclass(frozen=True)
class Corpus:
    """Files of one kind of data before they are tokenized, with those held out beside them."""

    name: str
    """A name as `config/naming.py` allows; names the prepared files."""
    files: tuple[InputFile, ...]
    contents: FileContents = UTF8
    max_bytes: int | None = None
    """Maximum UTF-8 bytes of text to take; None for all. What is held out stays whole."""
    held_out: Mapping[str, Self] = field(default_factory=dict)
    """`val` and `test`, if they are files themselves."""
    warnings: tuple[str, ...] = ()
    """Warnings about the files, for the user."""

    @cached_property
    def n_bytes(self) -> int:
        """Approximate UTF-8 bytes that a pass yields; for progress only."""
        whole = sum(file.n_bytes for file in self.files)
        return whole if self.max_bytes is None else min(whole, self.max_bytes)


@dataclass(frozen=True)
class Text(Corpus):
    """Text, of which each document is read by itself."""

    def documents(self) -> Documents:
        """Start a new pass over the text. Only a record's chunk may be large."""
        documents = (each for file in self.files for each in file.documents(self.contents))
        return documents if self.max_bytes is None else first_bytes(documents, self.max_bytes)

    def chunks(self) -> Iterator[str]:
        """Start a pass over the text without regard to documents."""
        for document in self.documents():
            yield from document

    @property
    def identity(self) -> str | None:
        """Identifies the content, held-out texts included, if it is known without reading:
        generated text, remote files with versions. Else None."""
        known = {"train": self._own_identity}
        known |= {split: text._own_identity for split, text in self.held_out.items()}
        if None in known.values():
            return None
        identity = json.dumps(known) if self.held_out else known["train"]
        return identity if self.max_bytes is None else f"{identity}, first {self.max_bytes} bytes"

    @property
    def _own_identity(self) -> str | None:
        keys = [file.key for file in self.files]
        if None in keys:
            return None
        if isinstance(keys[0], str):  # generated, which is one file
            return keys[0]
        how = [self.contents.encoding, self.contents.text_field]
        return f"remote, version 1, {json.dumps([keys, *how])}"


def first_bytes(documents: Documents, max_bytes: int) -> Documents:
    """Yield the longest start of the documents that fits in `max_bytes` UTF-8 bytes without
    splitting a character."""
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

    for document in documents:
        yield shortened(document)
        if left == 0:
            return


def utf8_size(text: str) -> int:
    """Count the UTF-8 bytes of a text."""
    return len(text) if text.isascii() else len(text.encode())
