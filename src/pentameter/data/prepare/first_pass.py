"""The first pass over a text: its hash, size and characters, and each document's split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pentameter.data.corpora.text import Documents, Text
from pentameter.data.prepare.splits import (
    Division,
    Splitting,
    document_hasher,
    split_ends,
    split_of,
)
from pentameter.data.progress import READING, Progress
from pentameter.data.tokenizers.char import N_CODE_POINTS, code_points
from pentameter.errors import ConfigError


@dataclass(frozen=True)
class Contents:
    """A text's hash, size, characters and splits, as one pass over it found them."""

    sha256: str
    """sha256, in hex, of the text and of the documents' bounds in it."""
    n_characters: int
    n_bytes: int
    characters: str
    """The distinct characters, sorted, held-out texts' too; empty when not asked for."""
    division: Division
    held_out: Mapping[str, Contents] = field(default_factory=dict)


class TextDigest:
    """sha256 of a text and of its documents' bounds, as a pass goes on."""

    def __init__(self) -> None:
        self._text, self._bounds = hashlib.sha256(), hashlib.sha256()
        self.n_bytes = 0

    def bound(self) -> None:
        """Note that a document ends here."""
        self._bounds.update(self.n_bytes.to_bytes(8, "little"))

    def add(self, data: bytes) -> None:
        """Take the UTF-8 bytes that follow."""
        self._text.update(data)
        self.n_bytes += len(data)

    def of(self, documents: Documents) -> Documents:
        """The same documents, noted as they are read."""

        def noted(document: Iterator[str]) -> Iterator[str]:
            for piece in document:
                self.add(piece.encode())
                yield piece

        for document in documents:
            yield noted(document)
            self.bound()

    def hexdigest(self) -> str:
        """sha256, in hex, of text and bounds."""
        return hashlib.sha256(self._text.digest() + self._bounds.digest()).hexdigest()


class _Characters:
    """Collects the distinct characters of the pieces it is shown."""

    def __init__(self) -> None:
        self._seen = np.zeros(N_CODE_POINTS, dtype=bool)
        self._ascii = b""

    def add(self, piece: str, data: bytes) -> None:
        if piece.isascii():
            self._ascii += bytes(set(data.translate(None, self._ascii)))  # deletes what is known
        else:
            points = code_points(piece)
            self._seen[points[~self._seen[points]]] = True

    def sorted(self) -> str:
        self._seen[list(self._ascii)] = True
        return "".join(map(chr, np.flatnonzero(self._seen).tolist()))


def read_contents(
    text: Text,
    splitting: Splitting | None = None,
    *,
    characters: bool = True,
    progress: Progress | None = None,
) -> Contents:
    """The contents of a text and of the texts held out beside it, found in one pass.

    With texts held out of its own, `text` is all train. Raises ConfigError for an empty text,
    CorruptError and StorageError as reading does.
    """
    seen = _Characters() if characters else None
    only = "train" if text.held_out else None
    found = _read(text, splitting or Splitting(), only, seen, progress)
    held_out = {
        split: _read(other, Splitting(), split, seen, progress)
        for split, other in text.held_out.items()
    }
    return replace(found, characters=seen.sorted() if seen else "", held_out=held_out)


def _read(
    text: Text,
    splitting: Splitting,
    only: str | None,
    seen: _Characters | None,
    progress: Progress | None,
) -> Contents:
    digest = TextDigest()
    n_characters = 0
    by_document = only is None and splitting.is_by_document
    fractions = splitting.validation_fraction, splitting.test_fraction
    splits = bytearray()
    for document in text.documents():
        hasher = document_hasher()
        for piece in document:
            data = piece.encode()
            digest.add(data)
            n_characters += len(piece)
            if by_document:
                hasher.update(data)
            if seen is not None:
                seen.add(piece, data)
            if progress is not None:
                progress(READING, digest.n_bytes, max(text.n_bytes, digest.n_bytes))
        digest.bound()
        if by_document:
            splits.append(split_of(hasher.digest(), *fractions))
    if n_characters == 0:
        raise ConfigError(f"the text {text.name!r} is empty; there is nothing to learn from")
    if only is not None:
        division = Division(only=only)
    elif by_document:
        division = Division(by_document=bytes(splits))
    else:
        division = Division(ends=split_ends(n_characters, *fractions))
    return Contents(digest.hexdigest(), n_characters, digest.n_bytes, "", division)
