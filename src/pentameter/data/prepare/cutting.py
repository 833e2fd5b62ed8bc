"""Long text cut where no tokenizer could tell: the pieces' tokens are the whole text's tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Before the first whitespace behind a word. GPT-2's pre-tokenisation always ends a match there
# (only a leading space joins what follows, and only runs of whitespace look ahead), and so do
# words. Only a space that a letter or digit follows: `<br />` is one mark to the word tokenizer.
_CUT = re.compile(r"(?<=\S)(?=\n| \w)")
_LAST_CUT = re.compile(r".*\S(?=\n| \w)", re.DOTALL)  # goes back from the end


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
    """Where the last whole piece of an unfinished text ends; 0 where there is no such place.

    What is behind it must wait for the text that follows.
    """
    found = _LAST_CUT.match(text)
    return found.end() if found else 0
