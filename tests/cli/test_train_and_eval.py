"""The verbs of a run, as a user types them: train, the same again, eval, report."""

import json
from pathlib import Path

import pytest
from cache_of_a_folder import cache_of_a_file  # noqa: F401

from pentameter.cli.main import main
from pentameter.errors import StorageError

TINY = [
    "--model.n-layers=1",
    "--model.d-model=16",
    "--model.attention.n-heads=2",
    "--model.context-length=16",
    "--train.batch-size=4",
    "--train.steps=6",
    "--train.eval-interval=3",
    "--train.precision=fp32",
    "--train.compile=false",
    "--data.grammar.n-characters=3000",
    "--data.validation-fraction=0.1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", "grammar", "--run-dir", str(folder), *TINY]) == 0
    return folder


def test_train_ends_with_a_report_and_what_to_do_next(run, capsys):
    assert main(["train", "grammar", "--run-dir", str(run), *TINY]) == 0  # complete: says so
    said = capsys.readouterr().out
    assert "completed" in said
    assert "sample" in said
    assert (run / "report.html").exists()


def test_a_report_that_cannot_be_written_fails_no_run(run, capsys, monkeypatch):
    from pentameter.report.pages import page

    def full(run_dir):
        raise StorageError("report.html cannot be written: No space left on device")

    monkeypatch.setattr(page, "write_report", full)
    assert main(["train", "grammar", "--run-dir", str(run), *TINY]) == 0
    assert "warning: no report: report.html cannot be written" in capsys.readouterr().out


def test_another_configuration_in_the_same_folder_exits_2(run, capsys):
    changed = [*TINY, "--optimizer.learning-rate", "0.5"]
    assert main(["train", "grammar", "--run-dir", str(run), *changed]) == 2
    assert "optimizer.learning_rate" in capsys.readouterr().err


def test_print_config_can_be_trained_from(tmp_path, capsys):
    assert main(["train", "grammar", *TINY, "--print-config"]) == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    assert main(["train", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "grammar", *TINY, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["batch"]["tokens_per_step"] == 4 * 16
    assert plan["layout"]["data"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_on_a_terminal_is_in_words(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["train", "grammar", *TINY, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("grammar: ")
    assert "parameters, data=1, micro-batch 4 × 1" in said[0]
    assert len(said) == 4
    assert main(["train", "grammar", *TINY, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6


def test_a_layout_is_applied_before_the_configuration_is_checked(capsys):
    offloaded = ["train", "grammar", *TINY, "--train.offload=true", "--dry-run", "--nproc=2"]
    assert main([*offloaded, "--layout", "data=2,zero=3"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["zero"] == 3
    assert main([*offloaded, "--layout", "data=2"]) == 2
    assert "parallel.zero=0 shares nothing" in capsys.readouterr().err


def test_eval_repeats_what_training_measured(run, capsys):
    assert main(["eval", str(run / "checkpoints" / "step-00000006"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = [e for e in map(json.loads, lines) if e["event"] == "eval"][-1]
    assert result["tokens"] == last["tokens"] == 299
    assert result["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_eval_does_not_depend_on_the_batch_size(run, capsys, batch_size):
    arguments = ["eval", str(run), "--precision", "fp64", "--json"]
    assert main([*arguments, "--batch-size", str(batch_size)]) == 0
    one = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    other = json.loads(capsys.readouterr().out)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)


def test_eval_on_other_text(run, tmp_path, capsys):
    text = tmp_path / "other.txt"
    text.write_text("abcdefghijklmnop" * 100)
    assert main(["eval", str(run), "--data.path", str(text), "--split", "train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["split_tokens"], found["text_tokens"]) == (1439, 1440, 1600)
    assert main(["eval", str(run), "--data.path", str(text)]) == 0
    line, read = capsys.readouterr().out.splitlines()
    assert "159 loss tokens" in line
    assert read == (
        f"the val split is 160 of the 1,600 tokens of {text}; all of it: --split train "
        "--data.validation-fraction 0"
    )
    whole = ["--data.path", str(text), "--split", "train", "--data.validation-fraction", "0"]
    assert main(["eval", str(run), *whole]) == 0
    assert f"the train split is all 1,600 tokens of {text}" in capsys.readouterr().out
    files = ["--data.path", str(text), "--data.validation_path", str(text)]
    assert main(["eval", str(run), *files]) == 0
    assert f"the val split is {text}: all of it" in capsys.readouterr().out
    assert main(["eval", str(run), "--train.steps", "9"]) == 2
    assert "data section only" in capsys.readouterr().err


def test_training_on_another_encoding_and_eval_on_text_in_utf8(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("日本語 naïve " * 300, encoding="gb18030")
    other = tmp_path / "other.txt"
    other.write_text("日本語 " * 300, encoding="utf-8")
    folder = str(tmp_path / "run")
    command = ["train", "grammar", "--run-dir", folder, *TINY, "--data.path", str(text)]
    assert main(command) == 65
    assert "is not UTF-8 text: byte" in capsys.readouterr().err
    assert main([*command, "--data.encoding", "gb18030"]) == 0
    assert main(["eval", folder]) == 0
    assert main(["eval", folder, "--data.path", str(other)]) == 0
    assert main(["eval", folder, "--data.path", str(text)]) == 0  # the run's own text
    renamed = str(text.rename(tmp_path / "renamed.txt"))
    assert main(["eval", folder, "--data.path", renamed]) == 65  # another text's is not known
    assert main(["eval", folder, "--data.path", renamed, "--data.encoding", "gb18030"]) == 0


def test_eval_of_an_empty_split_says_how_to_get_one(run, capsys):
    assert main(["eval", str(run), "--split", "test"]) == 2
    assert "test_fraction" in capsys.readouterr().err


def test_sample_from_the_run(run, capsys):
    arguments = ["sample", str(run), "--prompt", "ab", "--max-new-tokens", "30", "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["samples"] == second["samples"]
    assert first["samples"][0]["tokens"] == 30
    assert set(first["samples"][0]["text"]) <= set("abcdefghijklmnop")


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "cached"])
def test_a_flipped_bit_of_the_data_ends_every_verb_with_65(tmp_path, monkeypatch, capsys, prepared):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "abba.txt"
    data.write_text("abbabaabba" * 300)
    if prepared:
        assert main(["prepare", str(data), "--out", str(tmp_path / "shards")]) == 0
        data = tmp_path / "shards"
    run = ["train", "grammar", "--run-dir", str(tmp_path / "run"), *TINY, "--data.path", str(data)]
    assert main(run) == 0
    shard = next(tmp_path.rglob("abba-00000.bin"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1  # a for b, or b for a
    shard.write_bytes(content)
    remedy = "prepare the data again" if prepared else f"delete {shard.parent} and start again"
    longer = [*run, "--train.steps=9"]
    for command in (run, longer, ["eval", str(tmp_path / "run")]):
        assert main(command) == 65
        said = capsys.readouterr().err
        assert f"{shard} was changed" in said
        assert remedy in said
