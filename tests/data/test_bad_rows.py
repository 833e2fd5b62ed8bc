"""Rows that cannot be used: refused by their place, or left out, counted and named."""

import json

import pytest
from cache_of_a_folder import cache_of_a_test  # noqa: F401

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.files import FileContents, read_documents
from pentameter.data.corpora.records.rows import BadRowError, RowsRead, field_value, has_field
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError, CorruptError

GOOD = [json.dumps({"instruction": f"q{n}", "output": f"a{n}"}) for n in range(6)]
BAD = {
    "no JSON": '{"instruction": ',
    "no object": "3",
    "no answer": '{"instruction": "q", "output": ""}',
    "other keys": '{"a": "b"}',
    "half a pair": '{"instruction": "\\ud800", "output": "a"}',
    "reserved": json.dumps({"instruction": "\U0010fffe", "output": "a"}),
    "no UTF-8": b'{"instruction": "\xff", "output": "a"}',
}


def lines(path, *found):
    path.write_bytes(
        b"".join((each if isinstance(each, bytes) else each.encode()) + b"\n" for each in found)
    )
    return str(path)


def opened(path, warnings=None, **settings):
    kept = {"order": "documents", "chat_template": "chatml", "validation_fraction": 0.0}
    return open_dataset(DataConfig(path=path, **{**kept, **settings}), warnings=warnings)


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "reserved"])
def test_a_bad_row_is_refused_or_left_out(tmp_path, kind):
    path = lines(tmp_path / "x.jsonl", *GOOD[:2], BAD[kind], *GOOD[2:])
    with pytest.raises(CorruptError, match=r"x\.jsonl, line 3.*--data\.bad-rows skip .*leaves"):
        opened(path)
    for _ in range(2):  # made, and found in the cache
        warnings = []
        found = opened(path, warnings, bad_rows="skip")
        assert found.holds == ("6 conversations, Alpaca's form",)
        (warning,) = (each for each in warnings if "left out" in each)
        assert warning.startswith("1 of 7 rows is left out (data.bad_rows='skip'): ")
        assert "x.jsonl, line 3" in warning


TEXTS = [json.dumps({"text": f"text {n}"}) for n in range(6)]


@pytest.mark.parametrize(
    ("bad", "at"),
    [('{"text": ', 0), ('{"text": ', 3), ('{"body": "b"}', 3), ('{"text": 7}', 0), ("3", 0)],
)
def test_a_refused_text_row_says_how_it_is_left_out(tmp_path, bad, at):
    path = lines(tmp_path / "x.jsonl", *TEXTS[:at], bad, *TEXTS[at:])
    refusal = rf"line {at + 1}.*--data\.bad-rows skip .*leaves such"
    with pytest.raises(CorruptError, match=refusal):
        opened(path, tokenizer="char", chat_template=None)


def test_json_that_is_none_is_refused_by_its_line_and_column(tmp_path):
    path = lines(tmp_path / "x.jsonl", *TEXTS[:2], '{"text": "a" "b"}')
    refusal = r"line 3 is not JSON \(Expecting ',' delimiter, column 14\)"
    with pytest.raises(CorruptError, match=refusal):
        opened(path, tokenizer="char", chat_template=None)


def test_what_is_left_out_changes_nothing_of_the_rest(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "good").mkdir()
    bad = lines(tmp_path / "bad" / "x.jsonl", BAD["no JSON"], *GOOD, BAD["no answer"])
    good = lines(tmp_path / "good" / "x.jsonl", *GOOD)
    assert opened(bad, bad_rows="skip").hash == opened(good).hash


def test_the_first_are_named_and_all_are_counted(tmp_path):
    warnings = []
    path = lines(tmp_path / "x.jsonl", *["{"] * 2, *GOOD, *["3"] * 5)
    opened(path, warnings, bad_rows="skip")
    (warning,) = (each for each in warnings if "left out" in each)
    assert "7 of 13 rows are left out" in warning
    assert [f"line {n}" in warning for n in (1, 2, 9, 10)] == [True, True, True, False]
    assert warning.endswith("; …")


