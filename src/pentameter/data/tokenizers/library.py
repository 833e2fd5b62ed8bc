"""The tokenizer in a Hugging Face `tokenizer.json`, run by the `tokenizers` library that defines
it.

The file comes with models from strangers, and says how texts are rewritten before they are encoded
and after they are decoded: a few replacements that each double a letter make gigabytes of a word.
So what they may make of a text is bounded before the library runs (`Growth`). Regular expressions
the library bounds itself; it then panics, which is an error like any other here.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy.typing as npt

from pentameter.data.tokenizers.base import Content, Encoded, End, Ids, LibraryBacked
from pentameter.data.tokenizers.bpe import refuse_surrogates
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.recognizing import (
    Recognizer,
    ids_of,
    library_errors,
    opened,
    without_tokens,
)
from pentameter.errors import ConfigError, CorruptError

USUAL_GROWTH, MOST_CHARACTERS = 32, 1 << 24
"""Characters that a normalizer or decoder may make of one, and how many more of a text. Unicode's
normal forms make at most 18 of one."""

_MOST_WEIGHTS = 1000  # of single characters, so that a file of many steps takes no long time

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")

# What makes a regular expression match no character, at least without its context.
_MAY_BE_EMPTY = re.compile(r"[*?|^$(]|\\[bBAzZGK]|\{0?,|\{0\}|^$")


class Growth:
    """Upper bound on how many characters a tokenizer's normalizer or decoder makes of a text.
    `steps` is that part of a parsed `tokenizer.json`.

    Each character has a weight: the most characters that it can become. Weights are computed from
    the last step back to the first. At a replacement, the weight of the new text is distributed
    over the characters of the old one.
    """

    def __init__(self, steps: Any) -> None:
        self._weights: dict[str, float] = {}
        self._others = 1.0  # the weight of all other characters
        self._always = 0.0  # what is added to every text
        for step in reversed([*_flat(steps)]):
            self._go_before(step)
        self.of_one = self._always + self._largest()
        """The most characters that a text of one character can become."""

    def of(self, texts: Iterable[str]) -> float:
        """Return the most characters that `texts`, processed one by one, can become together."""
        return sum(self._always + self._weight(text) for text in texts)

    def _largest(self) -> float:
        return max(self._others, *self._weights.values(), 0.0)

    def _weight(self, text: str) -> float:
        counts = Counter(text)
        return sum(n * self._weights.get(each, self._others) for each, n in counts.items())

    def _go_before(self, step: Any) -> None:
        """Update the weights, in place, from those that hold for a character after `step` to those
        that hold before it."""
        match step:
            case {"type": "Replace", "content": str(new), "pattern": {"String": str(old)}} if old:
                share = self._weight(new) / len(old)
                for each in old:
                    self._weights[each] = max(share, self._weights.get(each, self._others))
            case {"type": "Replace", "content": str(new), "pattern": Mapping() as pattern}:
                weight = self._weight(new)
                if _MAY_BE_EMPTY.search(str(pattern.get("Regex", ""))):  # between any two, too
                    self._always += weight
                    self._raise(weight, weight)
                else:
                    self._raise(weight, 0.0)
            case {"type": "Prepend", "prepend": str(new)}:
                self._always += self._weight(new)
            case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
                self._raise(max(map(self._weight, _replacements(encoded))), 0.0)
            case _:  # makes few characters of one, but perhaps one of any other
                self._raise(self._largest(), 0.0)

    def _raise(self, least: float, more: float) -> None:
        """Add `more` to each character's weight, then raise it to at least `least`."""
        if len(self._weights) > _MOST_WEIGHTS:
            self._others, self._weights = self._largest(), {}
        self._others = max(self._others + more, least)
        for each, weight in self._weights.items():
            self._weights[each] = max(weight + more, least)


def _flat(steps: Any) -> Iterator[Any]:
    """Yield the steps of a parsed normalizer or decoder in order, those of sequences within it
    too."""
    left = [steps]
    while left:
        match left.pop():
            case {"type": "Sequence", "normalizers": list(within)}:
                left += reversed(within)
            case {"type": "Sequence", "decoders": list(within)}:
                left += reversed(within)
            case Mapping() as step:
                yield step


def _replacements(encoded: str) -> list[str]:
    """Return the replacement texts in SentencePiece's compiled character map, in Base64: a size, an
    index of that size, then texts that each end with a zero byte. [""] for a damaged map, which the
    library refuses."""
    try:
        table = base64.b64decode(encoded)
    except (binascii.Error, ValueError):
        return [""]
    size = int.from_bytes(table[:4], "little")
    return table[4 + size :].decode(errors="replace").split("\0")


