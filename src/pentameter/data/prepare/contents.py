"""The first pass over a text: its hash, its size, its characters, and its documents' splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from pentameter.data.corpora.text import Documents, Text
from pentameter.data.prepare.documents import Routes, document_hasher, split_of
from pentameter.data.prepare.progress import READING, Progress
from pentameter.data.tokenizers.char import N_CODE_POINTS, code_points
from pentameter.errors import ConfigError


@dataclass(frozen=True)
class Splitting:
    """How a text is divided into train, val and test; ConfigError where nothing trains."""

    validation_fraction: float = 0.1
    test_fraction: float = 0.0
    by: str = "position"
    """`position`: train, val, test follow one another; `document`: as each text's hash says."""

    def __post_init__(self) -> None:
        if self.by not in ("position", "document"):
            raise ConfigError(f"split_by={self.by!r} must be 'position' or 'document'")
        fractions = self.validation_fraction, self.test_fraction
        if not (min(fractions) >= 0 and sum(fractions) < 1):  # NaN is refused too
            raise ConfigError(
                f"validation_fraction={fractions[0]} and test_fraction={fractions[1]}: both must "
                "be at least 0, and their sum below 1"
            )


@dataclass(frozen=True)
class Contents:
    """What one pass over a text found."""

    sha256: str
    """Of the text and of the documents' bounds in it."""
    n_characters: int
    n_bytes: int
    characters: str
    """The distinct characters, sorted, held-out texts' too; empty when not asked for."""
    routes: Routes
    held_out: Mapping[str, Contents] = field(default_factory=dict)


class TextDigest:
    """sha256 of a text and of its documents' bounds, as a pass goes on."""

    def __init__(self) -> None:
        self._text, self._bounds = hashlib.sha256(), hashlib.sha256()
        self.n_bytes = 0

    def bound(self) -> None:
        """A document ends here."""
        self._bounds.update(self.n_bytes.to_bytes(8, "little"))

    def add(self, data: bytes) -> None:
        """The UTF-8 bytes that follow."""
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
        """The hash of both."""
        return hashlib.sha256(self._text.digest() + self._bounds.digest()).hexdigest()


class _Characters:
    """The distinct characters of the pieces it is shown."""

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
    """What the text holds, found in one pass.

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
    return Contents(
        found.sha256,
        found.n_characters,
        found.n_bytes,
        seen.sorted() if seen else "",
        found.routes,
        held_out,
    )


def _read(
    text: Text,
    splitting: Splitting,
    only: str | None,
    seen: _Characters | None,
    progress: Progress | None,
) -> Contents:
    digest = TextDigest()
    n_characters = 0
    by_document = splitting.by == "document" and only is None
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
        routes = Routes(only=only)
    elif by_document:
        routes = Routes(by_document=bytes(splits))
    else:
        routes = Routes(ends=split_ends(n_characters, *fractions))
    return Contents(digest.hexdigest(), n_characters, digest.n_bytes, "", routes)


def split_ends(
    n_characters: int, validation_fraction: float, test_fraction: float
) -> tuple[int, int, int]:
    """Where train, val and test end, in characters: each takes up where the one before ends.

    Exact decimal arithmetic: 0.9 of 1,115,394 characters are 1,003,854, rounded down.
    """
    test = Fraction(str(test_fraction))
    held_out = Fraction(str(validation_fraction)) + test
    train = int((1 - held_out) * n_characters)
    return train, int((1 - test) * n_characters), n_characters
