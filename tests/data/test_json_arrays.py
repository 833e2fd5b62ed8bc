"""JSON arrays: their records one by one, in chunks of any size, and what is damaged."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.files import FileContents, read_documents
from pentameter.data.corpora.records import json_array
from pentameter.data.corpora.records.json_array import array_rows, holds_records
from pentameter.data.corpora.records.rows import BadRowError
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import CorruptError

RECORDS = [{"text": "a ]}, {"}, {}, {"text": '\\"', "n": [1, {"m": -1.5e3}]}, {"é": None}]


def rows(text, size=7):
    return list(array_rows((text[n : n + size] for n in range(0, len(text), size)), "F"))


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("indent", [None, 2])
def test_records_are_read_across_chunks(size, indent):
    found = rows(json.dumps(RECORDS, indent=indent, ensure_ascii=False) + "\n ", size)
    assert [row for row, _ in found] == RECORDS
    line = {None: [1, 1, 1, 1], 2: [2, 5, 6, 15]}[indent]
    assert [where for _, where in found] == [
        f"F, record {n + 1} (line {line[n]})" for n in range(4)
    ]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=3)), st.integers(1, 30))
def test_any_records_are_as_json_has_them(records, size):
    assert [row for row, _ in rows(json.dumps(records, ensure_ascii=False), size)] == records


def test_what_is_no_object_is_an_error_in_its_place():
    found = [row for row, _ in rows('[{"text": "a"}, 12345678901, "b", [1], null, {}]')]
    assert found[0] == {"text": "a"}
    assert found[5] == {}
    assert all(isinstance(row, BadRowError) for row in found[1:5])
    assert "F, record 2 (line 1) is int 12345678901, no object" in str(found[1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"a": 1}', "record 1 .* is followed by the file's end, .*cut short"),
        ('[{"a": 1}, ', "record 2 .* is not JSON .*cut short"),
        ('[{"a": 1}, ]', "record 2 .* is not JSON"),
        ('[{"a": 1} {"a": 1}]', "record 1 .* is followed by '{'"),
        ('[{"a": "b', r"record 1 \(line 1\) is not JSON"),
        ('[\n{"a": 1},\n{"a"\n: x}]', r"record 2 \(line 3\) is not JSON .*line 4"),
        ('[{"a": 1}] [', "line 1 goes on with"),
        ('[{"a": ' + "[" * 100_000, "record 1 .* is not JSON"),
    ],
)
def test_damage_is_named(text, words):
    with pytest.raises(CorruptError, match=words):
        rows(text)


def test_a_record_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(json_array, "LONGEST_RECORD", 100)
    assert rows(json.dumps([{"text": "a" * 80}]))
    with pytest.raises(CorruptError, match=r"record 2 .*longer than"):
        rows(json.dumps([{}, {"text": "a" * 300}]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a": 1}]', True),
        (' \n[\n {"a', True),
        ('{"a": 1}\n{"a": 2}\n', True),
        ('{"a": 1}\n', False),  # one document
        ('{\n"a": 1\n}\n{', False),
        ("[1, 2]", False),
        ("[]", False),
        ("", False),
        ("it is a text", False),
    ],
)
def test_files_with_records_are_known_by_how_they_begin(text, expected):
    assert holds_records(iter([text])) == expected


def texts(path, **settings):
    corpus = corpus_of(DataConfig(path=str(path), **settings))
    return ["".join(each) for each in corpus.documents()]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_documents_in_an_array(tmp_path, encoding):
    file = tmp_path / "x.json"
    file.write_text(json.dumps([{"text": "ä"}, {"text": "b"}], ensure_ascii=False), encoding)
    assert texts(file, encoding=encoding) == ["ä", "b"]
    assert corpus_of(DataConfig(path=str(file), encoding=encoding)).warnings == ()


def test_jsonl_that_is_named_json_and_an_array_that_is_named_jsonl(tmp_path):
    (tmp_path / "x.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert texts(tmp_path / "x.json") == ["a", "b"]
    (tmp_path / "x.jsonl").write_text('[{"text": "a"},\n{"text": "b"}]')
    assert texts(tmp_path / "x.jsonl") == ["a", "b"]


def test_one_document_and_json_beside_text_stay_text(tmp_path):
    (tmp_path / "x.json").write_text('{"text": "a"}')
    corpus = corpus_of(DataConfig(path=str(tmp_path / "x.json")))
    assert ["".join(each) for each in corpus.documents()] == ['{"text": "a"}']
    assert "one JSON document" in corpus.warnings[0]
    (tmp_path / "x.json").write_text('[{"text": "a"}]')
    (tmp_path / "y.py").write_text("b")
    assert texts(tmp_path) == ['[{"text": "a"}]', "b"]


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x.json").write_bytes(b'[{"text": "a"}, {"text": "\xff"}]')
    with pytest.raises(CorruptError, match=r"x\.json is not UTF-8 text: byte 0xff at offset 26"):
        list(read_documents(tmp_path / "x.json", FileContents(json_has_records=True)))


@pytest.mark.parametrize("indent", [None, 1])
def test_memory_does_not_grow_with_the_file(tmp_path, indent):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"text": "a" * 2000}] * 4_000, indent=indent))
    contents = FileContents(json_has_records=True)
    tracemalloc.start()
    try:
        n = sum(len(chunk) for each in read_documents(path, contents) for chunk in each)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n == 2000 * 4_000
    assert peak < 1 << 20  # a few chunks, of a file of 8 MB


def test_an_array_is_streamed_as_jsonl_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [{"text": f"it is {n} o'clock"} for n in range(200)]
    (tmp_path / "x.json").write_text(json.dumps(records))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    settings = {"tokenizer": "bpe:300", "validation_fraction": 0.0}
    found = []
    for name, order in (("x.json", "streamed"), ("x.jsonl", "streamed"), ("x.json", "random")):
        dataset = open_dataset(DataConfig(path=str(tmp_path / name), order=order, **settings))
        tokens = dataset.split("train").tokens
        found.append(tokens[: tokens.up_to(1000)].tolist())
        dataset.close()
    assert found[0] == found[1] == found[2]
