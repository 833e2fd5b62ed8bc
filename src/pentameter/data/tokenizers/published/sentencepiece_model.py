"""The tokenizer in a `tokenizer.model`, run by SentencePiece, which wrote it.

The file comes with models from strangers. It says, too, how texts are rewritten before they are
encoded, so what that may make of one character is bounded, as in `library.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Content, Encoded, Ids, LibraryBacked
from pentameter.data.tokenizers.bpe import refuse_surrogates
from pentameter.data.tokenizers.chat import APART, escaped, ids_and_texts
from pentameter.data.tokenizers.library import MOST_CHARACTERS, Growth
from pentameter.errors import ConfigError, CorruptError, missing_package

_SPACE = "▁"
_ANCHOR = "\ue000"  # a character of private use: no piece of a vocabulary goes on behind it
_TRAINER, _NORMALIZER, _MODEL_TYPE, _CHARACTER_MAP = 2, 3, 3, 2  # numbers in sentencepiece's .proto
_BPE = 2
_FLAGS = ("lstrip", "rstrip")
_MOST_ADDED = 4096  # tokens added to few pieces; a vocabulary takes memory by its largest id


class _Model:
    """The content of a tokenizer.model, `data`, as SentencePiece's processor reads it. Raises
    CorruptError for another kind of file, ConfigError if sentencepiece is missing, or if its
    normalizer could make too much of one character."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.library = _opened(data)
        self._check_growth()

    @property
    def is_bpe(self) -> bool:
        """Whether the model is BPE; others of SentencePiece are unigram, words or characters."""
        return _last_number(_message(self.data, _TRAINER), _MODEL_TYPE) == _BPE

    @cached_property
    def adds_space(self) -> bool:
        """Whether a space is put before a text."""
        return bool(self.library.normalize("x").startswith(_SPACE))

    def encoded(self, text: str) -> Encoded:
        """Return a text's tokens."""
        found = self.library.encode(text, return_type="offset_mapping")
        offsets = np.array(found["offsets"], dtype=np.int64).reshape(-1, 2)
        return Encoded(np.array(found["ids"], dtype=np.int64), offsets)

    def continued(self, text: str) -> Encoded:
        """Return the tokens of a text that goes on: no space is put before it."""
        if not self.adds_space:
            return self.encoded(text)
        ids, offsets = self.encoded(_ANCHOR + text)
        is_behind = offsets[:, 1] > len(_ANCHOR)
        return Encoded(ids[is_behind], (offsets[is_behind] - len(_ANCHOR)).clip(min=0))

    def decoded(self, run: list[int], *, is_first: bool) -> str:
        """Return the text for ids without special tokens. The space that was put before a text is
        left out if it `is_first`."""
        before, shown = ([], "") if is_first else self._anchor
        return str(self.library.decode([*before, *run])).removeprefix(shown)

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token of one visible character, and its text: behind it no space is taken away. Neither
        if no token is one."""
        library = self.library
        for number in range(library.vocab_size()):
            text = library.id_to_piece(number)
            if len(text) == 1 and text.isalnum() and library.decode([number]) == text:
                return [number], text
        return [], ""

    def _check_growth(self) -> None:
        """Raise ConfigError if the model's normalizer could make too much of one character."""
        table = _message(_message(self.data, _NORMALIZER), _CHARACTER_MAP)
        encoded = base64.b64encode(table).decode()
        growth = Growth({"type": "Precompiled", "precompiled_charsmap": encoded}) if table else None
        if growth is not None and growth.of_one > MOST_CHARACTERS:
            raise ConfigError(
                f"its normalizer may make {growth.of_one:.0f} characters of one; take another one"
            )