def _spelling(decoder: Any) -> Callable[[str], bytes] | None:
    """Return what gives the bytes of a token, as the parsed `decoder` of a `tokenizer.json` writes
    it in any text; None if it writes a token by its neighbours, or in a way that is not known."""
    steps, spaces, joins_bytes = [*_flat(decoder)], set[str](), False
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return _byte_level
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "} if (
                len(mark) == 1
            ):
                spaces.add(mark)
            case {"type": "Metaspace", "replacement": str(mark)}:
                spaces.add(mark)
            case {"type": "ByteFallback"}:
                joins_bytes = True
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                pass
            case _:
                return None

    def spell(token: str) -> bytes:
        if joins_bytes and _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for mark in spaces:
            token = token.replace(mark, " ")
        return token.encode()

    return spell if steps else None  # without a decoder, tokens are joined by spaces


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet; those of its text if it is not in it, as
    added tokens are."""
    if BYTE_CHARACTERS.keys() >= set(token):
        return bytes(map(BYTE_CHARACTERS.__getitem__, token))
    return token.encode()


def _encoded(library: Any, texts: Sequence[str], has_offsets: bool) -> list[Encoded]:
    """Return each text's tokens by the library's tokenizer, `library`, on its threads. Without
    `has_offsets` there are no offsets, which is faster."""
    encode = library.encode_batch if has_offsets else library.encode_batch_fast
    with library_errors("encode a text"):
        encodings = encode(list(texts), add_special_tokens=False)
    return [Encoded.of(encoding, has_offsets=has_offsets) for encoding in encodings]


class LibraryTokenizer(LibraryBacked):
    """A tokenizer as a `tokenizer.json` describes it: normalizer, pre-tokenizer, model, decoder.

    No token is added before or after a text. Text never becomes a special token, so that no
    document can forge the end of another; added tokens that are not special are recognized in text,
    as they were when the model was trained.
    """

    kind = "library"

    def __init__(self, content: Mapping[str, Any], end_of_text: int | None) -> None:
        """`content` is a parsed `tokenizer.json`. `end_of_text` is the id that ends a document;
        None if documents have no end.

        Raises ConfigError if the library refuses the content, if one character could become more
        than MOST_CHARACTERS, and for an id outside the vocabulary.
        """
        self.content = dict(content)
        self._growths = {part: Growth(self.content.get(part)) for part in ("normalizer", "decoder")}
        for part, growth in self._growths.items():
            if growth.of_one > MOST_CHARACTERS:
                raise ConfigError(
                    f"its {part} may make {growth.of_one:.0f} characters of one; mend its "
                    "replacements, or take another tokenizer"
                )
        with library_errors("open it"):
            self._library = opened(self.content)
        self.vocab_size = 1 + max(
            self._library.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self.end_of_text = end_of_text
        if self.vocab_size == 0:
            raise ConfigError("its vocabulary is empty")
        if end_of_text is not None and not 0 <= end_of_text < self.vocab_size:
            raise ConfigError(
                f"its end of text {end_of_text} is outside the vocabulary 0 … {self.vocab_size - 1}"
            )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Maps text to id for the end of text and the tokens that the file marks as special. A
        token that the library does not accept, such as an empty text, is left out."""
        added = self.content.get("added_tokens") or []
        texts = [token["content"] for token in added if token.get("special")]
        if self.end_of_text is not None and (end := self.token(self.end_of_text)):
            texts.append(end)
        ids = map(self._library.token_to_id, texts)
        return {text: n for text, n in zip(texts, ids, strict=True) if n is not None}

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of special tokens, and of all that the file names as added."""
        texts = (token["content"] for token in self.content.get("added_tokens") or [])
        ids = {self._library.token_to_id(text) for text in texts}
        return super().added_ids | (ids - {None})

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each token by id, as the decoder makes them; see Tokenizer."""
        spell = _spelling(self.content.get("decoder"))
        if spell is None:
            return None
        special = {*self.special_tokens.values(), self.end_of_text}
        texts = ("" if n in special else self.token(n) or "" for n in range(self.vocab_size))
        return list(map(spell, texts))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of tokens for single bytes, such as `<0x0A>`, if the decoder joins them to text,
        and the ids that no token has."""
        is_joining = any(
            step.get("type") == "ByteFallback" for step in _flat(self.content.get("decoder"))
        )
        texts = map(self.token, range(self.vocab_size))
        return frozenset(
            number
            for number, text in enumerate(texts)
            if text is None or (is_joining and _BYTE.fullmatch(text))
        )

    @classmethod
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from a tokenizer file's parsed JSON; CorruptError or ConfigError if it
        is invalid."""
        whole, end_of_text = content.get("tokenizer"), content.get("end_of_text")
        if not isinstance(whole, dict):
            raise CorruptError('"tokenizer" is not an object')
        if end_of_text is not None and type(end_of_text) is not int:
            raise CorruptError(f'"end_of_text" is {end_of_text!r:.80}, not a whole number')
        return cls(whole, end_of_text)

    @classmethod
    def from_tokenizer_json(cls, content: Mapping[str, Any], end: End, warnings: list[str]) -> Self:
        """Build a tokenizer from any parsed `tokenizer.json`, `content`. Raises ConfigError if the
        library refuses it.

        end: (token, id) for the end of a document. The token is used if the vocabulary has it, else
        the id if it is in range; otherwise documents have no end. warnings: unused.
        """
        tokenizer = cls(content, None)
        token, number = end
        if token is not None and (known := tokenizer._library.token_to_id(token)) is not None:
            number = known
        if number is not None and 0 <= number < tokenizer.vocab_size:
            tokenizer.end_of_text = number
        return tokenizer

    def to_tokenizer_json(self) -> bytes:
        """Return `content` as the JSON of a tokenizer.json, indented as the `tokenizers` library
        does."""
        return json.dumps(self.content, ensure_ascii=False, indent=2).encode()

    def token(self, number: int) -> str | None:
        """Return the token with the id `number`, spelled as in the file; None if no token has
        it."""
        found: str | None = self._library.id_to_token(number)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return each text's token ids (n_tokens,), int64, encoded on the library's threads. Raises
        ConfigError for half a surrogate pair, and for a text that the normalizer could make far too
        long.

        A text is never split into chunks: the file decides its token boundaries.
        """
        return [each.ids for each in self._encoded(texts, has_offsets=False)]

    def _encoded(self, texts: Sequence[str], has_offsets: bool = True) -> list[Encoded]:
        self._check_texts(texts)
        found = _encoded(self._library, texts, has_offsets)
        forged = [
            n for n, (ids, _) in enumerate(found) if not self._reserved.isdisjoint(ids.tolist())
        ]
        if forged:
            library, known = self._without_reserved
            again = _encoded(library, [texts[n] for n in forged], has_offsets)
            for n, each in zip(forged, again, strict=True):
                found[n] = each._replace(ids=known[each.ids])
        return found

    def _encoded_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        self._check_texts(texts)
        return self._recognizer.encoded(texts)

    @cached_property
    def _reserved(self) -> frozenset[int]:
        """The ids that no text becomes: special tokens and the end of text. The token for unknown
        words is special in most files, but text does become it, so it is not among them."""
        model = self.content.get("model") or {}
        number = model.get("unk_id")
        if (token := model.get("unk_token")) is not None:
            number = self._library.token_to_id(token)
        ids = {*self.special_tokens.values(), self.end_of_text}
        return frozenset(each for each in ids if each is not None and each != number)

    @cached_property
    def _spelled(self) -> dict[int, str]:
        """Maps the id of each token that no text becomes (`_reserved`) to the token's text."""
        tokens = {number: self.token(number) for number in self._reserved}
        return {number: token for number, token in tokens.items() if token is not None}

    @cached_property
    def _without_reserved(self) -> tuple[Any, Ids]:
        """Return (library, ids): the library's tokenizer without reserved tokens, so that no text
        becomes one, and an array that maps its ids to those of this tokenizer."""
        library = opened(without_tokens(self.content, self._spelled.values()))
        return library, ids_of(library, self._library.get_vocab(with_added_tokens=True))

    @cached_property
    def _recognizer(self) -> Recognizer:
        return Recognizer(self.content, self.special_tokens, self._spelled)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text for token ids (n_tokens,). Raises ConfigError for an id outside the
        vocabulary, and for a text that the decoder could make far too long."""
        if self._growths["decoder"].of_one > USUAL_GROWTH:
            tokens = [self.token(number) or "" for number in self._checked(ids).tolist()]
            self._check_growth("decoder", tokens)
        with library_errors("decode a text"):
            return super().decode(ids)

    def _check_texts(self, texts: Sequence[str]) -> None:
        """Raise ConfigError if one of the texts has a lone surrogate, or all together could become
        far too long in the normalizer."""
        refuse_surrogates(texts)
        self._check_growth("normalizer", texts)

    def _check_growth(self, part: str, texts: Sequence[str]) -> None:
        """Raise ConfigError if `part` (`normalizer` or `decoder`) could make more than USUAL_GROWTH
        characters of each character in `texts` and MOST_CHARACTERS besides."""
        growth = self._growths[part]
        if growth.of_one <= USUAL_GROWTH:
            return
        n_characters = sum(map(len, texts))
        if (n := growth.of(texts)) > MOST_CHARACTERS + USUAL_GROWTH * n_characters:
            raise ConfigError(
                f"the tokenizer's {part} may make {n:.0f} characters of {n_characters}; give it a "
                "shorter text, or take another tokenizer"
            )

    def _fields(self) -> dict[str, Any]:
        return {"tokenizer": self.content, "end_of_text": self.end_of_text}
