"""Parquet and Arrow files: which split a file's name tells, and its rows, read a few at a time
through `pyarrow`.

Only the wanted columns are read, page by page, so memory does not grow with a Parquet file or its
row groups; for Arrow one record batch is held, and looked through before it is used. A null value
becomes an absent key, also inside lists and objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from pentameter.data.corpora.decoded_sizes import EXACT_BYTES, cut_rows
from pentameter.data.corpora.records.rows import BadRowError, Row, Rows
from pentameter.disk.atomic import storage_error
from pentameter.errors import CorruptError, missing_package

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

FLAT_ROWS = 8
"""Most rows that pyarrow decodes at once from a Parquet file without nested columns. Each may be a
long text that the file stores once. Decoding more at once is not faster."""

LONGEST_ROW_BYTES = EXACT_BYTES
"""Maximum decoded bytes of a row, as of a line of JSONL."""

SMALL_BYTES = 1 << 16
"""Size up to which a Parquet file's row groups are scanned for lists with many values that take no
space in the file."""

_OF_FOREIGN_BYTES = (
    ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip
"""Errors, besides pyarrow's own, that pyarrow and Python raise for damaged names, sizes and
values."""
_ARROW_FILE = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def is_table(file: PurePath | str) -> bool:
    """Return True if a file name ends in a table suffix (.parquet, .arrow, .feather)."""
    return str(file).lower().endswith(TABLE_SUFFIXES)


def split_of(path: PurePosixPath) -> str | None:
    """Return the split (`train`, `val`, `test`) that the path of a table names, by a word in a
    folder's or the file's name; if several parts of the path have such a word, the last one
    decides. None if none has."""
    found = (split_in(part) for part in reversed(path.parts))
    return next((split for split in found if split is not None), None)


def split_in(name: str) -> str | None:
    """Return the split named by a word in a file's or folder's name: train if it is among several;
    None without such a word."""
    words = re.split("[^a-z]+", name.lower())
    splits = {_SPLITS[word] for word in words if word in _SPLITS}
    return "train" if "train" in splits else next(iter(sorted(splits, reverse=True)), None)


def read_rows(file: Path, wanted: Sequence[str]) -> Rows:
    """Yield each row as a dict with those `wanted` columns that the table has and that are not
    null, with its place for messages ("FILE, row 0"). A wanted field with dots (`meta.text`) stands
    for the column whose name it begins with, too. A row that cannot be decoded is an error in place
    of a dict.

    Raises ConfigError without pyarrow, CorruptError for a damaged or truncated file, two wanted
    columns of one name, and a row longer than LONGEST_ROW_BYTES; StorageError if it cannot be read.
    """
    wanted = [name for field in wanted for name in _columns_for(field)]
    number = 0
    with _table_errors(file):
        for batch in _batches(file, wanted):
            for rows, n_bytes in cut_rows(batch, MOST_ROWS, BATCH_BYTES):
                if n_bytes > LONGEST_ROW_BYTES:
                    raise CorruptError(
                        f"{file}, row {number} is longer than {LONGEST_ROW_BYTES >> 20} MiB; "
                        "divide it into several rows, or write its text to a .txt file"
                    )
                for record in _decoded(rows, file, number):
                    yield record, f"{file}, row {number}"
                    number += 1


def columns_of(file: Path) -> list[str]:
    """Return the names of a table's columns. Raises ConfigError without pyarrow, CorruptError or
    StorageError for a damaged or unreadable file."""
    with _table_errors(file):
        return list(_schema_of(file).names)


def has_column(file: Path, field: str) -> bool:
    """Return whether a table has a column named `field`, or with dots in it (`meta.text`) columns
    within one another. Raises ConfigError, CorruptError and StorageError as `columns_of` does."""
    with _table_errors(file):
        schema = _schema_of(file)
        found = {name: schema.field(n).type for n, name in enumerate(schema.names)}
        return _holds(found, field, _pyarrow(file).types)


def _holds(fields: Mapping[str, Any], field: str, types: Any) -> bool:
    """Return whether `fields`, name → type (pyarrow), have `field`, a name or a path of names."""
    if field in fields:
        return True
    inner = [
        ({kind.field(n).name: kind.field(n).type for n in range(kind.num_fields)}, name)
        for name in _columns_for(field)
        if (kind := fields.get(name)) is not None and types.is_struct(kind)
    ]
    return any(_holds(each, field.removeprefix(f"{name}."), types) for each, name in inner)


def _columns_for(field: str) -> list[str]:
    """Return the names of columns in which a field may be: its own, and what precedes its dots."""
    parts = field.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _schema_of(file: Path) -> Any:
    """Return a table's schema (pyarrow)."""
    if _is_parquet(file):
        return _pyarrow(file).parquet.read_schema(file)
    with _arrow_reader(file) as reader:
        return reader.schema


def _is_parquet(file: Path) -> bool:
    return file.name.lower().endswith(".parquet")


