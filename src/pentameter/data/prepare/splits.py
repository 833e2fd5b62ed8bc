"""Splitting a text into train, val and test, by position or by document."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pentameter.config.choices import VALIDATION_FRACTION, look_up
from pentameter.data.corpora.text import Documents
from pentameter.data.shards.format import SPLITS
from pentameter.data.tokenizers.chunking import Chunker
from pentameter.errors import ConfigError

IS_BY_DOCUMENT = {"position": False, "document": True}
"""Maps `data.split_by` to whether each document is assigned to a split by itself."""


@dataclass(frozen=True)
class Splitting:
    """Settings for splitting a text into train, val and test; the rest after both fractions is
    train.

    Raises ConfigError for an unknown `by`, and for fractions that leave nothing to train on.
    """

    validation_fraction: float = VALIDATION_FRACTION
    test_fraction: float = 0.0
    by: str = "position"
    """`position`: train, val, test follow one another; `document`: by the hash of each document's
    text."""

    def __post_init__(self) -> None:
        look_up(IS_BY_DOCUMENT, self.by, "data.split_by", "preparation")
        fractions = self.validation_fraction, self.test_fraction
        if not (min(fractions) >= 0 and sum(fractions) < 1):  # NaN is refused too
            raise ConfigError(
                f"validation_fraction={fractions[0]} and test_fraction={fractions[1]}: both must "
                "be at least 0, and their sum below 1"
            )

    def ends(self, n: int) -> tuple[int, int, int]:
        """Return the indices at which train, val and test end among `n` characters, documents or
        tokens.

        Exact decimal arithmetic: 0.9 × 1,115,394 characters are 1,003,854, rounded down.
        """
        test = Fraction(str(self.test_fraction))
        held_out = Fraction(str(self.validation_fraction)) + test
        return int((1 - held_out) * n), int((1 - test) * n), n

    def split_of(self, digest: bytes) -> int:
        """Return the index in SPLITS of the split to which a document belongs. `digest` is a hash
        of its text, 8 bytes or more.

        The first 8 bytes are read as a fraction of 1: below `test_fraction` the document is test,
        above that by less than the validation fraction it is val, else train. The text alone
        decides, and a larger fraction only adds documents.
        """
        position = Fraction(int.from_bytes(digest[:8]), 1 << 64)
        test = Fraction(str(self.test_fraction))
        if position < test:
            return 2
        return 1 if position < test + Fraction(str(self.validation_fraction)) else 0


SplitBounds = bytes | tuple[int, int, int]
"""Either bytes, one per document with its index in SPLITS, or the ends of train, val and test in
characters."""


class Passage(NamedTuple):
    """A piece of a document's text that lies in one split and can be encoded by itself."""

    text: str
    """May be empty, if the passage only marks a document's end."""
    split: str
    starts: bool
    """True for the document's first passage in this split."""
    ends: bool
    """True for the document's last passage in any split."""


def split_passages(
    documents: Documents, bounds: SplitBounds, chunker: Chunker
) -> Iterator[Passage]:
    """Yield the documents' text as passages, in order. `chunker` cuts it; so does each split's end
    within a document. `bounds` says which split a text is in: one index in SPLITS per document, or
    the ends of train, val and test in characters. Each document's last passage, which may be empty,
    has `ends` true."""
    position = 0
    for number, document in enumerate(documents):
        split, starts = SPLITS[0], True
        for chunk in document:
            for segment_split, segment in _segments(chunk, position, number, bounds):
                if segment_split != split:
                    if text := chunker.rest():
                        yield Passage(text, split, starts, False)
                    split, starts = segment_split, True
                if text := chunker.feed(segment):
                    yield Passage(text, split, starts, False)
                    starts = False
            position += len(chunk)
        yield Passage(chunker.rest(), split, starts, True)


def _segments(
    chunk: str, position: int, document: int, bounds: SplitBounds
) -> Iterator[tuple[str, str]]:
    """Cut a chunk of text where a split ends, and yield (split, text) for each piece. The chunk
    begins at character `position` of the whole text, in document number `document`; `bounds` says
    where splits end."""
    # A text that has grown since the first pass is refused in the end, by its hash.
    if isinstance(bounds, bytes):
        yield SPLITS[bounds[document]] if document < len(bounds) else SPLITS[0], chunk
        return
    edges = (0, *bounds[:-1], position + len(chunk))
    for split, (start, end) in zip(SPLITS, itertools.pairwise(edges), strict=True):
        if segment := chunk[max(start - position, 0) : max(end - position, 0)]:
            yield split, segment
