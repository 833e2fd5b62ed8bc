"""Tokenizers: text to token ids and back. A tokenizer is one JSON file that carries its hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy.typing as npt

from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.char import (
    N_CODE_POINTS,
    CharTokenizer,
    UnseenCharacterError,
    code_points,
)
from pentameter.data.tokenizers.file import FORMAT, VERSION, Ids, read_tokenizer_file
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError, CorruptError

__all__ = [
    "FORMAT",
    "N_CODE_POINTS",
    "BpeTokenizer",
    "CharTokenizer",
    "Ids",
    "Tokenizer",
    "UnseenCharacterError",
    "WordTokenizer",
    "code_points",
    "load_tokenizer",
]


class Tokenizer(Protocol):
    """What every tokenizer offers."""

    @property
    def kind(self) -> str:
        """`char`, `word` or `bpe`."""

    @property
    def vocab_size(self) -> int:
        """Distinct ids: 0 … vocab_size - 1."""

    @property
    def hash(self) -> str:
        """sha256, in hex, of all that decides its ids."""

    @property
    def end_of_text(self) -> int | None:
        """The id that follows each document, None where there is none; no text encodes to it."""

    def encode(self, text: str) -> Ids:
        """Token ids (n_tokens,), int64, of a text; ConfigError where it cannot be encoded."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The token ids of each text, as `encode` gives them."""

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of token ids; ConfigError for an id outside the vocabulary."""

    def to_bytes(self) -> bytes:
        """The content of the file that `load_tokenizer` reads."""

    def save(self, path: Path) -> None:
        """Write that file."""


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Tokenizer]] = MappingProxyType(
    {
        "char": CharTokenizer.from_content,
        "word": WordTokenizer.from_content,
        "bpe": BpeTokenizer.from_content,
    }
)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer saved in a JSON file.

    Raises ConfigError when there is no such file, CorruptError when it is not a tokenizer of this
    library, is damaged, or disagrees with its own hash.
    """
    path = Path(path)
    content = read_tokenizer_file(path)
    kind = content.get("kind")
    if content.get("version") != VERSION or not isinstance(kind, str) or kind not in _KINDS:
        raise CorruptError(
            f"{path}: version {content.get('version')!r}, kind {kind!r} is not "
            f"known to this version; expected version {VERSION}, kind {', '.join(_KINDS)}"
        )
    try:
        tokenizer = _KINDS[kind](content)
    except (ConfigError, CorruptError) as error:
        raise CorruptError(f"{path}: {error}") from error
    if content.get("sha256") != tokenizer.hash:
        raise CorruptError(
            f"{path} is damaged or was edited: its sha256 field says {content.get('sha256')!r}, "
            f"its content gives {tokenizer.hash!r}; make it anew"
        )
    return tokenizer
