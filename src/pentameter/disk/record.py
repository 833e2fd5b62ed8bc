"""Small records: JSON objects, each in a file of its own, that one process writes and others read
again and again. A file is replaced in one rename. A record that is absent, damaged, or cannot be
read at the moment is None to its readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pentameter.disk.atomic import read_regular, storage_errors, write_atomic
from pentameter.errors import CorruptError, StorageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_BYTES = 1 << 24
"""Size in bytes beyond which a file holds no record; that of a failure has a traceback."""

T = TypeVar("T")


def read_record(path: Path, kind: Callable[..., T]) -> T | None:
    """Return `kind(**fields)` for the JSON object in a file, as `record_of` does. None if the file
    is absent, cannot be read, is damaged, or is a symlink."""
    with suppress(CorruptError, StorageError):
        return record_of(read_regular(path, max_bytes=MOST_BYTES), kind)
    return None


def record_of(text: bytes | str, kind: Callable[..., T]) -> T | None:
    """Return `kind(**fields)` for the fields of the JSON object `text`, with lists turned into
    tuples. `kind` is a dataclass, `dict`, or another callable that takes the fields by name. None
    if `text` is no JSON object, or `kind` does not take its fields."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        fields = json.loads(text).items()
        return kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in fields})
    return None


def write_record(path: Path, record: DataclassInstance | Mapping[str, Any]) -> None:
    """Replace a file's content by `record`, a dataclass or mapping of JSON values, in one rename.
    Nothing is synced: the record need not survive a power failure. The file's folder is created if
    it is absent. Raises StorageError."""
    content = record if isinstance(record, Mapping) else asdict(record)
    with storage_errors(path, "write"):
        path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(content).encode(), durable=False)
