"""Byte-level byte-pair encoding, as GPT-2 has it, on the `tokenizers` library."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Ids, Tokenizer, strings
from pentameter.data.tokenizers.cutting import cut
from pentameter.errors import ConfigError, CorruptError

END_OF_TEXT = "<|endoftext|>"

_PIECE_CHARACTERS = 2048
"""Pieces of a text for the library's threads; its time per token grows with their length."""
_BATCH_PIECES = 512
"""Pieces at once: the library's results take a few hundred bytes per token until they are read."""
MIN_FREQUENCY = 2
"""Least occurrences of a pair that becomes a token: one that occurs once teaches nothing."""
_TRAINING_CHARACTERS = 1 << 13  # pieces of text for the library's threads
# The library's training takes time quadratic in the length of a word: a genome on one line would
# never end. No token worth having is longer than this; encoding cuts nothing.
_LONG_RUN = re.compile(r"\S{1000}|\s{1000}")


_VISIBLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = sorted({*range(256)} - {*_VISIBLE_BYTES})
BYTE_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {chr(byte): byte for byte in _VISIBLE_BYTES}
    | {chr(0x100 + rank): byte for rank, byte in enumerate(_OTHER_BYTES)}
)
"""GPT-2's printable stand-in for each byte value, in the order of GPT-2's ids: visible characters
of Latin-1 for themselves, those from U+0100 on for the others."""


