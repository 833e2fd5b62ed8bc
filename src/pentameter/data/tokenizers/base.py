"""`Tokenizer`, the base class of every kind: ids, hash, and the one JSON file it is saved as."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.errors import ConfigError, CorruptError, StorageError

Ids = npt.NDArray[np.int64]

FORMAT = "pentameter-tokenizer"
VERSION = 1
FILE_LIMIT_BYTES = 1 << 28  # about 15 million words


class Tokenizer(ABC):
    """Text to token ids and back; its content is a JSON object, and its hash is of that content."""

    kind: ClassVar[str]
    """`char`, `word`, `bpe` or `library`."""
    vocab_size: int
    """Number of distinct ids: 0 … vocab_size - 1."""
    end_of_text: int | None = None
    """The id that follows each document, None where there is none; no text encodes to it."""
    chat: ChatTemplate | None = None
    """The template that makes messages text, where one came with it; no id depends on it."""

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Text → id of the tokens that no text encodes to; a chat template writes them."""
        return {}

    @classmethod
    @abstractmethod
    def from_content(cls, content: Mapping[str, Any]) -> Self:
        """The tokenizer of a file's content; CorruptError or ConfigError when it is wrong."""

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Token ids (n_tokens,), int64, of a text; ConfigError where it cannot be encoded."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The token ids of each text, as `encode` gives them."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of token ids (n_tokens,); ConfigError for an id outside the vocabulary."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """All that decides the ids, as JSON values; the kind's `from_content` reads them back."""

    @cached_property
    def hash(self) -> str:
        """sha256, in hex, of all that decides its ids."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The content of the tokenizer's JSON file: ASCII, the same on every machine."""
        content = {**self._content(), "sha256": self.hash}
        if self.chat is not None:
            content["chat"] = self.chat.to_json()
        return (json.dumps(content, indent=1) + "\n").encode("ascii")

    def save(self, path: Path) -> None:
        """Write the JSON file that `load_tokenizer` reads; StorageError when that fails."""
        try:
            Path(path).write_bytes(self.to_bytes())
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "kind": self.kind, **self._fields()}

    def _checked(self, ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
        """Ids as an array (n_tokens,); ConfigError for one outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if wrong.size:
            raise ConfigError(
                f"token id {array[wrong[0]]} at position {wrong[0]} is outside the vocabulary "
                f"0 … {self.vocab_size - 1}"
            )
        return array


def strings(content: Mapping[str, Any], key: str, kind: str) -> list[str]:
    """The list of strings at `key` of a file's content; CorruptError calls it a list of `kind`."""
    found = content.get(key)
    if not isinstance(found, list) or not all(isinstance(string, str) for string in found):
        raise CorruptError(f'"{key}" is not a list of {kind}')
    return found
