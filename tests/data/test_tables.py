"""Tables: Parquet and Arrow files, folders of data sets, a few rows at a time."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from preparing import corpus_at

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora import tables
from pentameter.data.corpora.conversations import Chat, Exchange
from pentameter.data.corpora.files import FileContents, read_documents
from pentameter.data.corpora.inputs import inputs_at
from pentameter.data.corpora.text import Text
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError, CorruptError

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")

TEXTS = ["one", "", "naïve\r\n日本 🙂", "a\0b\n", "five" * 100]


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def arrow(path, stream=True, **columns):
    """As `save_to_disk` of `datasets` (a stream), or as Feather (a file)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


WRITERS = {
    "a.parquet": parquet,
    "A.PARQUET": parquet,
    "a.arrow": arrow,
    "a.feather": lambda path, **columns: arrow(path, stream=False, **columns),
}


def documents(file, contents=FileContents()):  # noqa: B008 - frozen
    return ["".join(pieces) for pieces in read_documents(file, contents)]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("n_rows", [1, 2, 4096])
def test_a_row_is_a_document(tmp_path, monkeypatch, name, n_rows):
    monkeypatch.setattr(tables, "MOST_ROWS", n_rows)
    file = WRITERS[name](tmp_path / name, id=list(range(5)), text=TEXTS)
    assert documents(file) == TEXTS
    monkeypatch.setattr(tables, "BATCH_BYTES", 1)
    assert documents(file) == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_the_column_is_named(tmp_path, name):
    file = WRITERS[name](tmp_path / name, content=["a", None, "c"], id=[1, 2, 3])
    assert documents(file, FileContents(text_field="content")) == ["a", "c"]
    with pytest.raises(
        CorruptError, match=r"has no column 'text' .*\['content', 'id'\].*text-field"
    ):
        documents(file)
    with pytest.raises(CorruptError, match=r", row 0: 'id' is int 1, not a string"):
        documents(file, FileContents(text_field="id"))


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_other_types_of_text(tmp_path, kind):
    values = pa.array(TEXTS).cast(kind)
    assert documents(arrow(tmp_path / "a.arrow", text=values)) == TEXTS
    if kind != pa.string_view():
        assert documents(parquet(tmp_path / "a.parquet", text=values)) == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_that_was_cut_short_is_named_wherever_it_was_cut(tmp_path, name):
    file = WRITERS[name](tmp_path / name, text=TEXTS)
    whole = file.read_bytes()
    for size in {0, 1, 8, len(whole) // 3, len(whole) // 2, len(whole) - 8, len(whole) - 1}:
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptError, match="is damaged or cut short") as refused:
            documents(file)
        assert str(file) in str(refused.value)


def test_a_stream_that_ends_between_two_batches_is_no_whole_one(tmp_path):
    file = arrow(tmp_path / "a.arrow", text=TEXTS)
    whole = file.read_bytes()
    batches = [at for at in range(len(whole)) if whole.startswith(b"\xff\xff\xff\xff", at)]
    assert len(batches) >= 4  # schema, batches, end
    for at in batches[1:]:
        file.write_bytes(whole[:at])
        with pytest.raises(CorruptError, match="it has no end mark"):
            documents(file)


def test_flipped_bytes_never_change_the_text_silently(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), file, write_page_checksum=True)
    whole = bytearray(file.read_bytes())
    for at in range(0, len(whole), 37):
        changed = bytes(whole[:at]) + bytes([whole[at] ^ 0x55]) + bytes(whole[at + 1 :])
        file.write_bytes(changed)
        with suppress(CorruptError):
            assert documents(file) == TEXTS  # in bytes that nothing reads


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    file = parquet(tmp_path / "a.parquet", text=TEXTS)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[parquet\]'"):
        documents(file)


# -- folders of data sets ---------------------------------------------------------------------


def parts(path):
    inputs = inputs_at([path])
    root = Path(path)

    def names(files):
        return [str(file.path.relative_to(root)) for file in files]

    held_out = {split: names(files) for split, files in inputs.held_out.items()}
    return names(inputs.files), held_out, inputs.warnings


def test_a_data_set_as_it_was_downloaded(tmp_path):
    for number in (1, 0):
        parquet(tmp_path / "data" / f"train-0000{number}-of-00002.parquet", text=[f"t{number}"])
    parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", text=["v"])
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", text=["e"])
    (tmp_path / "README.md").write_text("# A card, which is not text to learn")
    (tmp_path / ".gitattributes").write_text("")
    (tmp_path / "notes.txt").write_text("text beside the tables")
    files, held_out, warnings = parts(tmp_path)
    assert files == [f"data/train-0000{n}-of-00002.parquet" for n in (0, 1)]
    assert held_out == {
        "val": ["data/validation-00000-of-00001.parquet"],
        "test": ["data/test-00000-of-00001.parquet"],
    }
    assert len(warnings) == 1
    assert "its 1 other files are not read" in warnings[0]
    text = corpus_at(tmp_path)
    assert list(text.chunks()) == ["t0", "t1"]
    assert {split: list(part.chunks()) for split, part in text.held_out.items()} == {
        "val": ["v"],
        "test": ["e"],
    }


def test_the_splits_of_a_folder_are_those_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    parquet(folder / "data" / "train-0.parquet", text=["abcd", "efgh"])
    parquet(folder / "data" / "validation-0.parquet", text=["abba"])
    dataset = open_dataset(DataConfig(path=str(folder)))
    decode = dataset.tokenizer.decode
    found = {name: decode(split.tokens[:]) for name, split in dataset.splits.items()}
    assert found == {"train": "abcdefgh", "val": "abba", "test": ""}
    assert dataset.split("train").document_starts.tolist() == [0, 4]
    held_out = parquet(tmp_path / "mine.parquet", text=["hgfe"])
    dataset = open_dataset(DataConfig(path=str(folder), validation_path=str(held_out)))
    assert dataset.tokenizer.decode(dataset.split("val").tokens[:]) == "hgfe"
    pattern = DataConfig(path=str(folder / "data" / "tr*.parquet"), validation_fraction=0.5)
    assert open_dataset(pattern).split("train").n_tokens == 4


def saved(folder, n_files=1, **columns):
    """A data set as `datasets.Dataset.save_to_disk` writes it."""
    names = [f"data-{n:05d}-of-{n_files:05d}.arrow" for n in range(n_files)]
    for name in names:
        arrow(folder / name, **columns)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_data_set_that_was_saved(tmp_path):
    folder = saved(tmp_path / "one", 2, text=["a", "b"])
    arrow(folder / "cache-0123456789abcdef.arrow", text=["a map's result"])
    arrow(folder / "data-00000-of-00003.arrow", text=["of an earlier save"])
    assert "".join(corpus_at(folder).chunks()) == "abab"
    assert corpus_at(folder).warnings == ()
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(CorruptError, match=r"lists data-00001-of-00002\.arrow, which is not there"):
        corpus_at(folder)
    state = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="flatten_indices"):
        corpus_at(folder)
    for damage in ("{", "[]", '{"_data_files": 1}'):
        (folder / "state.json").write_text(damage)
        with pytest.raises(CorruptError, match="is no state of a saved data set"):
            corpus_at(folder)


