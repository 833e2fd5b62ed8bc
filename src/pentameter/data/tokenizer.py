"""Tokenizers: text to token ids and back. A tokenizer is one JSON file that carries its hash."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pentameter.errors import ConfigError, CorruptError, StorageError

Ids = npt.NDArray[np.int64]
Unseen = Literal["error", "skip"]

FORMAT = "pentameter-tokenizer"
FILE_LIMIT_BYTES = 1 << 26  # the largest vocabulary of single characters takes about 13 MB
N_CODE_POINTS = 0x110000


class Tokenizer(Protocol):
    """What every tokenizer offers."""

    @property
    def kind(self) -> str:
        """`char`, …"""

    @property
    def vocab_size(self) -> int:
        """Distinct ids: 0 … vocab_size - 1."""

    @property
    def hash(self) -> str:
        """sha256, in hex, of all that decides its ids."""

    def encode(self, text: str, *, unseen: Unseen = "error") -> Ids:
        """Token ids (n_tokens,) of a text."""

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of token ids."""

    def to_bytes(self) -> bytes:
        """The content of the file that `load_tokenizer` reads."""

    def save(self, path: Path) -> None:
        """Write that file."""


class UnseenCharacterError(ConfigError):
    """A character outside the vocabulary; knows which and where."""

    def __init__(self, character: str, position: int, where: str = "the text") -> None:
        self.character = character
        self.position = position
        super().__init__(
            f"character {character!a} (U+{ord(character):04X}) at position {position} of "
            f"{where} is not in the tokenizer's vocabulary; remove it, or prepare the data with a "
            "tokenizer built from text that has it"
        )


class CharTokenizer:
    """One token per character; ids are the ranks of the sorted characters.

    A character outside the vocabulary is an error by default, so that no text is changed in
    silence. `unseen="skip"` leaves such characters out: for foreign text whose odd characters do
    not matter.
    """

    kind = "char"

    def __init__(self, characters: str | Sequence[str]) -> None:
        self.characters = tuple(sorted(set(characters)))
        if not self.characters:
            raise ConfigError("a character tokenizer needs text; this one is empty")
        for character in self.characters:
            if len(character) != 1 or 0xD800 <= ord(character) <= 0xDFFF:
                raise ConfigError(
                    f"{character!a} is not one Unicode character; a character tokenizer "
                    "takes single characters of valid text"
                )
        self._code_points = np.array([ord(c) for c in self.characters], dtype="<u4")
        # One entry more than the last character: `take(mode="clip")` sends all above it there.
        self._ids = np.full(int(self._code_points[-1]) + 2, -1, dtype=np.int32)
        self._ids[self._code_points] = np.arange(len(self.characters), dtype=np.int32)
        self.hash = hashlib.sha256(_canonical(self._content())).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Distinct characters."""
        return len(self.characters)

    def encode(self, text: str, *, unseen: Unseen = "error") -> Ids:
        """Token ids (n_characters,), int64.

        `unseen`: "error" raises UnseenCharacterError (a ConfigError) at the first character
        outside the vocabulary; "skip" leaves such characters out.
        """
        ids = self._ids.take(code_points(text), mode="clip")
        if ids.size and ids.min() < 0:
            if unseen == "error":
                position = int(np.argmax(ids < 0))
                raise UnseenCharacterError(text[position], position)
            ids = ids[ids >= 0]
        return ids.astype(np.int64)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of token ids (n_tokens,); ConfigError for an id outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if wrong.size:
            raise ConfigError(
                f"token id {array[wrong[0]]} at position {wrong[0]} is outside the vocabulary "
                f"0 … {self.vocab_size - 1}"
            )
        return self._code_points[array].tobytes().decode("utf-32-le")

    def to_bytes(self) -> bytes:
        """The content of the tokenizer's JSON file: ASCII, the same on every machine."""
        content = {**self._content(), "sha256": self.hash}
        return (json.dumps(content, indent=1) + "\n").encode("ascii")

    def save(self, path: Path) -> None:
        """Write the tokenizer's JSON file; StorageError when that fails."""
        try:
            Path(path).write_bytes(self.to_bytes())
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": 1, "kind": "char", "characters": self.characters}


def code_points(text: str) -> npt.NDArray[Any]:
    """Unicode code points (n_characters,): uint8 where the text is ASCII, else uint32."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    # A lone surrogate cannot come from a file, but can from a command line; let it be unseen.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer saved in a JSON file.

    Raises ConfigError when there is no such file, CorruptError when it is not a tokenizer of this
    library, is damaged, or disagrees with its own hash.
    """
    path = Path(path)
    content = _read_json(path)
    if content.get("format") != FORMAT:
        raise CorruptError(f'{path} is not a tokenizer: its "format" is not {FORMAT!r}')
    if content.get("version") != 1 or content.get("kind") != "char":
        raise CorruptError(
            f"{path}: version {content.get('version')!r}, kind {content.get('kind')!r} is not "
            "known to this version; expected version 1, kind 'char'"
        )
    characters = content.get("characters")
    if not isinstance(characters, list) or not all(
        isinstance(c, str) and len(c) == 1 for c in characters
    ):
        raise CorruptError(f'{path}: "characters" is not a list of single characters')
    if not characters or any(a >= b for a, b in itertools.pairwise(characters)):
        raise CorruptError(f'{path}: "characters" must be distinct, sorted and not empty')
    try:
        tokenizer = CharTokenizer(characters)
    except ConfigError as error:
        raise CorruptError(f"{path}: {error}") from error
    if content.get("sha256") != tokenizer.hash:
        raise CorruptError(
            f"{path} is damaged or was edited: its sha256 field says {content.get('sha256')!r}, "
            f"its content gives {tokenizer.hash!r}; make it anew"
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"tokenizer file {path} does not exist; write `char` or a tokenizer file")
    try:
        size = path.stat().st_size
        if size > FILE_LIMIT_BYTES:
            raise CorruptError(
                f"{path} is not a tokenizer: {size} bytes, at most {FILE_LIMIT_BYTES}"
            )
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is not a tokenizer: {error}") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path} is not a tokenizer: a JSON object is expected")
    return content


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