class BpeTokenizer(Tokenizer):
    """Byte-level BPE with GPT-2's rules for cutting text into words.

    Tokens are written in GPT-2's alphabet, one visible character per byte (`Ġ` is a space). Every
    text encodes, and comes back as it was. Text never becomes a special token: `<|endoftext|>` in
    a text is text, cut like any other (tiktoken's `encode_ordinary`), so that no document can
    forge the end of another; the id `end_of_text` is put between documents by whoever joins them.
    """

    kind = "bpe"

    def __init__(self, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        """Take the tokens in the order of their ids and the merges, first made first.

        Raises ConfigError unless tokens are distinct and made of bytes, all 256 single bytes are
        among them, and each merge joins two tokens to a third.
        """
        self.tokens = tuple(tokens)
        self.merges = tuple(merges)
        self.vocabulary: Mapping[str, int] = MappingProxyType(
            {token: number for number, token in enumerate(self.tokens)}
        )
        self.vocab_size = len(self.tokens)
        self.end_of_text = self.vocabulary.get(END_OF_TEXT)  # a foreign vocabulary may lack it
        self._check()
        self._bytes = [bytes(map(BYTE_CHARACTERS.__getitem__, token)) for token in self.tokens]
        import tokenizers  # here: a process that only counts characters need not load it

        model = tokenizers.models.BPE(vocab=dict(self.vocabulary), merges=list(self.merges))
        self._library: Any = tokenizers.Tokenizer(model)
        self._library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Text → id of the tokens, of several characters, that no merge makes."""
        made = set(map("".join, self.merges))
        return {
            self._bytes[number].decode("utf-8", "replace"): number
            for number, token in enumerate(self.tokens)
            if len(token) > 1 and token not in made
        }

    @classmethod
    def from_vocabulary(
        cls, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]
    ) -> BpeTokenizer:
        """The tokenizer of a token → id mapping (`encoder.json`, `vocab.json`) and its merges.

        Raises ConfigError for ids that are not 0 … n - 1, and as the constructor.
        """
        tokens: list[str | None] = [None] * len(vocab)
        for token, number in vocab.items():
            if type(number) is not int or not 0 <= number < len(tokens):
                raise ConfigError(
                    f"the id {number!r} of token {token!a} is not one of 0 … {len(tokens) - 1}"
                )
            if (other := tokens[number]) is not None:
                raise ConfigError(f"tokens {other!a} and {token!a} have the same id {number}")
            tokens[number] = token
        return cls([token for token in tokens if token is not None], merges)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Self:
        """The tokenizer of a file's content; CorruptError or ConfigError when it is wrong."""
        tokens = strings(content, "tokens", "strings")
        merges = strings(content, "merges", "strings")
        return cls(tokens, [parse_merge(merge) for merge in merges])

    def encode(self, text: str) -> Ids:
        """Token ids (n_tokens,), int64, without any special token.

        Raises ConfigError for half a surrogate pair, which is not text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The token ids of each text, encoded on the library's threads; errors as `encode`."""
        refuse_surrogates(texts)
        parts: list[list[Ids]] = [[] for _ in texts]
        numbered = (
            (n, piece) for n, text in enumerate(texts) for piece in cut(text, _PIECE_CHARACTERS)
        )
        while batch := list(itertools.islice(numbered, _BATCH_PIECES)):
            pieces = [piece for _, piece in batch]
            encodings = self._library.encode_batch_fast(pieces, add_special_tokens=False)
            for (number, _), encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids
                parts[number].append(np.fromiter(ids, dtype=np.int64, count=len(ids)))
        nothing = np.empty(0, dtype=np.int64)
        return [part[0] if len(part) == 1 else np.concatenate([nothing, *part]) for part in parts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of token ids (n_tokens,); bytes that are not UTF-8 give U+FFFD.

        `end_of_text` reads `<|endoftext|>`. Raises ConfigError for an id outside the vocabulary.
        """
        table = self._bytes
        return b"".join([table[n] for n in self._checked(ids).tolist()]).decode("utf-8", "replace")

    def _fields(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "merges": [" ".join(merge) for merge in self.merges]}

    def _check(self) -> None:
        known = self.vocabulary
        if len(known) < len(self.tokens):
            twice = next(t for n, t in enumerate(self.tokens) if known[t] != n)
            raise ConfigError(f"token {twice!a} stands more than once in the vocabulary")
        for number, token in enumerate(self.tokens):
            if not token or not BYTE_CHARACTERS.keys() >= set(token):
                raise ConfigError(
                    f"token {number}, {token!a}, is not written in the alphabet of byte-level BPE; "
                    "only GPT-2's kind of vocabulary is supported"
                )
        if missing := BYTE_CHARACTERS.keys() - known.keys():
            raise ConfigError(
                f"the vocabulary lacks {len(missing)} of the 256 single bytes, such as "
                f"{min(missing)!a}; some text could not be encoded"
            )
        for number, merge in enumerate(self.merges):
            absent = [token for token in (*merge, "".join(merge)) if token not in known]
            if absent:
                raise ConfigError(
                    f"merge {number}, {' '.join(merge)!a}: {absent[0]!a} is not in the vocabulary"
                )
        if len(set(self.merges)) < len(self.merges):
            raise ConfigError("a merge stands more than once among the merges")


def train_bpe(documents: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Byte-level BPE trained on documents: at most vocab_size tokens, in GPT-2's order.

    That is the 256 bytes, the merges as they were made, `<|endoftext|>`. There are fewer than
    vocab_size where the text has no more pairs that occur twice. The same documents give the
    same tokenizer, whatever the number of threads. Raises ConfigError for an empty text.
    """
    import tokenizers

    n_characters = 0

    def pieces() -> Iterator[str]:
        nonlocal n_characters
        for document in documents:
            n_characters += len(document)
            for piece in cut(document, _TRAINING_CHARACTERS):
                yield from _without_long_runs(piece)

    library: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # <|endoftext|> is added below
        min_frequency=MIN_FREQUENCY,
        initial_alphabet=list(BYTE_CHARACTERS),
        show_progress=False,
    )
    library.train_from_iterator(pieces(), trainer)
    if n_characters == 0:
        raise ConfigError("a BPE tokenizer needs text to be trained on; this one is empty")
    merges = [(left, right) for left, right in json.loads(library.to_str())["model"]["merges"]]
    # Two merges may give the same token, from different parts.
    tokens = dict.fromkeys([*BYTE_CHARACTERS, *map("".join, merges), END_OF_TEXT])
    return BpeTokenizer(list(tokens), merges)


def _without_long_runs(text: str) -> Iterator[str]:
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


def parse_merge(line: str) -> tuple[str, str]:
    """The two tokens of a merge written `left right`; CorruptError for anything else."""
    left, space, right = line.partition(" ")
    if not (left and space and right) or " " in right:
        raise CorruptError(f"merge {line!a} is not two tokens with a space between")
    return left, right


def refuse_surrogates(texts: Sequence[str]) -> None:
    """Raise ConfigError, with its place, for half a surrogate pair in one of the texts."""
    # The library's versions differ in what they make of one; no file has any, a command line may.
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ConfigError(
                f"character {half!a} (U+{ord(half):04X}) at position {error.start} of the text is "
                "half of a surrogate pair, not a character; the text was not valid UTF-8"
            ) from error
