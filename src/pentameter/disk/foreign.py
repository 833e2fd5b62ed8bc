"""Files that other programs wrote, read whole: what is wrong with one is said by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import MissingFileError, read_regular
from pentameter.errors import ConfigError, CorruptError

LIMIT_BYTES = 1 << 28
"""Size above which no such file is read."""


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """The UTF-8 text of a file; links are followed, as Hugging Face's cache consists of them.

    Raises ConfigError when it is absent, CorruptError when it is no text, no regular file or too
    large, StorageError when it cannot be read.
    """
    try:
        data = read_regular(path, max_bytes=limit_bytes, follow_links=True)
    except MissingFileError as error:
        raise ConfigError(f"{path} does not exist") from error
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
