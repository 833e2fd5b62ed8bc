"""The character tokenizer: one token per character."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Content, End, Ids, Tokenizer
from pentameter.errors import ConfigError, CorruptError, lone_surrogate

N_CODE_POINTS = 0x110000

_ANY_CHARACTER = r"[\s\S]"

SELDOM, MANY_CHARACTERS = 100, 512
"""`advice_on` advises against characters if there are at least MANY_CHARACTERS distinct ones, more
than any alphabet has, and they occur less than SELDOM times on average."""


class UnseenCharacterError(ConfigError):
    """Raised for a character outside a character tokenizer's vocabulary. The message gives
    `position`, its index in the text that `where` names."""

    def __init__(self, character: str, position: int, where: str = "the text") -> None:
        # An exception that crosses from the processes that encode is made again from these.
        super().__init__(character, position, where)
        self.character, self.position = character, position

    def __str__(self) -> str:
        return (
            f"character {self.character!r} (U+{ord(self.character):04X}) at position "
            f"{self.position} of {self.args[2]} is not in the tokenizer's vocabulary; remove it, "
            "or prepare the data with a tokenizer built from text that has it"
        )


class CharTokenizer(Tokenizer):
    """One token per character; ids number the distinct ones in `characters`, in code-point order.

    A character outside the vocabulary is an error, so that no text is changed silently.
    """

    kind = "char"

    def __init__(self, characters: str | Sequence[str]) -> None:
        self.characters = tuple(sorted(set(characters)))
        if not self.characters:
            raise ConfigError("a character tokenizer needs text; this one is empty")
        for character in self.characters:
            if len(character) != 1 or lone_surrogate(character) is not None:
                raise ConfigError(
                    f"{character!a} is not one Unicode character; a character tokenizer "
                    "takes single characters of valid text"
                )
        self._code_points = np.array([ord(c) for c in self.characters], dtype="<u4")
        # One entry more than the last character: `take(mode="clip")` sends all above it there.
        self._ids = np.full(int(self._code_points[-1]) + 2, -1, dtype=np.int32)
        self.vocab_size = len(self.characters)
        self._ids[self._code_points] = np.arange(self.vocab_size, dtype=np.int32)

    @classmethod
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from a tokenizer file's parsed JSON; CorruptError or ConfigError if it
        is invalid."""
        characters = content.get("characters")
        if not isinstance(characters, list) or not all(
            isinstance(c, str) and len(c) == 1 for c in characters
        ):
            raise CorruptError('"characters" is not a list of single characters')
        if not characters or any(a >= b for a, b in itertools.pairwise(characters)):
            raise CorruptError('"characters" must be distinct, sorted and not empty')
        return cls(characters)

    @classmethod
    def from_tokenizer_json(cls, content: Content, end: End, warnings: list[str]) -> Self | None:
        """Build a tokenizer from a parsed `tokenizer.json` of the kind that `to_tokenizer_json`
        writes; None for any other. `end` and `warnings` are unused. Raises CorruptError unless ids
        number the characters in code-point order."""
        model = content["model"]
        each = {"Regex": _ANY_CHARACTER}
        of_each_character = {
            "type": "Split",
            "pattern": each,
            "behavior": "Isolated",
            "invert": False,
        }
        if model.get("type") != "WordLevel" or content.get("pre_tokenizer") != of_each_character:
            return None
        tokenizer = cls(list(model["vocab"]))
        if tokenizer._ranks != model["vocab"]:
            raise CorruptError("the ids of its characters are not their ranks")
        return tokenizer

    def to_tokenizer_json(self) -> bytes:
        """Return the bytes of a `tokenizer.json` with one token per character. Hugging Face's
        libraries raise an error for a character that it does not know, as `encode` does."""
        import tokenizers

        # No such token exists: an unknown character is an error there as it is in pentameter.
        model = tokenizers.models.WordLevel(self._ranks, unk_token="[UNK]")
        whole: Any = tokenizers.Tokenizer(model)
        pattern = tokenizers.Regex(_ANY_CHARACTER)
        whole.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
        whole.decoder = tokenizers.decoders.Fuse()
        text: str = whole.to_str(pretty=True)
        return text.encode()

    @property
    def _ranks(self) -> dict[str, int]:
        """Character → id."""
        return {character: number for number, character in enumerate(self.characters)}

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The UTF-8 of each character, by id."""
        return [character.encode() for character in self.characters]

    def encode(self, text: str) -> Ids:
        """Return token ids (n_characters,), int64.

        Raises UnseenCharacterError (a ConfigError) at the first character outside the vocabulary.
        """
        ids = self._ids.take(code_points(text), mode="clip")
        if ids.size and ids.min() < 0:
            position = int(np.argmax(ids < 0))
            raise UnseenCharacterError(text[position], position)
        return ids.astype(np.int64)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text for token ids (n_tokens,); ConfigError for an id outside the
        vocabulary."""
        return self._code_points[self._checked(ids)].tobytes().decode("utf-32-le")

    def _fields(self) -> dict[str, Any]:
        return {"characters": self.characters}


def advice_on(vocab_size: int, n_tokens: int) -> str | None:
    """Return a sentence that advises the user to set `data.tokenizer` to `bpe:N` in place of
    `char`; None if characters do well. It is given for a text with at least MANY_CHARACTERS
    distinct characters which occur less than SELDOM times on average.

    vocab_size: number of distinct characters.
    n_tokens: the text's length in characters.
    """
    if vocab_size < MANY_CHARACTERS or n_tokens >= SELDOM * vocab_size:
        return None
    size = max(1024, min(16384, 1 << (n_tokens // 50).bit_length() - 1))
    return (
        f"data.tokenizer='char' gives {vocab_size:,} characters, each of which is seen "
        f"{n_tokens / vocab_size:,.0f} times on average; bpe:{size} learns from what they have in "
        "common, and knows any character"
    )


def code_points(text: str) -> npt.NDArray[Any]:
    """Return a text's Unicode code points (n_characters,): uint8 for ASCII text, else uint32."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    # A lone surrogate cannot come from a file, but can from a command line; let it be unseen.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
