"""The division of a text into train, val and test, by position or by document."""

from __future__ import annotations

import itertools
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


Division = bytes | tuple[int, int, int]
"""The place in SPLITS of each document of a text, or the ends of train, val and test in characters
of all of it."""


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
        split, starts = SPLITS[0], True
        for piece in document:
            for here, segment in _segments(piece, position, number, division):
                if here != split:
                    if text := cutter.rest():
                        yield Passage(text, split, starts, False)
                    split, starts = here, True
                if text := cutter.feed(segment):
                    yield Passage(text, split, starts, False)
                    starts = False
            position += len(piece)
        yield Passage(cutter.rest(), split, starts, True)


def _segments(
    piece: str, position: int, document: int, division: Division
) -> Iterator[tuple[str, str]]:
    """Split and text of each part of a piece, which begins at a position of the whole text."""
    # A text that has grown since the first pass is refused in the end, by its hash.
    if isinstance(division, bytes):
        yield SPLITS[division[document]] if document < len(division) else SPLITS[0], piece
        return
    bounds = (0, *division[:-1], position + len(piece))
    for split, (start, end) in zip(SPLITS, itertools.pairwise(bounds), strict=True):
        if segment := piece[max(start - position, 0) : max(end - position, 0)]:
            yield split, segment
