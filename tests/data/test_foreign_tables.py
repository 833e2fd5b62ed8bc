"""Tables that are damaged, hostile or repeat much: refused in words, or read in bounded memory."""

import itertools
import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.corpora import tables
from pentameter.data.corpora.decoded_sizes import cut_rows, decoded_bytes
from pentameter.data.corpora.files import UTF8, FileContents, read_documents, read_records
from pentameter.data.corpora.records.forms import record_fields
from pentameter.data.corpora.records.rows import BadRowError
from pentameter.errors import CorruptError

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")

MIB = 1 << 20
LONG = "x" * MIB
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def parquet(path, columns, names=None):
    pq.write_table(pa.table(columns, names), path)
    return path


def arrow(path, columns, names=None):
    table = pa.table(columns, names)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def feather(path, columns, names=None):
    table = pa.table(columns, names)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


WRITERS = {"a.parquet": parquet, "a.arrow": arrow, "a.feather": feather}


def documents(file, contents=UTF8):
    return ["".join(pieces) for pieces in read_documents(file, contents)]


def texts_at(offsets, data, kind=None):
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind or pa.string(), len(offsets) - 1, buffers)


# -- what points beyond the file ----------------------------------------------------------------


@pytest.mark.parametrize("write", [arrow, feather])
@pytest.mark.parametrize(
    "column",
    [
        texts_at([0, 1 << 20, 3], b"abc"),
        texts_at([0, 2, 1, 3], b"abc"),
        pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int32()), pa.array(["a"]), safe=False),
        pa.DictionaryArray.from_arrays(pa.array([0, 0]), texts_at([0, 2**30, 3], b"abc")),
        pa.ListArray.from_arrays(pa.array([0, 900, 2], pa.int32()), pa.array(["a", "b"])),
    ],
    ids=["offset", "falling", "index", "dictionary", "list"],
)
def test_what_points_beyond_the_file_is_refused(tmp_path, write, column):
    file = write(tmp_path / "a.arrow", {"id": pa.array(range(len(column))), "text": column})
    with pytest.raises(CorruptError, match=r"a\.arrow, rows 0 to \d: column 'text' is damaged"):
        documents(file)
    # What is not read need not be well.
    assert [row for row, _ in read_records(file, FileContents(text_field="id"))][1] == {"id": 1}


@pytest.mark.parametrize("name", WRITERS)
def test_text_that_is_not_utf8_is_named(tmp_path, name):
    file = WRITERS[name](tmp_path / name, {"text": texts_at([0, 1, 4, 5], b"a\xffbcd")})
    where = "row 1 cannot be read" if name == "a.parquet" else r"rows 0 to 2: column 'text'"
    with pytest.raises(CorruptError, match=rf"{where}.*(?i:utf-?8)"):
        documents(file)


@pytest.mark.parametrize("name", WRITERS)
def test_two_columns_of_one_name_are_refused_if_they_are_read(tmp_path, name):
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    file = WRITERS[name](tmp_path / name, columns, ["text", "text", "other"])
    with pytest.raises(CorruptError, match=r"has 2 columns named 'text'.*rename"):
        documents(file)
    assert documents(file, FileContents(text_field="other")) == ["c"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_that_python_cannot_have_is_named(tmp_path, name):
    years = pa.array([0, 10**15], pa.timestamp("ms"))
    twice = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([1, 2])], ["a", "a"])
    for column, row in ((years, 1), (twice, 0)):
        if name != "a.parquet" or column is years:
            file = WRITERS[name](tmp_path / name, {"text": column})
            rows = [found for found, _ in read_records(file)]
            assert isinstance(rows[row], BadRowError)
            assert f"{name}, row {row} cannot be read" in str(rows[row])
            assert isinstance(rows[1 - row], BadRowError) == (column is twice)


# -- what repeats much --------------------------------------------------------------------------


def in_a_list(values):
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def repeated(n):
    """Columns that say LONG once and have it `n` times, each way that Arrow has."""
    one = pa.array([LONG])
    zeros, ones = pa.array([0] * n, pa.int32()), pa.array([1] * n, pa.int32())
    view = pa.array([LONG], pa.string_view()).buffers()[1].to_pybytes()[:16]
    views = [None, pa.py_buffer(view * n), pa.py_buffer(LONG.encode())]
    struct = pa.StructArray.from_arrays([one], ["content"])
    return {
        "dictionary": pa.DictionaryArray.from_arrays(zeros, one),
        "of structs": pa.DictionaryArray.from_arrays(zeros, struct),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([n], pa.int32()), one),
        "views": pa.Array.from_buffers(pa.string_view(), n, views),
        "lists": pa.ListViewArray.from_arrays(zeros, ones, one),
        "union": pa.UnionArray.from_dense(zeros.cast(pa.int8()), zeros, [one, pa.array([1])]),
    }