class SentencePieceTokenizer(LibraryBacked):
    """A tokenizer as a `tokenizer.model` of SentencePiece describes it (BPE or unigram), with the
    tokens that were added to it beside the file.

    A text gets the ids that SentencePiece gives it. Text never becomes a control symbol or an added
    token. Where a chat template writes special tokens, each text between them is encoded by itself,
    as SentencePiece encodes a text: with a space before it, if the model puts one there; or only
    the first is (`spaces_once`).
    """

    kind = "sentencepiece"

    def __init__(
        self,
        model: bytes,
        end_of_text: int | None = None,
        added: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        spaces_once: bool = False,
    ) -> None:
        """Open the content of a tokenizer.model, `model`.

        end_of_text: the id that ends a document; None: as the model says, if it does.
        added: maps the text of each special token that is not in the model, or is ordinary text
            there, to its `id`, and whether it absorbs white space (`lstrip`, `rstrip`).
        spaces_once: a space is put before a text's beginning alone, not behind special tokens.

        Raises ConfigError if sentencepiece is not installed, if one character could become more
        than MOST_CHARACTERS, and for ids that do not fit; CorruptError for another kind of file.
        """
        self._model, self.spaces_once = _Model(model), spaces_once
        self.added: dict[str, dict[str, Any]] = {
            text: {"id": int(each["id"]), **{flag: True for flag in _FLAGS if each.get(flag)}}
            for text, each in (added or {}).items()
        }
        self._library = self._model.library
        self._ids = {text: each["id"] for text, each in self.added.items()}
        n_pieces = self._library.vocab_size()
        self.vocab_size = 1 + max([n_pieces - 1, *self._ids.values()])
        if not {*self._ids.values()}.issubset(range(2 * n_pieces + _MOST_ADDED)):
            raise ConfigError(f"added tokens are far beyond its {n_pieces} pieces: {self._ids}")
        found = self._library.eos_id()
        self.end_of_text = end_of_text if end_of_text is not None else found if found >= 0 else None
        if self.end_of_text is not None and not 0 <= self.end_of_text < self.vocab_size:
            raise ConfigError(
                f"its end of text {end_of_text} is outside the vocabulary 0 … {self.vocab_size - 1}"
            )

    @property
    def model(self) -> bytes:
        """The content of the tokenizer.model."""
        return self._model.data

    @property
    def reader(self) -> str | None:
        """The class of transformers that reads the model and gives the same ids; None if it is not
        BPE, but unigram, words or characters."""
        if not self._model.is_bpe:
            return None
        return "LlamaTokenizer" if self._model.adds_space else "GemmaTokenizer"

    @property
    def begin_of_text(self) -> int | None:
        """The id that the model has for the beginning of a text; None if it has none."""
        number: int = self._library.bos_id()
        return number if number >= 0 else None

    def id_of(self, text: str | None) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        if text in self._ids:
            return self._ids[text]
        number = self._library.piece_to_id(text) if text else 0
        return number if self._library.id_to_piece(number) == text else None

    def has(self, token: Mapping[str, Any]) -> bool:
        """Return whether a token with `content`, `id` and `special`, as tokenizer_config.json
        describes added ones, is a piece of the model, and `special` as it is there."""
        number, library = token["id"], self._library
        if not 0 <= number < library.vocab_size():
            return False
        is_special = library.is_control(number) or library.is_unknown(number)
        is_as_said = bool(is_special or not token.get("special"))
        return bool(library.id_to_piece(number) == token["content"] and is_as_said)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Maps text to id for the model's control symbols, the end of text and added tokens."""
        known, special = self._library, dict(self._ids)
        for number in range(known.vocab_size()):
            is_free = number not in self._ids.values()
            if is_free and (known.is_control(number) or number == self.end_of_text):
                special.setdefault(known.id_to_piece(number), number)
        return special

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids beyond the model's pieces."""
        return frozenset(range(self._library.vocab_size(), self.vocab_size))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of tokens for single bytes, such as `<0x0A>`, and the ids that no token has."""
        library = self._library
        free = self.added_ids.difference(self._ids.values())
        return free.union(filter(library.is_byte, range(library.vocab_size())))

    @classmethod
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from a tokenizer file's parsed JSON; CorruptError or ConfigError if it
        is invalid."""
        try:
            model = base64.b64decode(content["model"], validate=True)
            end, once = content["end_of_text"], content["spaces_once"]
            if type(end) not in (int, type(None)) or type(once) is not bool:
                raise TypeError(f"end_of_text={end!r:.80}, spaces_once={once!r:.80}")
            return cls(model, end, content["added"], spaces_once=once)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"it is not a model of SentencePiece: {error!r:.200}") from error

    def _fields(self) -> dict[str, Any]:
        return {
            "model": base64.b64encode(self.model).decode(),
            "end_of_text": self.end_of_text,
            "added": self.added,
            "spaces_once": self.spaces_once,
        }

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return each text's token ids (n_tokens,), int64, encoded on the library's threads. Raises
        ConfigError for half a surrogate pair. A text is never split into chunks."""
        refuse_surrogates(texts)
        found = [np.array(ids, dtype=np.int64) for ids in self._library.encode(list(texts))]
        if self._spelled:
            for n, ids in enumerate(found):
                if not self._spelled.keys().isdisjoint(ids.tolist()):
                    found[n] = self._piece(texts[n], is_first=True).ids
        return found

    @cached_property
    def _spelled(self) -> dict[int, str]:
        """Maps id to text for special tokens that are ordinary text to the model."""
        n = self._library.vocab_size()
        return {
            number: text
            for text, number in self.special_tokens.items()
            if number < n and not self._library.is_control(number)
        }

    def _encoded(self, texts: Sequence[str]) -> list[Encoded]:
        refuse_surrogates(texts)
        return [self._piece(text, is_first=True) for text in texts]

    def _encoded_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        refuse_surrogates(texts)
        return list(map(self._rendered, texts))

    def _rendered(self, text: str) -> Encoded:
        found, start = [], 0
        pieces = ids_and_texts(text, self.special_tokens)
        texts = {number: text for text, number in self.special_tokens.items()}
        flags = [self.added.get(texts[n], {}) if isinstance(n, int) else {} for n in pieces]
        for n, piece in enumerate(pieces):
            length = len(piece) if isinstance(piece, str) else len(texts[piece])
            if isinstance(piece, str):
                kept = piece.lstrip() if n and flags[n - 1].get("rstrip") else piece
                start_of_kept = start + len(piece) - len(kept)
                if n + 1 < len(pieces) and flags[n + 1].get("lstrip"):
                    kept = kept.rstrip()
                is_first = not n or not self.spaces_once
                found.append(_moved(self._piece(kept, is_first=is_first), start_of_kept))
            else:
                found.append(Encoded(np.array([piece]), np.array([[start, start + length]])))
            start += length
        return Encoded.joined([Encoded(np.empty(0, np.int64), np.empty((0, 2), np.int64)), *found])

    def _piece(self, text: str, *, is_first: bool) -> Encoded:
        """Return the tokens of a text without special tokens. What spells one is encoded in two
        parts. Unless `is_first`, no space is put before it."""
        found, start = [Encoded(np.empty(0, np.int64), np.empty((0, 2), np.int64))], 0
        spelled = list(self._spelled.values())
        for part in escaped(text, spelled).split(APART) if spelled else [text]:
            if part:
                encode = self._model.encoded if is_first and not start else self._model.continued
                found.append(_moved(encode(part), start))
            start += len(part)
        return Encoded.joined(found)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text for token ids (n_tokens,), special ones as their texts. Raises
        ConfigError for an id outside the vocabulary."""
        special, n_pieces = self._texts, self._library.vocab_size()
        text, run = "", list[int]()
        for number in [*self._checked(ids).tolist(), None]:
            if number is not None and number not in special and number < n_pieces:
                run.append(number)
                continue
            if run:
                text += self._model.decoded(run, is_first=not text)
                run = []
            text += special.get(number, "")
        return text

    @cached_property
    def _texts(self) -> dict[int | None, str]:
        return {number: text for text, number in self.special_tokens.items()}


