"""The word tokenizer: one token per lower-cased word, with punctuation marks as separate words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import FILE_LIMIT_BYTES, Content, Ids, Tokenizer, strings
from pentameter.errors import ConfigError, lone_surrogate

UNKNOWN = "<unk>"


class WordTokenizer(Tokenizer):
    """One token per word; `words` is the vocabulary in the order of ids, and a word outside it is
    `<unk>`, id 0.

    A literal `<unk>` in a text, as in WikiText, is the same token. Decoding joins words with single
    spaces: case, line ends, quotation marks and unknown words are lost.
    """

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self.vocab_size = len(self.words)
        if self.words[:1] != (UNKNOWN,):
            raise ConfigError(f"the first word of a vocabulary is {UNKNOWN!r}, for unseen words")
        for number, word in enumerate(self.words):
            if word.split() != [word] or lone_surrogate(word) is not None:
                raise ConfigError(f"word {number} of the vocabulary, {word!a}, is not one word")
        self._ids = {word: number for number, word in enumerate(self.words)}
        if len(self._ids) < len(self.words):
            twice, _ = Counter(self.words).most_common(1)[0]
            raise ConfigError(f"{twice!a} stands more than once in the vocabulary")

    @classmethod
    def from_documents(cls, documents: Iterable[str]) -> Self:
        """Build the vocabulary from documents: `<unk>`, then their words, the most frequent first.

        Equally frequent words are ordered by code points, as in torchtext's
        `build_vocab_from_iterator` with `specials=["<unk>"]`. Documents may be chunks of text split
        before whitespace (`chunking.chunks`). Raises ConfigError if there are no words, or too many
        for a vocabulary file.
        """
        counts: Counter[str] = Counter()
        for document in documents:
            counts.update(normalized_words(document))
        if not counts:
            raise ConfigError("a word tokenizer needs text; this one has no words")
        del counts[UNKNOWN]  # it has its id already; nothing happens where it is absent
        n_bytes = sum(len(word) for word in counts) + 6 * len(counts)  # quotes, comma, line
        if n_bytes > FILE_LIMIT_BYTES:
            raise ConfigError(
                f"{len(counts)} different words are too many for a vocabulary; use a tokenizer "
                "that cuts words into parts, such as bpe:32768"
            )
        return cls([UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word))])

    @classmethod
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from a tokenizer file's parsed JSON; CorruptError or ConfigError if it
        is invalid."""
        return cls(strings(content, "words", "words"))

    def encode(self, text: str) -> Ids:
        """Return token ids (n_words,), int64; empty for a text without words."""
        words = normalized_words(text)
        get = self._ids.get
        return np.fromiter((get(word, 0) for word in words), dtype=np.int64, count=len(words))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the words for token ids (n_tokens,), joined with spaces; an unknown word is
        `<unk>`. Raises ConfigError for an id outside the vocabulary."""
        return " ".join([self.words[number] for number in self._checked(ids).tolist()])

    def _fields(self) -> dict[str, Any]:
        return {"words": self.words}


def normalized_words(text: str) -> list[str]:
    """Split a text into words by the rules of torchtext's `basic_english`.

    Lower case; `"` is removed; `<br />`, `;` and `:` are spaces; `'`, `.`, `,`, `(`, `)`, `!` and
    `?` are separate words; whitespace then separates the others.
    """
    # The order is part of the rules: a `"` inside `<br "/>` goes before the tag is looked for.
    text = text.lower().replace('"', "")
    for separator in ("<br />", ";", ":"):
        text = text.replace(separator, " ")
    for character in "'.,()!?":
        text = text.replace(character, f" {character} ")
    return text.split()
