"""The division of a text into train, val and test, by position or by document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pentameter.config.choices import look_up
from pentameter.data.corpora.text import Documents
from pentameter.data.shards.format import SPLITS
from pentameter.data.tokenizers.cutting import Cutter
from pentameter.errors import ConfigError

IS_BY_DOCUMENT = {"position": False, "document": True}
"""`data.split_by` → whether each document has a split of its own."""


@dataclass(frozen=True)
class Splitting:
    """The settings that divide a text into train, val and test.

    Raises ConfigError for a `by` that is unknown, and where nothing would be trained on.
    """

    validation_fraction: float = 0.1
    test_fraction: float = 0.0
    by: str = "position"
    """`position`: train, val, test follow one another; `document`: as each text's hash says."""

    def __post_init__(self) -> None:
        look_up(IS_BY_DOCUMENT, self.by, "data.split_by", "preparation")
        fractions = self.validation_fraction, self.test_fraction
        if not (min(fractions) >= 0 and sum(fractions) < 1):  # NaN is refused too
            raise ConfigError(
                f"validation_fraction={fractions[0]} and test_fraction={fractions[1]}: both must "
                "be at least 0, and their sum below 1"
            )

    @property
    def is_by_document(self) -> bool:
        """True if each document has a split of its own."""
        return IS_BY_DOCUMENT[self.by]


def split_ends(
    n_characters: int, validation_fraction: float, test_fraction: float
) -> tuple[int, int, int]:
    """The ends of train, val and test in characters: each begins where the one before ends.

    Exact decimal arithmetic: 0.9 of 1,115,394 characters are 1,003,854, rounded down.
    """
    test = Fraction(str(test_fraction))
    held_out = Fraction(str(validation_fraction)) + test
    train = int((1 - held_out) * n_characters)
    return train, int((1 - test) * n_characters), n_characters


def split_of(digest: bytes, validation_fraction: float, test_fraction: float) -> int:
    """The place in SPLITS of a document whose text has this digest.

    The digest's first 8 bytes, read as a fraction of 1: below `test_fraction` is test, then
    val. So it depends on nothing but the text, and a larger fraction only adds documents.
    """
    place = Fraction(int.from_bytes(digest[:8]), 1 << 64)
    test = Fraction(str(test_fraction))
    if place < test:
        return 2
    return 1 if place < test + Fraction(str(validation_fraction)) else 0


def document_hasher() -> hashlib.blake2b:
    """A new hash over a document's UTF-8 bytes, whose digest `split_of` takes."""
    return hashlib.blake2b(digest_size=8)


@dataclass(frozen=True)
class Division:
    """The split of each character of a text: one for all, one a document, or by position."""

    only: str | None = None
    by_document: bytes | None = None
    """The split of each document, as a place in SPLITS."""
    ends: tuple[int, int, int] = (0, 0, 0)
    """Otherwise the ends of train, val and test, in characters of the whole text."""

    def of_document(self, number: int) -> str | None:
        """The split of a document; None where its position decides."""
        if self.by_document is None:
            return self.only
        # A text that has grown since is refused in the end, by its hash.
        return SPLITS[self.by_document[number]] if number < len(self.by_document) else SPLITS[0]


class Passage(NamedTuple):
    """Text of one document that lies in one split and can be encoded by itself."""

    text: str
    """May be empty, where only an end is to be told."""
    split: str
    starts: bool
    """True for the document's first passage in this split."""
    ends: bool
    """True for the document's last passage in any split."""


def divide(documents: Documents, division: Division, cutter: Cutter) -> Iterator[Passage]:
    """The documents' text as passages, in order."""
    position = 0
    for number, document in enumerate(documents):
        fixed = division.of_document(number)
        split, starts = fixed or SPLITS[0], True
        for piece in document:
            done = 0
            while done < len(piece):
                if fixed is None:
                    here, stop = _place(division.ends, position, len(piece) - done)
                    if here != split:
                        if text := cutter.rest():
                            yield Passage(text, split, starts, False)
                        split, starts = here, True
                else:
                    stop = len(piece) - done
                segment = piece[done : done + stop]
                done += stop
                position += stop
                if text := cutter.feed(segment):
                    yield Passage(text, split, starts, False)
                    starts = False
        yield Passage(cutter.rest(), split, starts, True)


def _place(ends: tuple[int, int, int], position: int, n_characters: int) -> tuple[str, int]:
    """The split at a position, and the number of the next characters that belong to it."""
    for split, end in zip(SPLITS, ends, strict=True):
        if position < end:
            return split, min(n_characters, end - position)
    return SPLITS[-1], n_characters  # grown since
