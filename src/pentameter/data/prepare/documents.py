"""Documents on their way into splits: which split each belongs to, and pieces that cut no token.

A document of any length is encoded in pieces, cut where the ids of the pieces are the ids of the
whole: anywhere for characters, else where `cutting.py` says. Only where no such
place comes within `LONGEST_PIECE` characters is a piece cut all the same: its text is kept, but
the ids beside that cut may differ from the whole's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pentameter.data.corpora.text import Documents
from pentameter.data.prepare.cutting import last_cut
from pentameter.data.shards.shards import SPLITS

PIECE_CHARACTERS = 1 << 15
LONGEST_PIECE = 1 << 22


class Part(NamedTuple):
    """A piece of a document that lies in one split and can be encoded by itself."""

    text: str
    """May be empty, where only an end is to be told."""
    split: str
    starts: bool
    """The document's first part in this split."""
    ends: bool
    """The document's last part in any split."""


class Cutter:
    """Cuts a document's pieces anew for a kind of tokenizer: `feed` each, then `rest`."""

    def __init__(self, kind: str, longest: int = LONGEST_PIECE) -> None:
        self._anywhere, self._longest = kind == "char", longest
        self._buffer: list[str] = []
        self._held = 0  # characters in the buffer
        self._wanted = PIECE_CHARACTERS

    def feed(self, piece: str) -> str:
        """Text that is complete so far: it ends at a safe place. Often empty."""
        if self._anywhere:
            return piece
        self._buffer.append(piece)
        self._held += len(piece)
        if self._held < self._wanted:
            return ""
        text = "".join(self._buffer)
        cut = last_cut(text)
        if cut == 0 and len(text) >= self._longest:
            cut = len(text)
        self._buffer, self._held = [text[cut:]], len(text) - cut
        # After a search in vain the next one waits, so that long lines are not searched over and
        # over.
        self._wanted = PIECE_CHARACTERS if cut else min(2 * self._held, self._longest)
        return text[:cut]

    def rest(self) -> str:
        """What is left when the document ends."""
        text = "".join(self._buffer)
        self._buffer, self._held, self._wanted = [], 0, PIECE_CHARACTERS
        return text


@dataclass(frozen=True)
class Routes:
    """Where the characters of a text go: all to one split, whole documents, or by position."""

    only: str | None = None
    by_document: bytes | None = None
    """The split of each document, as a place in SPLITS."""
    ends: tuple[int, int, int] = (0, 0, 0)
    """Otherwise: where train, val and test end, in characters of the whole text."""

    def fingerprint(self) -> str:
        """The same for the same routes, short."""
        documents = hashlib.sha256(self.by_document or b"").hexdigest()
        return f"{self.only} {self.ends} {documents}"

    def of_document(self, number: int) -> str | None:
        """The split of a document; None where its position decides."""
        if self.by_document is None:
            return self.only
        # A text that has grown since is refused in the end, by its hash.
        return SPLITS[self.by_document[number]] if number < len(self.by_document) else SPLITS[0]


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
    """Takes a document's UTF-8 bytes, and gives the digest for `split_of`."""
    return hashlib.blake2b(digest_size=8)


def divide(documents: Documents, routes: Routes, cutter: Cutter) -> Iterator[Part]:
    """The documents' text as parts, in order."""
    position = 0
    for number, document in enumerate(documents):
        fixed = routes.of_document(number)
        split, starts = fixed or SPLITS[0], True
        for piece in document:
            done = 0
            while done < len(piece):
                if fixed is None:
                    here, stop = _place(routes.ends, position, len(piece) - done)
                    if here != split:
                        if text := cutter.rest():
                            yield Part(text, split, starts, False)
                        split, starts = here, True
                else:
                    stop = len(piece) - done
                segment = piece[done : done + stop]
                done += stop
                position += stop
                if text := cutter.feed(segment):
                    yield Part(text, split, starts, False)
                    starts = False
        yield Part(cutter.rest(), split, starts, True)


def _place(ends: tuple[int, int, int], position: int, n_characters: int) -> tuple[str, int]:
    """The split at a position, and how many of the next characters belong to it."""
    for split, end in zip(SPLITS, ends, strict=True):
        if position < end:
            return split, min(n_characters, end - position)
    return SPLITS[-1], n_characters  # grown since
