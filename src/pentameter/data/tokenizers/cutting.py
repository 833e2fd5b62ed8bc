"""Places where long text can be cut for a tokenizer: the ids of the pieces are those of the whole.

A text of any length is encoded in pieces. Characters can be cut anywhere; for words and BPE a place
is before the first whitespace behind a word. Only where no such place comes within `LONGEST_PIECE`
characters is a text cut all the same: it is kept whole, but the ids beside that cut may differ. So
they may for a tokenizer of the library, which gets pieces of at least that length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Before the first whitespace behind a word. GPT-2's pre-tokenisation always ends a match there
# (only a leading space joins what follows, and only runs of whitespace look ahead), and so do
# words. Only a space that a letter or digit follows: `<br />` is one mark to the word tokenizer.
_CUT = re.compile(r"(?<=\S)(?=\n| \w)")
_LAST_CUT = re.compile(r".*\S(?=\n| \w)", re.DOTALL)  # goes back from the end

PIECE_CHARACTERS = 1 << 15
LONGEST_PIECE = 1 << 22


def cut(text: str, n_characters: int) -> Iterator[str]:
    """Pieces of at least n_characters, but for the last; joined they are the text.

    Encoding piece by piece gives the tokens of the whole, by every kind of tokenizer. A text
    without whitespace is one piece.
    """
    start = 0
    while len(text) - start > n_characters:
        found = _CUT.search(text, start + n_characters)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    if start < len(text):
        yield text[start:]


def last_cut(text: str) -> int:
    """The number of characters up to the last place to cut an unfinished text; 0 without one.

    Text behind it must wait for what follows.
    """
    found = _LAST_CUT.match(text)
    return found.end() if found else 0


class Cutter:
    """Gathers a document's text and cuts it for a kind of tokenizer: `feed` it all, then `rest`."""

    def __init__(self, kind: str, longest: int = LONGEST_PIECE) -> None:
        self._anywhere, self._longest = kind == "char", longest
        self._buffer: list[str] = []
        self._held = 0  # characters in the buffer
        # Where a tokenizer of the library ends its tokens is not known: it gets documents whole.
        self._least = longest if kind == "library" else PIECE_CHARACTERS
        self._wanted = self._least

    def feed(self, piece: str) -> str:
        """The text gathered so far up to a place to cut; often empty."""
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
        self._wanted = self._least if cut else min(2 * self._held, self._longest)
        return text[:cut]

    def rest(self) -> str:
        """The text after the last cut, when the document ends."""
        text = "".join(self._buffer)
        self._buffer, self._held, self._wanted = [], 0, self._least
        return text
