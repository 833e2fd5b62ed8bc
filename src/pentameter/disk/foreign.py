"""Files from other programs, read whole, with errors that name the path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import MissingFileError, read_regular
from pentameter.errors import ConfigError, CorruptError

LIMIT_BYTES = 1 << 28
"""Largest such file that is read, in bytes."""


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """Return a file's UTF-8 text; links are followed, since Hugging Face's cache consists of them.

    Raises ConfigError if it is absent, CorruptError if it is no text, no regular file or too large,
    StorageError if it cannot be read.
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
    """Return a file's JSON object; raises like `read_text`, and CorruptError for anything else."""
    try:
        content = json.loads(read_text(path, limit_bytes))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path} is malformed: it is not a JSON object")
    return content
