"""Splitting long text into chunks for a tokenizer, without changing its ids, and grouping pieces
into batches.

Characters can be split anywhere; for words and BPE a boundary is before the first whitespace after
a word. Only if none comes within `LONGEST_CHUNK` characters is a text split elsewhere: no text is
lost, but the ids next to that split may differ. So they may for a `library` tokenizer, which gets
chunks with at least that length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pentameter.errors import PentameterError

Item = TypeVar("Item")

# Before the first whitespace behind a word. GPT-2's pre-tokenisation always ends a match there
# (only a leading space joins what follows, and only runs of whitespace look ahead), and so do
# words. Only a space that a letter or digit follows: `<br />` is one mark to the word tokenizer.
_BOUNDARY = re.compile(r"(?<=\S)(?=\n| \w)")
_LAST_BOUNDARY = re.compile(r".*\S(?=\n| \w)", re.DOTALL)  # goes back from the end

CHUNK_CHARACTERS = 1 << 15
WHOLE = {"library", "sentencepiece"}
"""Kinds of tokenizers that get documents whole, up to LONGEST_CHUNK characters."""
LONGEST_CHUNK = 1 << 22


def chunks(text: str, n_characters: int) -> Iterator[str]:
    """Yield a text in chunks. Each ends at the first boundary (before the whitespace that follows a
    word) from `n_characters` on; the last may be shorter.

    Encoding them one by one gives the whole text's tokens, for every kind of tokenizer but
    `library`. A text without such a boundary is one chunk.
    """
    start = 0
    while len(text) - start > n_characters:
        found = _BOUNDARY.search(text, start + n_characters)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    if start < len(text):
        yield text[start:]


def last_boundary(text: str) -> int:
    """Return how many characters precede the last boundary (before whitespace that follows a word)
    in `text`, the beginning of a longer text; 0 if it has no boundary.

    The text after the boundary can be encoded only together with its continuation.
    """
    found = _LAST_BOUNDARY.match(text)
    return found.end() if found else 0


def batches(
    items: Iterable[Item], most_characters: int, n_characters: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Group `items` into lists, and yield them. A list ends with the item that brings the sum of
    `n_characters(item)` to `most_characters` or more. If reading the next item raises an error, the
    items before it are yielded first."""
    batch: list[Item] = []
    held = 0
    try:
        for item in items:
            batch.append(item)
            held += n_characters(item)
            if held >= most_characters:
                yield batch
                batch, held = [], 0
    except PentameterError:
        yield batch
        raise
    if batch:
        yield batch


class Chunker:
    """Cuts a document's text, as it comes in chunks, into pieces that a tokenizer can encode one by
    one: call `feed` with each chunk, then `rest` at the document's end. The same object then serves
    the next document.

    `kind` is the tokenizer's (`char`, `word`, `bpe`, …). Pieces end at boundaries between
    words; a text without one within `longest` characters is cut there.
    """

    def __init__(self, kind: str, longest: int = LONGEST_CHUNK) -> None:
        self._anywhere, self._longest = kind == "char", longest
        self._buffer: list[str] = []
        self._held = 0  # characters in the buffer
        # Where such a tokenizer ends its tokens is not known: it gets documents whole.
        self._least = longest if kind in WHOLE else CHUNK_CHARACTERS
        self._wanted = self._least

    def feed(self, chunk: str) -> str:
        """Buffer `chunk`, and return text that can be encoded by itself; an empty string while more
        is needed.

        For `char` it is the chunk itself. For other kinds, the buffered text up to the last
        boundary is returned once CHUNK_CHARACTERS are held (`longest` for kinds in WHOLE).
        """
        if self._anywhere:
            return chunk
        self._buffer.append(chunk)
        self._held += len(chunk)
        if self._held < self._wanted:
            return ""
        text = "".join(self._buffer)
        end = last_boundary(text)
        if end == 0 and len(text) >= self._longest:
            end = len(text)
        self._buffer, self._held = [text[end:]], len(text) - end
        # After a search in vain the next one waits, so that long lines are not searched over and
        # over.
        self._wanted = self._least if end else min(2 * self._held, self._longest)
        return text[:end]

    def rest(self) -> str:
        """Return the buffered text at the document's end, and empty the buffer."""
        text = "".join(self._buffer)
        self._buffer, self._held, self._wanted = [], 0, self._least
        return text
