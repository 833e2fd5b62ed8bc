"""`Tokenizer`, the base class of every kind: token ids, a hash, and the JSON file it is saved
as."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.chat import ChatTemplate, Segment, unescaped
from pentameter.disk.atomic import storage_errors
from pentameter.errors import ConfigError, CorruptError

Ids = npt.NDArray[np.int64]
"""Token ids (n_tokens,), int64."""
Content = Mapping[str, Any]
"""A parsed JSON object."""
Mask = npt.NDArray[np.bool_]
"""True for the tokens that a model learns (n_tokens,)."""
End = tuple[str | None, int | None]
"""The token, else the id, that ends a document; None where it is not known."""

GENERATION = "generation_config.json"
"""Name of the file that says how a published model's texts are drawn and ended."""
NO_IDS: Ids = np.empty(0, dtype=np.int64)


class Ends(NamedTuple):
    """The tokens and texts that end a text of a model, and are no part of it."""

    tokens: frozenset[int] = frozenset()
    """Ids of tokens."""
    texts: tuple[str, ...] = ()
    """Stop texts, none of them empty."""


NO_ENDS = Ends()

FORMAT = "pentameter-tokenizer"
VERSION = 1
FILE_LIMIT_BYTES = 1 << 28  # about 15 million words


class Tokenizer(ABC):
    """Converts text to token ids and back. It is saved as a JSON object, over which its hash is
    computed."""

    kind: ClassVar[str]
    """The kind's name in files: `char`, `word`, `bpe`, `library` or `sentencepiece`."""
    vocab_size: int
    """Number of distinct ids, 0 … vocab_size - 1."""
    end_of_text: int | None = None
    """The id put after each document, None if there is none; no text encodes to it."""
    prefix: Sequence[int] = ()
    """The ids put before each document, and before a prompt, such as the beginning of a sequence in
    Llama's kind; `encode` adds none."""
    opening: Sequence[int] = ()
    """The ids that an empty prompt becomes, after `prefix`, for a model whose training text has too
    few documents to learn how one begins; empty where it learns that. They change no id."""
    chat: ChatTemplate | None = None
    """The chat template that renders messages, if one came with the tokenizer; it changes no id."""
    published: Mapping[str, str] = MappingProxyType({})
    """Maps name to text for small files that came with the tokenizer in a Hugging Face folder. An
    export writes them again; they change no id."""

    @property
    def published_generation(self) -> dict[str, Any] | None:
        """The content of the generation_config.json that came with the tokenizer; None without one,
        and for a damaged one, as it only advises."""
        try:
            content = json.loads(self.published.get(GENERATION, "null"))
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Maps text to id for the tokens that no text encodes to; only a chat template writes
        them."""
        return {}

    @property
    def end_ids(self) -> frozenset[int]:
        """The id of the end of text, if there is one."""
        return frozenset() if self.end_of_text is None else frozenset({self.end_of_text})

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of tokens that were added to the vocabulary after it had been made, special ones
        among them."""
        return frozenset(self.special_tokens.values())

    @property
    def byte_ids(self) -> Collection[int]:
        """The ids whose tokens are text only together with their neighbours: tokens for single
        bytes, of which several in a row form a character in UTF-8. Ids that no token has are among
        them."""
        return ()

    @cached_property
    def token_bytes(self) -> Sequence[bytes] | None:
        """The bytes that each token adds to a text, by id; empty for special tokens, which are no
        text, and ids that no token has. None if what a token adds depends on its neighbours. Only
        the space with which a whole text begins may be missing when it is decoded."""
        return None

    @property
    def shown_prefix(self) -> str:
        """The prefix for a message, such as `'<s>'`; "no token" for none."""
        return repr(self.decode(self.prefix)) if self.prefix else "no token"

    @classmethod
    @abstractmethod
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from `content`, the parsed JSON of a file that `save` wrote; its
        format, kind and hash are not checked here. Raises CorruptError or ConfigError if the
        content is invalid."""

    @classmethod
    def from_tokenizer_json(cls, content: Content, end: End, warnings: list[str]) -> Self | None:
        """Build a tokenizer of this class from a `tokenizer.json`, as Hugging Face's libraries
        write it. Return None if this class would encode text to other ids; the caller then tries
        another class.

        content: the parsed file; its `model.vocab` is an object.
        end: (token, id) for the end of a document, each None if not known. Only a LibraryTokenizer
            uses it: the token, or the id if the vocabulary lacks the token.
        warnings: gets a line that names added tokens to which no text is ever encoded.

        Raises CorruptError or ConfigError if the content is invalid.
        """
        return None

    def to_tokenizer_json(self) -> bytes | None:
        """Return the bytes of a `tokenizer.json` with which Hugging Face's libraries encode text to
        the same ids; None for a kind of tokenizer that cannot be written so (words)."""
        return None

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return a text's token ids (n_tokens,), int64; nothing is added at the ends. Raises
        ConfigError if the text cannot be encoded."""

    def encode_document(self, text: str) -> Ids:
        """Return `prefix` and a text's token ids (n_tokens,), int64, as the model reads a document.
        Raises ConfigError if the text cannot be encoded."""
        return np.concatenate([np.array(self.prefix, dtype=np.int64), self.encode(text)])

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return each text's token ids (n_tokens,), int64; ConfigError if one cannot be encoded."""
        return [self.encode(text) for text in texts]

    def encode_segments(
        self, documents: Sequence[Sequence[Segment]], *, is_rendered: bool
    ) -> list[tuple[Ids, Mask]]:
        """Return each document's token ids (n_tokens,), int64, and its loss mask (n_tokens,), bool.
        A document is a list of segments (text, whether a model learns it).

        With `is_rendered`, a chat template wrote the texts: a special token of the template's
        becomes its id, and one that stood in a message, and was marked by `escaped` before the
        template ran, becomes ordinary text. Without, special tokens become their ids. This
        implementation encodes segments one by one. Raises ConfigError for a text that cannot be
        encoded.
        """
        found = []
        for segments in documents:
            texts = [unescaped(text) if is_rendered else text for text, _ in segments]
            ids = self.encode_batch(texts)
            mask = np.repeat([is_learned for _, is_learned in segments], list(map(len, ids)))
            found.append((np.concatenate([NO_IDS, *ids]), mask.astype(bool)))
        return found

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text for token ids (n_tokens,); ConfigError for an id outside the
        vocabulary."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Return everything that decides the ids, as the JSON values that `from_content` reads."""

    @cached_property
    def hash(self) -> str:
        """The sha256, in hex, over everything that decides the ids of documents; the chat template
        is not part of it."""
        return _sha256(self._content())

    @cached_property
    def hash_of_ids(self) -> str:
        """The sha256, in hex, over everything that decides which ids a text has: equal for two that
        differ in `prefix` alone."""
        return _sha256({**self._content(), "prefix": None})

    def to_bytes(self) -> bytes:
        """Return the content of the tokenizer's JSON file: ASCII, the same on every machine."""
        content = {**self._content(), "sha256": self.hash}
        if self.opening:
            content["opening"] = list(self.opening)
        if self.chat is not None:
            content["chat"] = self.chat.to_json()
        if self.published:
            content["published"] = dict(self.published)
        return (json.dumps(content, indent=1) + "\n").encode("ascii")

    def save(self, path: Path) -> None:
        """Write the JSON file that `load_tokenizer` reads; StorageError if that fails."""
        with storage_errors(path, "write"):
            Path(path).write_bytes(self.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle everything that decides the ids; chat template and opening are lost."""
        content = json.loads(json.dumps(self._content()))
        return type(self).from_content, (content,), {"prefix": self.prefix}

    def _content(self) -> dict[str, Any]:
        """Return the JSON object of the tokenizer's file without its hash and chat template."""
        content = {"format": FORMAT, "version": VERSION, "kind": self.kind, **self._fields()}
        return {**content, "prefix": list(self.prefix)} if self.prefix else content

    def _checked(self, ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
        """Return ids as an int64 array (n_tokens,); ConfigError for one outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if wrong.size:
            raise ConfigError(
                f"token id {array[wrong[0]]} at position {wrong[0]} is outside the vocabulary "
                f"0 … {self.vocab_size - 1}"
            )
        return array


class Encoded(NamedTuple):
    """A text as tokens, each with the characters that it stands for."""

    ids: Ids
    """(n_tokens,) token ids."""
    offsets: Ids
    """(n_tokens, 2): the characters of the text that each token stands for, as start and stop."""

    @classmethod
    def of(cls, encoding: Any, start: int = 0, *, has_offsets: bool = True) -> Self:
        """Return the tokens in an `Encoding` of the `tokenizers` library as an Encoded. `start` is
        the character at which the encoded text begins in the whole text, and is added to the
        offsets. Without `has_offsets` there are none: an array of shape (0, 2)."""
        offsets = chain.from_iterable(encoding.offsets if has_offsets else ())
        ids = encoding.ids
        return cls(
            np.fromiter(ids, dtype=np.int64, count=len(ids)),
            np.fromiter(offsets, dtype=np.int64).reshape(-1, 2) + start,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return one Encoded for a text, from those of its consecutive parts."""
        if len(parts) == 1:
            return parts[0]
        offsets = np.concatenate([np.empty((0, 2), np.int64), *(part.offsets for part in parts)])
        return cls(np.concatenate([NO_IDS, *(part.ids for part in parts)]), offsets)

    def learned(self, lengths: Sequence[int], are_learned: Sequence[bool]) -> Mask:
        """Return the loss mask (n_tokens,) for a text in segments. A token is True if one of its
        characters is in a learned segment, as in transformers. lengths: characters in each segment.
        are_learned: whether a model learns it."""
        ends, chosen = np.cumsum([0, *lengths]), np.array(are_learned, dtype=bool)
        starts, stops = ends[:-1][chosen], ends[1:][chosen]
        number = np.searchsorted(stops, self.offsets[:, 0], side="right")  # of the next to end
        return self.offsets[:, 1] > np.append(starts, np.iinfo(np.int64).max)[number]


class LibraryBacked(Tokenizer):
    """Base class for tokenizers that encode and decode by the Hugging Face `tokenizers` library;
    `_library` is the library's object."""

    _library: Any

    def encode_segments(
        self, documents: Sequence[Sequence[Segment]], *, is_rendered: bool
    ) -> list[tuple[Ids, Mask]]:
        """Return each document's token ids (n_tokens,), int64, and its loss mask (n_tokens,), as
        `Tokenizer.encode_segments` does. The segments are joined and encoded as one text, so a
        token may begin in one segment and end in another; it is learned if either segment is."""
        texts = ["".join(text for text, _ in segments) for segments in documents]
        encoded = self._encoded_rendered(texts) if is_rendered else self._encoded(texts)
        found = []
        for each, segments in zip(encoded, documents, strict=True):
            texts = [unescaped(text) if is_rendered else text for text, _ in segments]
            is_learned = [learned for _, learned in segments]
            found.append((each.ids, each.learned(list(map(len, texts)), is_learned)))
        return found

    @abstractmethod
    def _encoded(self, texts: Sequence[str]) -> list[Encoded]:
        """Return each text's tokens, as `encode_batch` gives them, with offsets."""

    @abstractmethod
    def _encoded_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of texts that a chat template wrote, special tokens included. Offsets
        count characters of the texts after `unescaped`."""

    def encode(self, text: str) -> Ids:
        """Return token ids (n_tokens,), int64, without any special token.

        Raises ConfigError for half a surrogate pair, which is not text.
        """
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text for token ids (n_tokens,), special ones as the vocabulary writes them;
        bytes that are not UTF-8 give U+FFFD.

        Raises ConfigError for an id outside the vocabulary.
        """
        text: str = self._library.decode(self._checked(ids).tolist(), skip_special_tokens=False)
        return text


def _sha256(content: Content) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def strings(content: Mapping[str, Any], key: str, kind: str) -> list[str]:
    """Return the list of strings at `key` in `content`, a tokenizer file's parsed JSON. Raises
    CorruptError if there is none, or something else; the message calls the strings `kind`, a plural
    such as "words"."""
    found = content.get(key)
    if not isinstance(found, list) or not all(isinstance(string, str) for string in found):
        raise CorruptError(f'"{key}" is not a list of {kind}')
    return found
