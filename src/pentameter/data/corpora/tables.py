"""Parquet and Arrow files: which split a file's name tells, and its rows, read a few at a time
through `pyarrow`.

Only the wanted columns are read, page by page, so memory does not grow with a Parquet file or its
row groups; for Arrow one record batch is held. A null value becomes an absent key, also inside
lists and objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from pentameter.errors import ConfigError, CorruptError, StorageError

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
_SPLITS = {
    "train": "train", "training": "train",
    "validation": "val", "valid": "val", "val": "val", "dev": "val",
    "test": "test",
}  # fmt: skip
"""Maps a word in the name of a table, or of its folder, to its split."""

BATCH_BYTES = 1 << 22
"""Approximate bytes of a table decoded at once."""

MOST_ROWS = 4096
"""Maximum rows decoded at once."""

_ARROW_FILE = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def is_table(file: PurePath | str) -> bool:
    """Return True if a file name ends in a table suffix (.parquet, .arrow, .feather)."""
    return str(file).lower().endswith(TABLE_SUFFIXES)


def split_of(path: PurePosixPath) -> str | None:
    """Return the split (`train`, `val`, `test`) named by a word in a table's path, in its last part
    that names one; None if no part does."""
    found = (split_in(part) for part in reversed(path.parts))
    return next((split for split in found if split is not None), None)


def split_in(name: str) -> str | None:
    """Return the split named by a word in a file's or folder's name: train if it is among several;
    None without such a word."""
    words = re.split("[^a-z]+", name.lower())
    splits = {_SPLITS[word] for word in words if word in _SPLITS}
    return "train" if "train" in splits else next(iter(sorted(splits, reverse=True)), None)


def read_rows(file: Path, wanted: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row as a dict with those `wanted` columns that the table has and that are not
    null, with its place for messages ("FILE, row 0").

    Raises ConfigError without pyarrow, CorruptError for a damaged or truncated file, StorageError
    if it cannot be read.
    """
    number = 0
    for batch in _batches(file, wanted):
        for record in batch.to_pylist():
            yield _present(record), f"{file}, row {number}"
            number += 1


def columns_of(file: Path) -> list[str]:
    """Return the names of a table's columns. Raises ConfigError without pyarrow, CorruptError or
    StorageError for a damaged or unreadable file."""
    with _table_errors(file):
        if file.name.lower().endswith(".parquet"):
            return list(_pyarrow("parquet", file).read_schema(file).names)
        with _arrow_reader(file) as reader:
            return list(reader.schema.names)


def _batches(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    """Yield the table's record batches (pyarrow), a few rows each, with those `wanted` columns that
    it has."""
    with _table_errors(file):
        if file.name.lower().endswith(".parquet"):
            yield from _parquet_batches(file, wanted)
        else:
            yield from _arrow_batches(file, wanted)


def _parquet_batches(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    parquet = _pyarrow("parquet", file)
    # A buffer, and nothing read ahead: else whole column chunks of a row group are held.
    options = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}
    with parquet.ParquetFile(file, **options) as table:
        columns = [name for name in wanted if name in table.schema_arrow.names]
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            n_bytes = about.total_byte_size // max(about.num_rows, 1)
            n_rows = min(max(BATCH_BYTES // max(n_bytes, 1), 1), MOST_ROWS)
            yield from table.iter_batches(
                n_rows, row_groups=[group], columns=columns, use_threads=False
            )


def _arrow_batches(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    with _arrow_reader(file) as reader:
        columns = [name for name in wanted if name in reader.schema.names]
        is_file = hasattr(reader, "num_record_batches")
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            chosen = batch.select(columns)
            n_bytes = chosen.get_total_buffer_size() // max(batch.num_rows, 1)
            n_rows = min(max(BATCH_BYTES // max(n_bytes, 1), 1), MOST_ROWS)
            for first in range(0, batch.num_rows, n_rows):
                yield chosen.slice(first, n_rows)


@contextmanager
def _arrow_reader(file: Path) -> Iterator[Any]:
    """Context manager that yields a reader for the batches in an Arrow file or stream; CorruptError
    without an end mark. Not memory-mapped: the pages of a large file would count as this process's
    memory."""
    pyarrow, ipc = _pyarrow("", file), _pyarrow("ipc", file)
    with file.open("rb") as opened:
        start = opened.read(len(_ARROW_FILE))
        end = b""
        if opened.seek(0, 2) >= len(_STREAM_END):
            opened.seek(-len(_STREAM_END), 2)
            end = opened.read()
    if start != _ARROW_FILE and end != _STREAM_END:  # it would only end early
        raise CorruptError(
            f"{file} is damaged or cut short (it has no end mark); fetch it again, or leave it out"
        )
    with pyarrow.OSFile(str(file)) as source:
        open_it = ipc.open_file if start == _ARROW_FILE else ipc.open_stream
        with open_it(source) as reader:
            yield reader


@contextmanager
def _table_errors(file: Path) -> Iterator[None]:
    """Context manager that turns pyarrow's errors into CorruptError about `file`, and OSError into
    StorageError."""
    invalid = _pyarrow("", file).lib.ArrowException
    try:
        yield
    except invalid as error:
        raise _damage(file, error) from error
    except OSError as error:
        if error.errno is None:  # Parquet's, for bytes that cannot be decoded
            raise _damage(file, error) from error
        raise StorageError(f"cannot read {file}: {error.strerror}") from error


def _damage(file: Path, error: Exception) -> CorruptError:
    reason = str(error).partition("\n")[0][:200]
    return CorruptError(
        f"{file} is damaged or cut short, or no table ({reason}); fetch it again, or leave it out"
    )


def _pyarrow(module: str, file: Path) -> Any:
    """Import pyarrow, or its named module; ConfigError if pyarrow is absent, which names `file`."""
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"reading {file} needs the package pyarrow, which is not installed; "
            "`pip install 'pentameter[parquet]'`, or write its text as JSONL"
        ) from error


def _present(value: Any) -> Any:
    """Return a copy of a JSON value without the null values in its objects."""
    if isinstance(value, dict):
        return {key: _present(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_present(each) for each in value]
    return value
