"""Finds how many bytes a table's rows (Arrow) become when they are decoded, without decoding them.

Arrow can store a long value once and repeat it by indices (dictionaries, runs, views, lists that
overlap), so terabytes of rows fit into a kilobyte. Batches of rows are therefore cut by decoded
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

EXACT_BYTES = 1 << 25
"""Size up to which `decoded_bytes` counts exactly; beyond, its result only says that there are
more."""

_NULL_BYTES, _NUMBER_BYTES, _TEXT_BYTES, _LEAST_BYTES = 4, 8, 3, 2  # null 12345678 "", 1,
_OFFSETS = {"String": "<i4", "Binary": "<i4", "LargeString": "<i8", "LargeBinary": "<i8"}
_VIEW_BYTES = 16  # of which the first four are the text's length


def cut_rows(batch: Any, most_rows: int, most_bytes: int) -> Iterator[tuple[Any, int]]:
    """Yield the rows of a valid pyarrow record batch as consecutive slices, each with an estimate
    of its size once decoded, in bytes. A slice has at most `most_rows` rows, and at most
    `most_bytes` bytes unless it is a single row."""
    n_rows = batch.num_rows
    for start in range(0, n_rows, most_rows):
        waiting = [(start, min(most_rows, n_rows - start))]
        while waiting:
            first, n = waiting.pop()
            rows = batch.slice(first, n)
            n_bytes = sum(decoded_bytes(column) for column in rows.columns)
            if n == 1 or n_bytes <= most_bytes:
                yield rows, n_bytes
            else:
                waiting += [(first + n // 2, n - n // 2), (first, n // 2)]


def decoded_bytes(array: Any) -> int:
    """Return about how many bytes the values of a valid pyarrow array take as JSON; if they take
    more than EXACT_BYTES, some number above that. This takes little time and memory, however often
    the array repeats the same values."""
    n_bytes = _LEAST_BYTES * len(array)
    if 0 < n_bytes <= EXACT_BYTES:
        for part in _parts(array):
            n_bytes += part
            if n_bytes > EXACT_BYTES:
                break
    return n_bytes


def _parts(array: Any) -> Iterator[int]:
    """Yield numbers that sum to the decoded bytes of a non-empty pyarrow array: one for each
    component, such as field names, texts and child arrays."""
    n, kind = len(array), array.type
    match type(array).__name__.removesuffix("Array"):
        case "String" | "Binary" | "LargeString" | "LargeBinary" | "StringView" | "BinaryView":
            yield _TEXT_BYTES * n + int(_text_lengths(array, slice(None)).sum())
        case "Null":
            yield _NULL_BYTES * n
        case "Dictionary":
            indices = array.indices.drop_null().to_numpy()
            yield from _repeated(array.dictionary, *np.unique(indices, return_counts=True))
        case "RunEndEncoded":
            ends = np.clip(array.run_ends.to_numpy().astype(np.int64) - array.offset, 0, n)
            times = np.diff(ends, prepend=0)
            yield from _repeated(array.values, np.flatnonzero(times), times[times > 0])
        case "List" | "LargeList" | "Map":
            first, end = array.offsets[0].as_py(), array.offsets[n].as_py()
            yield decoded_bytes(array.values.slice(first, end - first))
        case "FixedSizeList":
            size = kind.list_size
            yield decoded_bytes(array.values.slice(array.offset * size, n * size))
        case "ListView" | "LargeListView" | "Union":
            yield from map(decoded_bytes, _scattered(array))
        case "Struct":
            for number, each in enumerate(kind):
                yield n * (len(each.name.encode()) + _TEXT_BYTES)
                yield decoded_bytes(array.field(number))
        case _ if hasattr(array, "storage"):  # an extension type
            yield decoded_bytes(array.storage)
        case _:
            yield n * max(kind.bit_width // 8, _NUMBER_BYTES)


def _scattered(array: Any) -> Iterator[Any]:
    """Yield the slices of child arrays to which the values of a list view or union refer; several
    values may refer to the same slice."""
    if hasattr(array, "sizes"):
        for row in np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)):
            yield array.values.slice(array.offsets[row].as_py(), array.sizes[row].as_py())
        return
    if array.type.mode == "sparse":
        yield from map(array.field, range(array.type.num_fields))
        return
    inside = slice(array.offset, array.offset + len(array))  # pyarrow's `offsets` leave it out
    codes, offsets = array.buffers()[1:3]
    numbers = {code: number for number, code in enumerate(array.type.type_codes)}
    chosen = np.frombuffer(codes, np.int8)[inside], np.frombuffer(offsets, "<i4")[inside]
    for code, offset in zip(*(each.tolist() for each in chosen), strict=True):
        yield array.field(numbers[code]).slice(offset, 1)


def _repeated(
    values: Any, numbers: npt.NDArray[Any], times: npt.NDArray[np.int64]
) -> Iterator[int]:
    """Yield numbers that sum to the decoded bytes of some values of a pyarrow array: the values at
    the indices `numbers` (n,), each counted as often as `times` (n,) says. Texts are summed in one
    number."""
    if type(values).__name__.removesuffix("Array") in (*_OFFSETS, "StringView", "BinaryView"):
        lengths = _text_lengths(values, numbers) + _TEXT_BYTES
        yield int(lengths.astype(np.float64) @ times)
        return
    for number, n in zip(numbers.tolist(), times.tolist(), strict=True):
        yield n * decoded_bytes(values.slice(number, 1))


def _text_lengths(array: Any, chosen: Any) -> npt.NDArray[np.int64]:
    """Return the bytes of an array's texts at `chosen` (indices, or a slice), int64. Other texts,
    of which a dictionary may have millions, are not copied."""
    n, buffer = len(array), array.buffers()[1]
    if (dtype := _OFFSETS.get(type(array).__name__.removesuffix("Array"))) is not None:
        offsets = np.frombuffer(buffer, dtype)[array.offset : array.offset + n + 1]
        return (offsets[1:][chosen] - offsets[:-1][chosen]).astype(np.int64)
    views = np.frombuffer(buffer, "<i4")[:: _VIEW_BYTES // 4][array.offset : array.offset + n]
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)[chosen]
    return np.where(is_valid, views[chosen], 0).astype(np.int64)
