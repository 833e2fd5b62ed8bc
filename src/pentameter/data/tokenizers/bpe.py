"""Byte-level byte-pair encoding like GPT-2's, on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from pentameter.data.tokenizers.base import (
    NO_IDS,
    Content,
    Encoded,
    End,
    Ids,
    LibraryBacked,
    strings,
)
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.byte_level.words import WordTable
from pentameter.data.tokenizers.chat import ids_and_texts
from pentameter.data.tokenizers.chunking import chunks
from pentameter.errors import ConfigError, CorruptError, lone_surrogate, printable

END_OF_TEXT = "<|endoftext|>"

_WORDS_CHARACTERS = 1 << 15
"""Minimum characters that are split into words at once."""
_CHUNK_CHARACTERS = 2048
"""Minimum characters per chunk given to the library; its time per token grows with the length."""
_BATCH_CHUNKS = 512
"""Chunks encoded at once: the library's results take a few hundred bytes per token until read."""
_FLAGS = ("lstrip", "rstrip", "single_word")  # of added tokens, which the library alone obeys


class BpeTokenizer(LibraryBacked):
    """Byte-level BPE with GPT-2's rules for splitting text into words.

    Tokens are written in GPT-2's alphabet, one visible character per byte (`Ġ` is a space). Every
    text encodes, and decodes unchanged. Text never becomes a special token: `<|endoftext|>` in a
    text is tokenized like any other text (tiktoken's `encode_ordinary`), so that no document can
    forge the end of another; the caller puts the id `end_of_text` between documents.
    """

    kind = "bpe"

    def __init__(self, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        """`tokens` are ordered by id, `merges` in the order in which they were made.

        Raises ConfigError unless tokens are distinct and made from bytes, all 256 single bytes are
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
        self._library = self._plain()

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Maps text to id for the tokens that no text encodes to: those with several characters of
        the byte alphabet that no merge makes, such as `<|endoftext|>`."""
        made = set(map("".join, self.merges))
        return {
            self.decode([number]): number
            for number, token in enumerate(self.tokens)
            if len(token) > 1 and token not in made
        }

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, by id; empty for special tokens."""
        special = {*self.special_tokens.values(), self.end_of_text}
        return [
            b"" if number in special else bytes(map(BYTE_CHARACTERS.__getitem__, token))
            for number, token in enumerate(self.tokens)
        ]

    @classmethod
    def from_vocabulary(cls, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Self:
        """Build a tokenizer from a token → id mapping (`encoder.json`, `vocab.json`) and its
        merges.

        Raises ConfigError unless ids are 0 … n - 1, and for tokens or merges that are not
        byte-level BPE.
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
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from a tokenizer file's parsed JSON; CorruptError or ConfigError if it
        is invalid."""
        tokens = strings(content, "tokens", "strings")
        merges = strings(content, "merges", "strings")
        return cls(tokens, [parse_merge(merge) for merge in merges])

    @classmethod
    def from_tokenizer_json(cls, content: Content, end: End, warnings: list[str]) -> Self | None:
        """Build a tokenizer from a parsed `tokenizer.json`; None if it encodes in another way than
        GPT-2's. It must be byte-level BPE without a normalizer, with GPT-2's rules for words, and
        without added tokens that text becomes, or that absorb white space. `end` is unused.

        Byte-level added tokens whose ids follow the vocabulary without a gap join it. `warnings`
        gets a line that names all added tokens new to it but `<|endoftext|>`, as text never becomes
        them. Raises CorruptError or ConfigError if the content is invalid.
        """
        model, pre_tokenizer = content["model"], content.get("pre_tokenizer")
        is_bytes = (
            isinstance(pre_tokenizer, dict)
            and pre_tokenizer.get("type") == "ByteLevel"
            and not pre_tokenizer.get("add_prefix_space")
            and pre_tokenizer.get("use_regex", True)
        )
        others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        if (
            model.get("type", "BPE") != "BPE"
            or not is_bytes
            or content.get("normalizer")
            or any(model.get(key) for key in others)
        ):
            return None
        merges = model.get("merges")
        if not isinstance(merges, list):
            raise CorruptError("it has no model.merges")
        tokens = content.get("added_tokens") or []
        try:
            added = {token["content"]: token["id"] for token in tokens}
            if any(token.get(flag) for token in tokens for flag in _FLAGS) or not all(
                token.get("special", True) for token in tokens
            ):
                return None
        except (TypeError, LookupError, AttributeError) as error:
            raise CorruptError(f"added_tokens: {error!r}") from error
        vocabulary = _with_added(model["vocab"], added, warnings)
        return cls.from_vocabulary(vocabulary, list(map(_pair, range(len(merges)), merges)))

    def to_tokenizer_json(self) -> bytes:
        """Return the bytes of a `tokenizer.json` like GPT-2's, with this vocabulary. Hugging Face's
        libraries then recognize special tokens in a text, as one token each: all of them if this
        tokenizer has a chat template, otherwise `<|endoftext|>` alone."""
        import tokenizers

        whole = self._plain()
        if self.end_of_text is not None:
            end = tokenizers.AddedToken(END_OF_TEXT, normalized=False, special=True)
            whole.add_special_tokens([end])
        if self.chat is not None:
            tokens = [tokenizers.AddedToken(each, normalized=False) for each in self.special_tokens]
            whole.add_special_tokens(tokens)
        if self.prefix:
            before = [(self.tokens[number], number) for number in self.prefix]
            whole.post_processor = tokenizers.processors.TemplateProcessing(
                single=[*(spelled for spelled, _ in before), "$A"], special_tokens=before
            )
        text: str = whole.to_str(pretty=True)
        return text.encode()

    def _plain(self) -> Any:
        """Build the library's tokenizer, without special tokens."""
        import tokenizers  # here: a process that only counts characters need not load it

        model = tokenizers.models.BPE(vocab=dict(self.vocabulary), merges=list(self.merges))
        library: Any = tokenizers.Tokenizer(model)
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, trim_offsets=False
        )
        library.decoder = tokenizers.decoders.ByteLevel()
        return library

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return each text's token ids (n_tokens,), int64, as the library encodes it, but each
        word once. Raises ConfigError for half a surrogate pair."""
        refuse_surrogates(texts)
        return [
            np.concatenate([NO_IDS, *map(self._table.encode, chunks(text, _WORDS_CHARACTERS))])
            for text in texts
        ]

    @cached_property
    def _table(self) -> WordTable:
        return WordTable(self._library, self.vocab_size)

    def _encoded(self, texts: Sequence[str]) -> list[Encoded]:
        refuse_surrogates(texts)
        return _with_offsets(self._library, texts)

    def _encoded_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        lengths = {number: len(text) for text, number in self.special_tokens.items()}
        pieces = [ids_and_texts(text, self.special_tokens) for text in texts]
        plain = [piece for found in pieces for piece in found if isinstance(piece, str)]
        encoded = iter(self._encoded(plain))  # exact: no token of text reaches over a special one
        return [_joined(found, encoded, lengths) for found in pieces]

    def _fields(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "merges": [" ".join(merge) for merge in self.merges]}

    def _check(self) -> None:
        """Raise ConfigError, with the token or merge, unless tokens are distinct and in the byte
        alphabet, all single bytes are among them, and each merge occurs once and joins two tokens
        to a third."""
        known = self.vocabulary
        if len(known) < len(self.tokens):
            twice = next(t for n, t in enumerate(self.tokens) if known[t] != n)
            raise ConfigError(f"token {twice!a} stands more than once in the vocabulary")
        alphabet = BYTE_CHARACTERS.keys()
        is_written_right = alphabet >= set("".join(self.tokens)) and "" not in known
        for number, token in enumerate(() if is_written_right else self.tokens):
            if not token or not alphabet >= set(token):
                raise ConfigError(
                    f"token {number}, {token!a}, is not written in the alphabet of byte-level BPE; "
                    "only GPT-2's kind of vocabulary is supported"
                )
        if missing := alphabet - known.keys():
            raise ConfigError(
                f"the vocabulary lacks {len(missing)} of the 256 single bytes, such as "
                f"{min(missing)!a}; some text could not be encoded"
            )
        of_merges = {*chain.from_iterable(self.merges), *map("".join, self.merges)}
        for number, merge in enumerate(() if known.keys() >= of_merges else self.merges):
            absent = [token for token in (*merge, "".join(merge)) if token not in known]
            if absent:
                raise ConfigError(
                    f"merge {number}, {' '.join(merge)!a}: {absent[0]!a} is not in the vocabulary"
                )
        if len(set(self.merges)) < len(self.merges):
            raise ConfigError("a merge stands more than once among the merges")


def _with_offsets(library: Any, texts: Sequence[str]) -> list[Encoded]:
    """Return each text's tokens by `library`, with the characters that they stand for."""

    def cut() -> Iterator[tuple[int, int, str]]:
        for number, text in enumerate(texts):
            start = 0
            for chunk in chunks(text, _CHUNK_CHARACTERS):
                yield number, start, chunk
                start += len(chunk)

    parts: list[list[Encoded]] = [[] for _ in texts]
    left = cut()
    while batch := list(islice(left, _BATCH_CHUNKS)):
        encodings = library.encode_batch([chunk for _, _, chunk in batch], add_special_tokens=False)
        for (number, start, _), encoding in zip(batch, encodings, strict=True):
            parts[number].append(Encoded.of(encoding, start))
    return list(map(Encoded.joined, parts))