def test_what_a_template_refuses_is_a_bad_row(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'q1' %}{{ raise_exception('no q1') }}{% endif %}"
        "{{ m.role + m.content }}{% endfor %}"
    )
    path = lines(tmp_path / "x.jsonl", *GOOD)
    with pytest.raises(CorruptError, match=r"line 2.*no q1"):
        opened(path, chat_template=str(template))
    warnings = []
    found = opened(path, warnings, chat_template=str(template), bad_rows="skip")
    assert found.holds == ("5 conversations, Alpaca's form",)
    assert any("1 of 6 rows is left out" in each and "no q1" in each for each in warnings)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_records_without_a_text_are_bad_rows_too(tmp_path, name):
    records = [{"text": "ab"}, {"text": 3}, {"text": "cd"}, {"other": "e"}]
    path = tmp_path / name
    if name == "x.parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        records = [{"text": "ab"}, {"text": None}, {"text": "cd"}]
        table = pa.Table.from_pylist(records)
        pyarrow.parquet.write_table(table, path)
    elif name == "x.json":
        path.write_text(json.dumps(records))
    else:
        lines(path, *map(json.dumps, records))
    warnings = []
    settings = {"path": str(path), "validation_fraction": 0.0, "bad_rows": "skip"}
    found = open_dataset(DataConfig(**settings), warnings=warnings)
    assert found.tokenizer.decode(found.split("train").tokens[:]) == "abcd"
    if name == "x.parquet":  # a null is no document, and nothing is wrong with it
        assert not any("left out" in each for each in warnings)
        return
    assert any("2 of 4 rows are left out" in each for each in warnings)
    with pytest.raises(CorruptError, match="'text' is int 3"):
        open_dataset(DataConfig(**{**settings, "bad_rows": "refuse"}))


def test_a_damaged_file_is_no_bad_row(tmp_path):
    (tmp_path / "x.json").write_text('[{"instruction": "a", "output": "b"}, {"instruction": ')
    with pytest.raises(CorruptError, match=r"record 2 .* is not JSON"):
        opened(str(tmp_path / "x.json"), bad_rows="skip")
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(CorruptError, match="is not UTF-8 text"):
        opened(str(tmp_path / "x.txt"), bad_rows="skip", chat_template=None)


def test_nothing_that_is_left_is_refused_with_the_reason(tmp_path):
    path = lines(tmp_path / "x.jsonl", *[BAD["no answer"]] * 3)
    with pytest.raises(ConfigError, match=r"no conversation in .*line 1: 'output' is empty"):
        opened(path, bad_rows="skip")
    path = lines(tmp_path / "y.jsonl", '{"text": 1}')
    with pytest.raises(ConfigError, match=r"is empty.*line 1: 'text' is int 1"):
        open_dataset(DataConfig(path=path, bad_rows="skip"))
    path = lines(tmp_path / "z.jsonl", '{"a": 1}', '{"a": 2}')
    with pytest.raises(CorruptError, match="line 1 has no field 'text'"):
        open_dataset(DataConfig(path=path, bad_rows="skip"))


def test_bad_rows_are_not_left_out_of_a_stream_or_shards(tmp_path):
    with pytest.raises(ValueError, match=r"data\.bad_rows='skip' counts"):
        DataConfig(path="x.jsonl", bad_rows="skip", order="streamed")
    with pytest.raises(ValueError, match=r"data\.bad_rows='skip' is of the files at data\.path"):
        DataConfig(corpus="stdlib", bad_rows="skip")


def test_fields_within_fields():
    record = {"meta": {"text": "a", "b.c": "d"}, "x.y": {"z": 1}, "flat.text": "e"}
    for field, value in {"meta.text": "a", "meta.b.c": "d", "x.y.z": 1, "flat.text": "e"}.items():
        assert has_field(record, field)
        assert field_value(record, field, "F") == value
    for field in ("meta.other", "text", "meta.text.more", "x.z", "other.text"):
        assert not has_field(record, field)
    with pytest.raises(BadRowError, match=r"has a key 'meta\.text', and within 'meta'"):
        field_value({"meta.text": "a", "meta": {"text": "b"}}, "meta.text", "F")


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet", "x.arrow"])
def test_a_text_within_other_fields_is_read(tmp_path, name):
    import gzip

    records = [{"meta": {"text": text, "n": 1}} for text in ("a", "b")]
    path = tmp_path / name
    if name.endswith(("parquet", "arrow")):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.feather
        import pyarrow.parquet

        table = pa.Table.from_pylist([*records, {"meta": None}])
        if name == "x.arrow":
            pyarrow.feather.write_feather(table, path, compression="uncompressed")
        else:
            pyarrow.parquet.write_table(table, path)
    else:
        text = "".join(json.dumps(each) + "\n" for each in records).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)

    def read(field):
        found = read_documents(path, FileContents(text_field=field))
        return ["".join(each) for each in found]

    assert read("meta.text") == ["a", "b"]
    with pytest.raises(CorruptError, match=r"has no (field|column) 'meta\.other'"):
        read("meta.other")


def test_rows_that_were_read_are_told_in_words():
    rows = RowsRead("skip")
    rows.forms["Alpaca's form"] += 1
    assert rows.used == "1 conversation, Alpaca's form"
    assert rows.warnings(1) == []
