import dataclasses
import importlib
import json
import subprocess
import sys

import pytest

from pentameter.cli.prepare import GrammarOptions, PrepareArguments, run
from pentameter.config.data_schema import DataConfig, GrammarConfig
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError, CorruptError


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("some notes to learn from\n" * 40)
    return path


def test_files_become_shards_that_training_opens(tmp_path, text_file, capsys):
    out = tmp_path / "out"
    assert run([str(text_file), "--out", str(out), "--test-fraction", "0.1"]) == 0
    said = capsys.readouterr()
    for part in ("1,000 tokens", "train 800, val 100, test 100", "vocabulary 12", "tokens/s"):
        assert part in said.out
    dataset = open_dataset(DataConfig(path=str(out)))
    assert dataset.split("train").n_tokens == 800
    assert sorted(file.name for file in out.iterdir()) == [
        "notes-00000.bin",
        "notes-00001.bin",
        "notes-00002.bin",
        "notes-documents.bin",
        "notes.json",
        "tokenizer.json",
    ]


def test_conversations_are_told_by_their_form_and_bad_rows_counted(tmp_path, capsys):
    records = [{"instruction": f"q{n}", "output": f"a{n}"} for n in range(9)]
    records[4]["output"] = ""
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(records))
    arguments = [str(path), "--chat-template", "chatml", "--out", str(tmp_path / "out")]
    with pytest.raises(CorruptError, match=r"record 5 .*'output' is empty"):
        run(arguments)
    assert run([*arguments, "--bad-rows", "skip"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("alpaca.json · 8 conversations, Alpaca's form\n")
    assert "warning: 1 of 9 rows is left out" in said.err


def test_several_files_and_another_tokenizer(tmp_path, text_file):
    first = tmp_path / "first"
    run([str(text_file), "--out", str(first)])
    more = tmp_path / "more.txt"
    more.write_text("more")
    second = tmp_path / "second"
    tokenizer = str(first / "tokenizer.json")
    run([str(more), str(text_file), "--out", str(second), "--tokenizer", tokenizer])
    dataset = open_dataset(DataConfig(path=str(second)))
    assert dataset.tokenizer.hash == open_dataset(DataConfig(path=str(first))).tokenizer.hash
    assert dataset.tokenizer.decode(dataset.split("train").tokens[:8]) == "moresome"


def test_a_corpus_with_settings(tmp_path):
    arguments = ["grammar", "--grammar.n-characters", "5000", "--max-bytes", "3000"]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert open_dataset(DataConfig(path=str(tmp_path / "out"))).split("train").n_tokens == 2700


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], r"missing\.txt does not exist"),
        (["missing/folder"], "does not exist"),
        (["stdlob"], "did you mean 'stdlib'"),
        ([], "name a corpus"),
        (["grammar", "--tokenizer", "bpe:12"], "size must be at least 257"),
        (["tokens.bin"], r"tokens\.bin does not exist"),
        (["grammar", "--tokenizer", "no.json"], r"no\.json does not exist"),
        (["grammar", "--validation-fraction", "1.5"], r"data\.validation_fraction=1\.5"),
        (["grammar", "--max-bytes", "0"], r"data\.max_bytes=0"),
        (["grammar", "--grammar.n-states", "97"], r"data\.grammar\.n_states=97"),
    ],
)
def test_wrong_usage_says_what_and_leaves_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run([*arguments, "--out", "out"])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_and_a_binary_file_are_refused(tmp_path, text_file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        run([str(text_file), "--out", str(tmp_path / "out")])
    binary = tmp_path / "binary.dat"
    binary.write_bytes(b"\x00\x01")
    with pytest.raises(CorruptError, match="offset 0"):
        run([str(binary), "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_another_encoding_and_field(tmp_path, text_file, capsys):
    text = text_file.read_text() + "日本\n"
    records = tmp_path / "notes.jsonl"
    records.write_text(json.dumps({"body": text}, ensure_ascii=False), encoding="gb18030")
    out = tmp_path / "out"
    arguments = [str(records), "--encoding", "gb18030", "--text-field", "body", "--out", str(out)]
    assert run(arguments) == 0
    dataset = open_dataset(DataConfig(path=str(out)))
    splits = [dataset.split(name) for name in ("train", "val")]
    assert "".join(dataset.tokenizer.decode(split.tokens[:]) for split in splits) == text
    assert sum(split.n_bytes for split in splits) == len(text.encode())
    elsewhere = ["--out", str(tmp_path / "elsewhere")]
    with pytest.raises(CorruptError, match=r"notes\.jsonl, line 1 is not UTF-8.*--encoding"):
        run([str(records), *elsewhere])
    with pytest.raises(ConfigError, match=r"data\.encoding='gb18031' is not known; .*gb18030\?"):
        run([str(records), "--encoding", "gb18031", *elsewhere])
    with pytest.raises(ConfigError, match=r"is of the files at data\.path"):
        run(["stdlib", "--text-field", "body", *elsewhere])
    (tmp_path / "tokens.bin").write_bytes(b"ab")
    with pytest.raises(ConfigError, match="--encoding is of files of text, not of tokens"):
        run([str(tmp_path / "tokens.bin"), "--encoding", "gbk", *elsewhere])


def test_without_a_terminal_progress_is_plain_lines_on_standard_error(
    tmp_path, text_file, monkeypatch, capsys
):
    monkeypatch.setattr("pentameter.data.progress.LINE_SECONDS", 0.0)
    importlib.import_module("torch")  # so that no first line is said
    assert run([str(text_file), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert lines[0] == "reading the text: 100% · 0 of 0 MB"
    assert lines[-1].startswith("encoding the text: 100% · 0 of 0 MB")
    assert "the text" not in said.out
    monkeypatch.setattr("pentameter.data.progress.LINE_SECONDS", 10.0)
    assert run([str(text_file), "--out", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().err == ""  # too short to be told of


def test_on_a_terminal_progress_is_a_bar_per_pass(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run([str(text_file), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "reading" in said
    assert "encoding" in said
    assert "1.0/1.0 kB" in said


def test_help_imports_nothing_slow():
    code = (
        "import sys\n"
        "from pentameter.cli.prepare import run\n"
        "try: run(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "CORPUS-or-FILES" in done.stdout


def test_conversations_become_shards(tmp_path, capsys):
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    out = tmp_path / "out"
    arguments = [str(tmp_path / "chat.jsonl"), "--chat-template", "chatml", "--out", str(out)]
    assert run([*arguments, "--validation-fraction", "0.25"]) == 0
    assert "in 4 documents" in capsys.readouterr().out
    dataset = open_dataset(DataConfig(path=str(out)))
    assert [len(split.assistant.bounds) for split in dataset.splits.values()] == [3, 1, 0]
    assert dataset.tokenizer.chat is not None
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        run(arguments)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ConfigError, match="is for conversations"):
        run([str(tmp_path / "t.txt"), "--chat-template", "chatml", "--out", str(tmp_path / "b")])


@pytest.mark.parametrize(
    ("options", "section"), [(PrepareArguments, DataConfig), (GrammarOptions, GrammarConfig)]
)
def test_options_have_the_defaults_of_the_configuration(options, section):
    ours = {field.name: field.default for field in dataclasses.fields(options)}
    theirs = {key: field.default for key, field in section.model_fields.items()}
    common = (ours.keys() & theirs.keys()) - {"grammar"}  # a section of its own
    assert len(common) >= len(dataclasses.fields(GrammarOptions))
    assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}