def _joined(
    pieces: Sequence[str | int], encoded: Iterator[Encoded], lengths: Mapping[int, int]
) -> Encoded:
    """Return the tokens of a text as one Encoded. `pieces` are the text in order: an id for each
    special token, and the texts between them. `encoded` yields the tokens of each of these texts;
    `lengths` maps a special token's id to its number of characters."""
    parts, start = [], 0
    for piece in pieces:
        n_characters = len(piece) if isinstance(piece, str) else lengths[piece]
        if isinstance(piece, str):
            ids, offsets = next(encoded)
        else:
            ids, offsets = np.array([piece]), np.array([[0, n_characters]])
        parts.append(Encoded(ids, offsets + start))
        start += n_characters
    return Encoded.joined(parts)


def _with_added(
    vocabulary: Mapping[str, Any], added: Mapping[str, Any], warnings: list[str]
) -> dict[str, Any]:
    """Return a copy of a vocabulary (token → id) to which byte-level `added` tokens (text → id) are
    added as long as their ids continue it without a gap. `warnings` gets a line that names all
    added tokens new to it but `<|endoftext|>`: text never becomes them. Raises CorruptError for an
    added token that is no text, or whose id is no whole number."""
    for text, number in added.items():
        if not isinstance(text, str) or type(number) is not int:
            raise CorruptError(
                f"the added token {text!r:.80} has the id {number!r:.80}; "
                "it must be text, and its id a whole number"
            )
    whole = dict(vocabulary)
    unknown = [token for token, number in added.items() if whole.get(token) != number]
    by_id = {added[token]: token for token in unknown if BYTE_CHARACTERS.keys() >= set(token)}
    while (token := by_id.get(len(whole))) is not None and token not in whole:
        whole[token] = len(whole)
    if others := [token for token in unknown if token != END_OF_TEXT]:
        named = ", ".join(map(printable, others[:5])) + (" …" if len(others) > 5 else "")
        warnings.append(f"text never becomes one of the added tokens {named}")
    return whole


def _pair(number: int, merge: Any) -> tuple[str, str]:
    """Return the two tokens that a merge joins: "left right" in old files, ["left", "right"] in new
    ones. Raises CorruptError, with the merge's `number`, for anything else."""
    match merge:
        case str():
            return parse_merge(merge)
        case [str(left), str(right)]:
            return left, right
    raise CorruptError(f"merge {number} is {merge!r:.80}, not two tokens")


def parse_merge(line: str) -> tuple[str, str]:
    """Parse a merge written `left right` into its two tokens; CorruptError for anything else."""
    left, space, right = line.partition(" ")
    if not (left and space and right) or " " in right:
        raise CorruptError(f"merge {line!a} is not two tokens with a space between")
    return left, right


def refuse_surrogates(texts: Sequence[str]) -> None:
    """Raise ConfigError, with the position in its text, if one of the texts holds half a surrogate
    pair, which is no character."""
    # The library's versions differ in what they make of one; no file has any, a command line may.
    for text in texts:
        if (at := lone_surrogate(text)) is not None:
            raise ConfigError(
                f"character {text[at]!a} (U+{ord(text[at]):04X}) at position {at} of the text is "
                "half of a surrogate pair, not a character; the text was not valid UTF-8"
            )
