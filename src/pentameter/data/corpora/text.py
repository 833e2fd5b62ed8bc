"""A corpus: files that follow one another, and text as documents that can be read again.

A document is an iterator of text chunks, so that any length streams and memory stays bounded.
`files.py` reads inside a file; `registry.py` opens a corpus by its name or its paths.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from pentameter.data.corpora.files import UTF8, FileContents, InputFile
from pentameter.data.corpora.records.rows import SKIP, BadRowError, RowsRead

Documents = Iterator[Iterator[str]]
"""An iterator over documents, each an iterator of text chunks that must be read before the next
document is asked for."""


@dataclass(frozen=True)
class Corpus:
    """Files of one kind of data, text or conversations, before tokenizing; and corpora that are
    held out as validation or test splits."""

    name: str
    """A valid data set name (`config/naming.py`), which names the prepared files."""
    files: tuple[InputFile, ...]
    contents: FileContents = UTF8
    max_bytes: int | None = None
    """Maximum UTF-8 bytes of text to read; None for all. Held-out corpora are always read whole."""
    held_out: Mapping[str, Self] = field(default_factory=dict)
    """Corpora by split, `val` and `test`, if these are files themselves."""
    warnings: tuple[str, ...] = ()
    """Sentences about the files, for the user."""

    def files_by_split(self) -> list[tuple[str, InputFile]]:
        """Return (split, file) pairs: the held-out files, then those of train."""
        held_out = [(split, each) for split, held in self.held_out.items() for each in held.files]
        return [*held_out, *(("train", file) for file in self.files)]

    @cached_property
    def n_bytes(self) -> int:
        """Approximate UTF-8 bytes read in a pass; for progress only."""
        whole = sum(file.n_bytes for file in self.files)
        return whole if self.max_bytes is None else min(whole, self.max_bytes)


@dataclass(frozen=True)
class Text(Corpus):
    """A corpus of text, in documents that are tokenized one by one."""

    def documents(self, rows: RowsRead | None = None) -> Documents:
        """Start a new pass over the documents. Chunks are small, except that a record is one chunk.

        rows: takes the records that have no text; None: as `contents.bad_rows` says.
        """
        files = self.files
        documents: Documents = (each for file in files for each in file.documents(self.contents))
        if rows is not None or self.contents.bad_rows == SKIP:
            documents = _with_text(documents, rows or RowsRead(SKIP))
        return documents if self.max_bytes is None else first_bytes(documents, self.max_bytes)

    def chunks(self) -> Iterator[str]:
        """Start a new pass over the text in chunks, ignoring document bounds."""
        for document in self.documents():
            yield from document

    @property
    def identity(self) -> str | None:
        """A string that identifies the content, held-out texts included, for the cache's keys. It
        is None if only reading tells the content (local files, and where bad rows are left out,
        which are counted anew); generated text and remote files with versions have one."""
        if self.contents.bad_rows == SKIP:
            return None
        known = {"train": self._own_identity}
        known |= {split: text._own_identity for split, text in self.held_out.items()}
        if None in known.values():
            return None
        identity = json.dumps(known) if self.held_out else known["train"]
        return identity if self.max_bytes is None else f"{identity}, first {self.max_bytes} bytes"

    @property
    def _own_identity(self) -> str | None:
        """A string that identifies the content of this text's own files, without held-out texts and
        before `max_bytes` truncates it; None if only reading the files can tell."""
        keys = [file.key for file in self.files]
        if None in keys:
            return None
        if isinstance(keys[0], str):  # generated, which is one file
            return keys[0]
        how = [*self.contents.key.values()]
        return f"remote, version 1, {json.dumps([keys, *how])}"


def _with_text(documents: Documents, rows: RowsRead) -> Documents:
    """Yield the documents, without records that have no text, which `rows` counts."""
    for document in documents:
        try:
            start = [*itertools.islice(document, 1)]
        except BadRowError as error:
            rows.leave_out(error)
        else:
            yield itertools.chain(start, document)


def first_bytes(documents: Documents, max_bytes: int) -> Documents:
    """Yield the documents up to a total of `max_bytes` UTF-8 bytes; the last one is truncated
    between characters."""
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
    """Return the number of UTF-8 bytes in a text."""
    return len(text) if text.isascii() else len(text.encode())
