"""Files that other programs wrote, read whole: what is wrong with one is said by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pentameter.errors import ConfigError, CorruptError, StorageError

LIMIT_BYTES = 1 << 28
"""Size above which no such file is read."""


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """The UTF-8 text of a file; links are followed, as Hugging Face's cache consists of them.

    Raises ConfigError when it is absent, CorruptError when it is no text or too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit_bytes:
        raise CorruptError(f"{path} is larger than {limit_bytes:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path} is damaged: not UTF-8 at byte {error.start}") from error


def read_json(path: Path, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """The JSON object in a file; errors as `read_text`, CorruptError for anything else."""
    try:
        content = json.loads(read_text(path, limit_bytes))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path} is malformed: it is not a JSON object")
    return content