@pytest.mark.parametrize("kind", repeated(1))
def test_rows_are_cut_by_what_they_become(kind):
    column = repeated(10_000)[kind]
    batch = pa.record_batch([column], ["text"])
    batch.validate(full=True)
    slices = list(itertools.islice(cut_rows(batch, 4096, 4 * MIB), 5))
    assert all(n_bytes <= 4 * MIB for _, n_bytes in slices)
    assert [len(str(rows.to_pylist())) // MIB for rows, _ in slices] == [2, 2, 2, 2, 2]
    in_one_row = in_a_list(column)
    assert decoded_bytes(in_one_row) > 32 * MIB
    few = repeated(3)[kind]
    assert 3 * MIB < decoded_bytes(few) == decoded_bytes(in_a_list(few)) - 2 < 3 * MIB + 200
    assert 2 * MIB < decoded_bytes(few.slice(1)) < 2 * MIB + 200
    assert [n for _, n in cut_rows(batch.slice(0, 0), 4096, 1)] == []


@given(
    st.lists(
        st.fixed_dictionaries(
            {"a": st.none() | st.text("aé", max_size=9), "b": st.lists(st.text("x", max_size=5))}
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 5),
    st.integers(1, 200),
)
def test_the_size_of_rows_is_about_that_of_their_json(rows, most_rows, most_bytes):
    kind = pa.struct([("a", pa.string()), ("b", pa.list_(pa.string()))])
    batch = pa.RecordBatch.from_struct_array(pa.array(rows, kind))
    cut = list(cut_rows(batch, most_rows, most_bytes))
    assert [row for part, _ in cut for row in part.to_pylist()] == rows
    for part, n_bytes in cut:
        assert part.num_rows <= most_rows
        assert part.num_rows == 1 or n_bytes <= most_bytes
        n_json = len(json.dumps(part.to_pylist(), ensure_ascii=False).encode())
        assert n_json / 3 <= n_bytes + 10 * part.num_rows <= 3 * n_json


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_that_a_table_repeats_is_read_row_by_row(tmp_path, name):
    column = repeated(20_000)["dictionary"]  # 20 GB
    file = WRITERS[name](tmp_path / name, {"text": column})
    assert file.stat().st_size < 2 * MIB
    read = read_documents(file)
    assert all(len(next(next(read))) == MIB for _ in range(50))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_flat", [True, False])
def test_a_row_longer_than_a_line_of_jsonl_may_be_is_refused(tmp_path, name, is_flat, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_ROW_BYTES", MIB)
    monkeypatch.setattr(tables, "BATCH_BYTES", MIB)
    if is_flat:
        file = WRITERS[name](tmp_path / name, {"text": ["a", "b", LONG + "y"]})
    else:
        chat = [{"role": "user", "content": "x" * 1000}] * 2000
        column = pa.array([[], [], chat], pa.list_(MESSAGE))
        file = WRITERS[name](tmp_path / name, {"messages": column})
    with pytest.raises(CorruptError, match=rf"{name}, row 2 is longer than 1 MiB; divide"):
        list(read_records(file, UTF8, record_fields()))


@pytest.mark.parametrize("name", WRITERS)
def test_lists_of_nothing_are_refused_before_they_are_made(tmp_path, name):
    file = WRITERS[name](tmp_path / name, {"messages": in_a_list(pa.nulls(40_000_000))})
    assert file.stat().st_size < 10_000
    with pytest.raises(CorruptError, match="longer than 32 MiB"):
        list(read_records(file, UTF8, record_fields()))


def test_a_column_of_nothing_is_no_text(tmp_path):
    file = arrow(tmp_path / "a.arrow", {"text": pa.nulls(2_000_000_000), "id": pa.nulls(2 * 10**9)})
    assert next(iter(read_records(file)))[0] == {}


# -- any bytes ----------------------------------------------------------------------------------

TABLES = [
    {"text": pa.array(["one", "", None, "naïve 日本", "five" * 20])},
    {"text": pa.array(["one", "", None, "one", "one"]).dictionary_encode()},
    {"text": pa.array(["one", "x" * 40, None], pa.string_view()), "id": pa.nulls(3)},
    {"messages": pa.array([[{"role": "user", "content": "hi"}], None, []], pa.list_(MESSAGE))},
]
CHANGES = [b"\xff", b"\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff" * 7 + b"\x7f"]


@given(
    st.sampled_from(["a.parquet", "a.arrow", "a.feather"]),
    st.sampled_from(TABLES),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(CHANGES) | st.binary(max_size=4))),
)
def test_any_bytes_are_rows_or_an_error_in_words(tmp_path_factory, name, columns, changes):
    file = WRITERS[name](tmp_path_factory.mktemp("any") / name, columns)
    data = bytearray(file.read_bytes())
    for place, change in changes:
        at = int(place * (len(data) - 1))
        data[at : at + max(len(change), 1)] = change
    file.write_bytes(data)
    for read in (lambda: documents(file), lambda: list(read_records(file, UTF8, record_fields()))):
        with suppress(CorruptError):
            read()
