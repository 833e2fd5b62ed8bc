"""Words as GPT-2 splits text into them, and a table of those that were encoded before.

BPE merges within words alone, and most words of a text were met before in it. So text is split by
Python's regular expressions, a word that was met is looked up in a dict, and the `tokenizers`
library, which takes microseconds for each, encodes new ones alone.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pentameter.data.tokenizers.base import Ids
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.char import N_CODE_POINTS, code_points

# GPT-2's, for ASCII. Its alternatives are tried the most frequent first, which changes nothing: no
# two begin alike but the last. `++` never gives back: what follows a class is not in it.
_WORD = re.compile(
    r" ?[A-Za-z]++|'(?:[sdmt]|ll|ve|re)| ?[0-9]++| ?[^\sA-Za-z0-9]++|\s+(?!\S)|\s+", re.ASCII
)
_KINDS = "a0!"
"""A letter, a digit and a mark, which stand for all others. Text is one of them or white space."""
_OTHER_SPACE = "\t"  # stands for white space that is no space

_MOST_WORDS = 1 << 17
"""Words in the table, about 30 MB; a fuller one is emptied, and fills with what is frequent."""
_LONGEST_WORD = 64
"""Characters of a word in the table: longer ones hardly come again."""

_SPELLED = {byte: character for character, byte in BYTE_CHARACTERS.items()}


class Words:
    """Splits text into words as the `ByteLevel` pre-tokenizer of the `tokenizers` library does,
    `by`, which is asked only what kind of character one is outside ASCII."""

    def __init__(self, by: Any) -> None:
        self._by = by
        self._kinds = np.zeros(N_CODE_POINTS, dtype=np.uint8)  # 0: not asked yet
        self._kinds[:128] = np.arange(128)

    def split(self, text: str) -> list[str]:
        """Return the words of a text, in order; joined, they are the text."""
        if text.isascii():
            return _WORD.findall(text)
        points = code_points(text)
        kinds = self._kinds[points]
        if not kinds.all():
            self._ask(np.unique(points[kinds == 0]).tolist())
            kinds = self._kinds[points]
        # Words end in the text where they end in its image in ASCII.
        lengths = map(len, _WORD.findall(kinds.tobytes().decode("ascii")))
        return [text[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]

    def _ask(self, points: Iterable[int]) -> None:
        """Note of which kind characters are, given as code points: that of the character with which
        one makes a single word."""
        for point in points:
            self._kinds[point] = ord(
                next(
                    (
                        kind
                        for kind in _KINDS
                        if len(self._by.pre_tokenize_str(kind + chr(point))) == 1
                    ),
                    _OTHER_SPACE,
                )
            )


class WordTable(dict[str, bytes]):
    """Maps a word to its ids, as bytes. One that it lacks is encoded, and kept for the next time.

    library: a tokenizer of the `tokenizers` library, byte-level BPE with GPT-2's rules for words,
        without a normalizer. vocab_size: number of its ids.
    """

    def __init__(self, library: Any, vocab_size: int) -> None:
        super().__init__()
        self._tokenize, self._words = library.model.tokenize, Words(library.pre_tokenizer)
        self._code = "H" if vocab_size <= 1 << 16 else "I"  # of `array` and NumPy: 2 or 4 bytes

    def encode(self, text: str) -> Ids:
        """Return a text's token ids (n_tokens,), int64: those that the library gives. The text is
        valid Unicode, without surrogates; some hundred bytes per word are held meanwhile."""
        ids = b"".join(map(self.__getitem__, self._words.split(text)))
        return np.frombuffer(ids, dtype=self._code).astype(np.int64)

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode().decode("latin-1").translate(_SPELLED)
        ids = array(self._code, [token.id for token in self._tokenize(spelled)]).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids
