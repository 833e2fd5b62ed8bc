"""`train novel.txt`: the quickstart on that text; and what is printed to go on with."""

import gzip
import json
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pentameter.cli.main import main
from pentameter.cli.train import words_of_program
from pentameter.config.files.command_source import is_text

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 40
TINY = [
    "--model.n-layers=1",
    "--model.d-model=16",
    "--model.attention.n-heads=2",
    "--model.context-length=16",
    "--train.batch-size=4",
    "--train.steps=4",
    "--train.eval-interval=2",
    "--train.sample-interval=none",
    "--train.precision=fp32",
    "--train.compile=false",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, short_measurement) -> Path:
    """A folder with a space in its name and some texts, in which the commands run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "my texts"
    (folder / "tales").mkdir(parents=True)
    (folder / "novel.txt").write_text(TEXT)
    (folder / "tales" / "one.txt").write_text(TEXT)
    (folder / "records.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (folder / "packed.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    monkeypatch.chdir(folder)
    return folder


def printed(capsys, *arguments: str) -> str:
    assert main(["train", *arguments, "--print-config"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("novel.txt", "novel"),
        ("tales", "tales"),
        ("records.jsonl", "records"),
        ("packed.txt.gz", "packed"),
    ],
)
def test_a_text_is_the_quickstart_on_it(capsys, text, name):
    said = printed(capsys, text, *TINY)
    assert said == printed(capsys, "quickstart", "--data.path", text, *TINY)
    assert f'name = "{name}"' in said
    assert f'path = "{text}"' in said


def test_a_pattern_and_a_url_are_texts(folder, capsys):
    (folder / "tales" / "two.txt").write_text(TEXT)
    for text, name in (("tales/*.txt", "tales"), ("https://x.org/d/ulysses.txt?a=1", "ulysses")):
        said = printed(capsys, text, *TINY)
        assert said == printed(capsys, "quickstart", f"--data.path={text}", *TINY)
        assert f'path = "{text}"' in said
        assert f'name = "{name}"' in said
    listed = printed(capsys, "tales/one.txt", "tales/two.txt", *TINY)
    assert 'path = "tales/*.txt"' in listed
    assert main(["train", "https://x.org/a.txt?token=hunter2", *TINY]) == 2
    assert "hunter2" not in "".join(capsys.readouterr())


def test_a_text_is_trained_on_and_continued(folder, capsys):
    assert main(["train", "novel.txt", *TINY]) == 0
    assert main(["train", "novel.txt", *TINY]) == 0
    assert "resume  from step 4" in capsys.readouterr().out
    assert (folder / "runs" / "novel" / "checkpoints" / "step-00000004").is_dir()


def test_a_text_is_trained_on_with_a_model_of_ones_own(folder, capsys):
    assert main(["train", "novel.txt", *TINY]) == 0
    assert "\ninit " not in capsys.readouterr().out
    tuned = ["train", "records.jsonl", "--init-from", "runs/novel", "--train.steps=2"]
    assert main(tuned) == 0
    said = capsys.readouterr().out
    assert "records-tuned · seed" in said
    assert "\ninit    the weights of runs/novel\n" in said
    assert main(tuned) == 0  # continues
    assert "resume  from step 2" in capsys.readouterr().out


def test_a_complete_run_says_so_and_is_not_made_shorter(folder, capsys):
    command = ["train", "novel.txt", *TINY, "--schedule.name=constant"]
    assert main(command) == 0
    assert "complete already" not in capsys.readouterr().out
    config = (folder / "runs" / "novel" / "config.toml").read_text()
    assert main(command) == 0
    assert "complete already. To train longer, add --resume extend" in capsys.readouterr().out
    assert main([*command, "--train.steps=3"]) == 2
    told = capsys.readouterr().err
    assert "has made 4 steps already, and train.steps=3 are fewer" in told
    assert (folder / "runs" / "novel" / "config.toml").read_text() == config


def test_the_configuration_of_a_model_without_its_weights_is_remarked(folder, capsys):
    assert main(["train", "novel.txt", *TINY]) == 0
    model = next((folder / "runs" / "novel" / "checkpoints").glob("step-*"))
    capsys.readouterr()
    printed(capsys, str(model / "config.toml"))
    assert main(["train", str(model / "config.toml"), "--print-config"]) == 0
    assert f"--init-from {model} begins with that model's" in capsys.readouterr().err
    assert main(["train", str(model)]) == 2
    assert f"its configuration is {model}/config.toml" in capsys.readouterr().err


def test_prepared_shards_are_trained_on(capsys):
    assert main(["prepare", "novel.txt", "--tokenizer", "char", "--out", "shards"]) == 0
    assert main(["train", "shards", *TINY]) == 0
    assert "shards · char tokens: train" in capsys.readouterr().out


def test_a_configuration_stays_one_under_any_name(folder, capsys):
    (folder / "mine.toml").write_text('extends = "grammar"\nname = "mine"\n')
    (folder / "mine.conf").write_text((folder / "mine.toml").read_text())
    assert 'corpus = "grammar"' in printed(capsys, "mine.toml")
    assert 'corpus = "grammar"' in printed(capsys, "mine.conf")


@pytest.mark.parametrize(
    "text",
    [
        "[user]\nWho are you?\n[model]\nA model.\n",
        "# How to train\n\nWrite a file:\n\n[data]\npath = 'x'\n\nand start it. Then wait.\n",
        "extends =over two lines\nas only a poem does\nand no file of settings\n",
    ],
)
def test_a_text_may_have_a_line_of_a_configuration(folder, capsys, text):
    (folder / "dialogue.txt").write_text(text)
    assert 'path = "dialogue.txt"' in printed(capsys, "dialogue.txt")


def test_a_configuration_with_a_mistake_is_no_text(folder, capsys):
    (folder / "mine.conf").write_text('[model]\nn_layers = \n[data]\ncorpus = "grammar"\n')
    assert main(["train", "mine.conf"]) == 2
    assert "not valid TOML" in capsys.readouterr().err


def test_a_folder_with_another_programs_configuration_is_text(folder, capsys):
    (folder / "tales" / "config.toml").write_text('title = "a site"\n')
    assert 'path = "tales"' in printed(capsys, "tales")


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    assert not is_text(folder / "pipe")


def test_what_is_neither_is_refused_with_what_was_meant(folder, capsys):
    assert main(["train", "novle.txt"]) == 2
    assert "novle.txt is neither a preset nor a file; did you mean novel.txt?" in (
        capsys.readouterr().err
    )
    assert main(["train", "novel.txt", "--data.path", "tales"]) == 2
    assert "novel.txt is the text to train on, and --data.path tales" in capsys.readouterr().err
    main(["train", "novel.txt", *TINY])
    assert main(["train", "runs/novel"]) == 2
    assert (
        "runs/novel is a folder; its configuration is runs/novel/config.toml"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["novel.txt", "--run-dir", "runs/a b", "--train.sample-prompt=It's"],
        ["novel.txt", "--train.sample-prompt=-- dark"],
        ["quickstart", "--data.path=novel.txt", "--train.sample-prompt=§"],  # not in the text
        ["novel.txt", "--train.sample-prompt=night;\nthe", "--data.validation-fraction=0"],
        ["grammar", "--data.grammar.n-characters=3000"],
    ],
    ids=["spaces", "dashes", "unknown prompt", "nothing held out", "grammar"],
)
def test_every_command_printed_at_the_end_works(capsys, settings):
    assert main(["train", *settings, *TINY]) == 0
    said = capsys.readouterr().out.partition("\nnext:\n")[2].partition("\n\n")[0]
    program = words_of_program()
    commands = [shlex.split(line) for line in said.splitlines()]
    assert all(words[: len(program)] == program for words in commands)
    asked = {words[len(program)]: words[len(program) :] for words in commands}
    assert asked.keys() >= {"sample", "doctor"}
    assert ("serve" in asked) == (find_spec("uvicorn") is not None)
    sample = asked["sample"]  # as many tokens as the model sees at once, 500 at most
    assert sample[sample.index("--max-new-tokens") + 1] == "16"
    # `doctor` measures this machine, for seconds, and knows no run; `serve` does not end.
    for verb in asked.keys() - {"doctor", "serve"}:
        assert main(asked[verb]) == 0, asked[verb]


def test_the_program_is_named_as_it_can_be_called(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py"), "train"])  # of a launch
    assert words_of_program() == [str(tmp_path / "python3"), "-m", "pentameter"]
    script = tmp_path / "pentameter"
    script.write_text("")
    assert words_of_program() == [str(script)]
    elsewhere = tmp_path / "elsewhere" / "pentameter"
    elsewhere.parent.mkdir()
    elsewhere.write_text("")
    monkeypatch.setattr(sys, "argv", [str(elsewhere), "train"])
    assert words_of_program() == [str(elsewhere)]
