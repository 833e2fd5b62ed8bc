"""The JSON file of a tokenizer, its hash, and the check of ids that every kind shares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pentameter.errors import ConfigError, CorruptError, StorageError

Ids = npt.NDArray[np.int64]

FORMAT = "pentameter-tokenizer"
VERSION = 1
FILE_LIMIT_BYTES = 1 << 28  # about 15 million words


class SavedTokenizer:
    """A tokenizer whose content is a JSON object; the hash is over that content."""

    kind: ClassVar[str]

    @property
    def vocab_size(self) -> int:
        """Distinct ids: 0 … vocab_size - 1."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        """All that decides the ids, as JSON values; `load_tokenizer` reads them back."""
        raise NotImplementedError

    @cached_property
    def hash(self) -> str:
        """sha256, in hex, of all that decides its ids."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

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


def read_tokenizer_file(path: Path) -> dict[str, Any]:
    """The JSON object in a tokenizer's file, of this format and version.

    Raises ConfigError when there is no such file, CorruptError when it is something else,
    StorageError when it cannot be read.
    """
    if not path.is_file():
        raise ConfigError(
            f"tokenizer file {path} does not exist; write char, word, gpt2, bpe:VOCAB_SIZE "
            "(such as bpe:8192), or a tokenizer file"
        )
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
    if content.get("format") != FORMAT:
        raise CorruptError(f'{path} is not a tokenizer: its "format" is not {FORMAT!r}')
    return content
