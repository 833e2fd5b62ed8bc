"""The tokenizer saved in a JSON file, of whichever kind, checked against its own hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pentameter.data.tokenizers.base import FILE_LIMIT_BYTES, FORMAT, VERSION, Tokenizer
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError

_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Tokenizer]] = MappingProxyType(
    {kind.kind: kind.from_content for kind in (CharTokenizer, WordTokenizer, BpeTokenizer)}
)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer saved in a JSON file.

    Raises ConfigError when there is no such file, StorageError when it cannot be read, CorruptError
    when it is not a tokenizer of this library, is damaged, or disagrees with its own hash.
    """
    path = Path(path)
    content = _read(path)
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


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a tokenizer's file; errors are those of `load_tokenizer`."""
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