def _batches(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    """Yield the table's record batches (pyarrow), checked to be valid, with those `wanted` columns
    that it has. Raises CorruptError if it has a wanted column twice."""
    columns = columns_of(file)
    for name in dict.fromkeys(wanted):
        if (n := columns.count(name)) > 1:
            raise CorruptError(
                f"{file} has {n} columns named {name!r}, and which is meant is not known; rename "
                "the others"
            )
    chosen = [name for name in columns if name in wanted]
    yield from (_parquet_batches if _is_parquet(file) else _arrow_batches)(file, chosen)


def _parquet_batches(file: Path, columns: list[str]) -> Iterator[Any]:
    parquet, types = _pyarrow(file).parquet, _pyarrow(file).types
    # A buffer, and nothing read ahead: else whole column chunks of a row group are held.
    options: dict[str, Any] = {
        "buffer_size": 1 << 20,
        "pre_buffer": False,
        "page_checksum_verification": True,
    }
    with parquet.ParquetFile(file, **options) as table:
        kinds = [table.schema_arrow.field(name).type for name in columns]
        is_flat = not any(types.is_nested(kind) or types.is_dictionary(kind) for kind in kinds)
        if not is_flat:  # a row may repeat a long text: it stays a number in a dictionary
            _refuse_long_lists(file, table)
            leaves = map(table.schema.column, range(len(table.schema)))
            options["read_dictionary"] = [
                each.path for each in leaves if each.physical_type == "BYTE_ARRAY"
            ]
    most_rows = FLAT_ROWS if is_flat else MOST_ROWS
    with parquet.ParquetFile(file, **options) as table:
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            n_bytes = about.total_byte_size // max(about.num_rows, 1)
            n_rows = min(max(BATCH_BYTES // max(n_bytes, 1), 1), most_rows)
            yield from table.iter_batches(
                n_rows, row_groups=[group], columns=columns, use_threads=False
            )


def _refuse_long_lists(file: Path, table: Any) -> None:
    """Raise CorruptError if a small Parquet file, open as `table`, has lists with a great many
    values (nulls, or one number again and again), as all values of a row would be decoded at
    once."""
    groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > SMALL_BYTES:
        return
    table.scan_contents()  # a few at a time; and metadata that is damaged ends the process
    for group in groups:
        for column in map(group.column, range(group.num_columns)):
            if column.num_values - group.num_rows > LONGEST_ROW_BYTES:
                raise CorruptError(
                    f"{file} has lists of {column.num_values:,} values in {group.num_rows:,} rows "
                    f"({column.path_in_schema}), longer than {LONGEST_ROW_BYTES >> 20} MiB; leave "
                    "them out"
                )


def _arrow_batches(file: Path, columns: list[str]) -> Iterator[Any]:
    n_rows = 0
    with _arrow_reader(file, columns) as reader:
        is_file = hasattr(reader, "num_record_batches")
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            _validate(batch.select(columns), file, n_rows)
            yield batch.select(columns)
            n_rows += batch.num_rows


def _validate(batch: Any, file: Path, first: int) -> None:
    """Raise CorruptError unless the offsets and indices in a record batch stay within it, and its
    texts are UTF-8: pyarrow would read memory beyond it. first: the number of its first row in the
    file."""
    invalid = _pyarrow(file).lib.ArrowException
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except invalid as error:
            where = f"{file}, rows {first} to {first + batch.num_rows - 1}"
            raise _damage(f"{where}: column {name!r}", error) from error


def _decoded(rows: Any, file: Path, first: int) -> Iterator[Row]:
    """Yield the rows of a record batch as dicts without null values; for a value that Python cannot
    represent, an error in place of the row. first: the number of the first row in the file, for the
    message."""
    try:
        records = rows.to_pylist()
    except Exception as error:  # each type has errors of its own: no UTF-8, a date out of range, …
        if rows.num_rows > 1:
            for n in range(rows.num_rows):
                yield from _decoded(rows.slice(n, 1), file, first + n)
            return
        yield BadRowError(
            f"{file}, row {first} cannot be read ({_reason(error)}); write its text as UTF-8, or "
            "leave the row out"
        )
        return
    yield from map(_present, records)


@contextmanager
def _arrow_reader(file: Path, columns: Sequence[str] = ()) -> Iterator[Any]:
    """Context manager that yields pyarrow's reader for an Arrow file or stream. `columns` are those
    to decompress, all if empty. Raises CorruptError if the end mark is missing. The file is not
    memory-mapped, as a large one's pages would count as this process's memory."""
    pyarrow = _pyarrow(file)
    ipc = pyarrow.ipc
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
    open_it = ipc.open_file if start == _ARROW_FILE else ipc.open_stream
    options = ipc.IpcReadOptions(use_threads=False)
    if columns:
        with pyarrow.OSFile(str(file)) as source, open_it(source) as reader:
            names = reader.schema.names
        options.included_fields = [names.index(name) for name in columns]
    with pyarrow.OSFile(str(file)) as source, open_it(source, options=options) as reader:
        yield reader


@contextmanager
def _table_errors(file: Path) -> Iterator[None]:
    """Context manager that turns pyarrow's errors into CorruptError about `file`, and OSError into
    StorageError."""
    invalid = (_pyarrow(file).lib.ArrowException, *_OF_FOREIGN_BYTES)
    try:
        yield
    except OSError as error:
        if error.errno is None:  # Parquet's, for bytes that cannot be decoded
            raise _damage(str(file), error) from error
        raise storage_error(file, "read", error) from error
    except invalid as error:
        raise _damage(str(file), error) from error


def _damage(where: str, error: Exception) -> CorruptError:
    return CorruptError(
        f"{where} is damaged or cut short, or no table ({_reason(error)}); fetch it again, or "
        "leave it out"
    )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


def _pyarrow(file: Path) -> Any:
    """Return pyarrow, imported with its Parquet module. Raises ConfigError, naming `file`, if it is
    not installed."""
    try:
        import pyarrow.parquet

        return pyarrow
    except ImportError as error:
        instead = "write its text as JSONL"
        raise missing_package(f"reading {file}", "pyarrow", "parquet", instead) from error


def _present(value: Any) -> Any:
    """Return a copy of a JSON value in which objects lack the keys whose value is null."""
    if isinstance(value, dict):
        return {key: _present(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_present(each) for each in value]
    return value