def _moved(encoded: Encoded, start: int) -> Encoded:
    return Encoded(encoded.ids, encoded.offsets + start)


def _opened(model: bytes) -> Any:
    """Return sentencepiece's processor for the content of a tokenizer.model. Raises ConfigError if
    the package is missing, CorruptError for another kind of file."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise missing_package(
            "a tokenizer.model",
            "sentencepiece",
            "sentencepiece",
            "save its tokenizer.json beside it",
        ) from error
    try:
        processor = SentencePieceProcessor(model_proto=model)
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        raise CorruptError(
            f"it is not a model of SentencePiece ({' '.join(str(error).split()):.80}); a "
            "tokenizer.model of tiktoken, as Llama 3's, comes with a tokenizer.json, which is read"
        ) from error
    if not processor.vocab_size():
        raise CorruptError("it is not a model of SentencePiece: it has no pieces")
    return processor


def _fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) for the fields of a message as Protocol Buffers encode it. Raises
    CorruptError if it is malformed."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while shift < 70:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise IndexError("a number is too long")

    try:
        while at < len(message):
            key = varint()
            match key & 7:
                case 0:
                    yield key >> 3, varint()
                case 2:
                    size = varint()
                    yield key >> 3, message[at : at + size]
                    at += size
                case 1 | 5 as kind:
                    at += 8 if kind == 1 else 4
                case kind:
                    raise IndexError(f"a field of kind {kind}")
    except IndexError as error:
        raise CorruptError(f"it is not a model of SentencePiece: {error}") from error


def _message(message: bytes, number: int) -> bytes:
    """Return the bytes of a field of a message, the last if it is repeated; empty without one."""
    values = (value for found, value in _fields_of(message) if found == number)
    return b"".join(value for value in [*values][-1:] if isinstance(value, bytes))


def _last_number(message: bytes, number: int) -> int | None:
    """Return the number in a field of a message; None without one."""
    found = (value for each, value in _fields_of(message) if each == number)
    return next((value for value in found if isinstance(value, int)), None)