def test_a_folder_that_sorts_between_the_files_of_a_saved_data_set(tmp_path):
    folder = saved(tmp_path / "one", text=["a"])
    (folder / "data-00000-of-00001.arrow").rename(folder / "a.arrow")
    arrow(folder / "z.arrow", text=["z"])
    arrow(folder / "more" / "m.arrow", text=["m"])
    arrow(folder / "y.arrow", text=["of an earlier save"])
    state = {"_data_files": [{"filename": "a.arrow"}, {"filename": "z.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    assert "".join(corpus_at(folder).chunks()) == "amz"
    (folder / "state.json").write_text("[" * 100_000)
    with pytest.raises(CorruptError, match="is no state of a saved data set"):
        corpus_at(folder)


def test_a_dictionary_of_data_sets_that_was_saved(tmp_path):
    for split in ("train", "validation", "test"):
        saved(tmp_path / split, text=[split])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    text = corpus_at(tmp_path)
    assert "".join(text.chunks()) == "train"
    assert "".join(text.held_out["val"].chunks()) == "validation"
    assert "".join(text.held_out["test"].chunks()) == "test"


def test_names_of_splits(tmp_path):
    files = ["train-0.parquet", "test-0.parquet", "unsupervised-0.parquet"]
    for name in files:
        parquet(tmp_path / name, text=[name])
    found, held_out, warnings = parts(tmp_path)
    assert (found, held_out) == (["train-0.parquet"], {})
    assert "is named for the test split, and no file for validation" in warnings[0]
    assert "unsupervised-0.parquet (one of 1) is named for no split" in warnings[1]
    assert "--data.validation-path" in corpus_at(tmp_path).warnings[0]
    only = tmp_path / "only"
    parquet(only / "validation-0.parquet", text=["v"])
    parquet(only / "test" / "latest.parquet", text=["v"])
    assert parts(only)[:2] == (["test/latest.parquet", "validation-0.parquet"], {})
    assert [file.name for file in inputs_at([tmp_path / "test-0.parquet"]).files] == [files[1]]


def test_what_a_path_held_out_leaves_out_is_told(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("text")
    for name in ("train-0.parquet", "validation-0.parquet"):
        parquet(tmp_path / "set" / name, text=[name])
    (tmp_path / "set" / "notes.txt").write_text("notes")
    others, several = corpus_at(text, validation_path=str(tmp_path / "set")).warnings
    assert "its 1 other files are not read" in others
    assert re.search(
        r"as val its training split \(.*train-0.* is read; name .*validation-0", several
    )
    alone = str(tmp_path / "set" / "validation-0.parquet")
    assert corpus_at(text, validation_path=alone).warnings == ()


def test_a_folder_that_holds_all_tables_holds_none_out(tmp_path):
    for name in ("train-0.parquet", "more.parquet"):
        parquet(tmp_path / "dev" / "corpus" / name, text=[name])
    found = inputs_at([tmp_path / "dev" / "corpus" / "*.parquet"])
    assert [file.name for file in found.files] == ["train-0.parquet"]
    assert found.held_out == {}
    assert "more.parquet (one of 1) is named for no split" in found.warnings[0]
    for name in ("part-0.parquet", "val.parquet"):
        parquet(tmp_path / "dev" / "train" / name, text=[name])
    found = inputs_at([tmp_path / "dev" / "train" / "*.parquet"])
    assert [file.name for file in found.files] == ["part-0.parquet"]
    assert [file.name for file in found.held_out["val"]] == ["val.parquet"]


def test_several_subsets_are_told(tmp_path):
    for name in ("small", "large"):
        parquet(tmp_path / name / "train-0.parquet", text=[name])
        parquet(tmp_path / name / "valid" / "0.parquet", text=[name])
    _, held_out, (warning,) = parts(tmp_path)
    assert held_out == {"val": ["large/valid/0.parquet", "small/valid/0.parquet"]}
    assert "there are 2 data sets in these files" in warning
    assert parts(tmp_path / "small")[2] == ()


def test_advice_that_was_followed_is_not_given_again(tmp_path):
    for name in ("small", "large"):
        parquet(tmp_path / name / "train-0.parquet", text=[name])
    assert "name one for itself" in parts(tmp_path)[2][0]
    each = inputs_at([tmp_path / name / "train-0.parquet" for name in ("small", "large")])
    assert each.warnings == ()
    test = parquet(tmp_path / "small" / "test-0.parquet", text=["t"])
    assert "--data.validation-path" in parts(tmp_path / "small")[2][0]
    found = corpus_at(tmp_path / "small", validation_path=str(test))
    assert found.warnings == ()
    assert "".join(found.held_out["val"].chunks()) == "t"
    notes = tmp_path / "small" / "notes.txt"
    notes.write_text("notes")
    assert "its 1 other files are not read; name them" in parts(tmp_path / "small")[2][0]
    assert inputs_at([tmp_path / "small", notes]).warnings == ()


def test_text_and_jsonl_have_no_splits_by_name(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "validation.jsonl").write_text('{"text": "b"}\n')
    assert "".join(corpus_at(tmp_path).chunks()) == "ab"


# -- conversations ----------------------------------------------------------------------------

ROLES = pa.list_(
    pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
)


@pytest.mark.parametrize("name", WRITERS)
def test_conversations_in_a_table(tmp_path, name):
    chats = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "A"}],
        [{"role": "assistant", "content": None}],
    ]
    WRITERS[name](tmp_path / name, id=[1, 2], messages=pa.array(chats, ROLES))
    (tmp_path / "README.md").write_text("a card")
    found = corpus_at(tmp_path)
    records = [record for record, _ in found.records()]
    silent = Chat([{"role": "assistant", "content": ""}], [0], None)
    assert records == [Chat(chats[0], [1], None), silent]
    assert [where for _, where in found.records()][1] == f"{tmp_path / name}, row 1"


def test_prompts_in_a_table_with_its_splits(tmp_path):
    for split in ("train", "validation"):
        parquet(tmp_path / f"{split}-0.parquet", prompt=[split], completion=["b"], text_id=[1])
    found = corpus_at(tmp_path)
    assert [record for record, _ in found.records()] == [Exchange("train", "b")]
    assert [record for record, _ in found.held_out["val"].records()] == [
        Exchange("validation", "b")
    ]


def test_a_table_with_text_is_text(tmp_path):
    file = parquet(tmp_path / "a.parquet", text=["a"], prompt=["b"], completion=["c"])
    assert isinstance(corpus_at(file), Text)


# -- memory -----------------------------------------------------------------------------------

MEASURED = """
import re, sys
from pathlib import Path
from pentameter.data.corpora.files import read_documents

def peak_mb():  # ru_maxrss would be that of the process that started this one
    return int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

list(read_documents(Path(sys.argv[1])))  # everything imported
before = peak_mb()
n = sum(len(chunk) for document in read_documents(Path(sys.argv[2])) for chunk in document)
print(n, peak_mb() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_large_row_group_is_not_held(tmp_path, kind):
    """One row group of 200 MB of text that hardly compresses (10 GB in 50 of them are the same)."""
    import random

    drawn = random.Random(5)
    small = WRITERS[f"a.{kind}"](tmp_path / f"small.{kind}", text=["a"])
    rows = [drawn.randbytes(5000).hex() for _ in range(20_000)]
    file, table = tmp_path / f"large.{kind}", pa.table({"text": rows, "other": rows})
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=len(rows), use_dictionary=False)
        assert pq.ParquetFile(file).num_row_groups == 1
    else:
        arrow(file, text=rows)
    command = [sys.executable, "-c", MEASURED, str(small), str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) == 200_000_000
    assert float(told[1]) < 100
