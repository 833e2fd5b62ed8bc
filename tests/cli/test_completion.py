"""What the Tab key offers, and the JSON schema for editors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from importlib import resources

import pytest

from pentameter.cli.completion import SCRIPTS, candidates, run
from pentameter.cli.main import VERBS
from pentameter.config.load import load_config, preset_names
from pentameter.config.write import json_schema, to_toml

jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([], list(VERBS)),
        (["tr"], ["train"]),
        (["train", "gpt3"], ["gpt3-175b"]),
        (["train", "quickstart", "--train.prec"], ["--train.precision"]),
        (["train", "quickstart", "--model.n-h"], ["--model.n-heads"]),
        (["train", "quickstart", "--se"], ["--seed"]),
        (["train", "quickstart", "--tra"], ["--train."]),
        (["train", "quickstart", "--train.precision", "bf"], ["bf16"]),
        (["train", "quickstart", "--train.precision=bf"], ["--train.precision=bf16"]),
        (["train", "quickstart", "--train.offload", "t"], ["true"]),
        (["train", "quickstart", "--train.steps", ""], []),
        (["sample", "runs/x", "--device", "c"], ["cpu", "cuda"]),
        (["prepare", "novel.txt", "--grammar.n-s"], ["--grammar.n-states"]),
        (["import", "folder", "--o"], ["--out"]),
        (["completion", "f"], ["fish"]),
        (["traim", ""], []),
        (["train", "quickstart", "novel"], []),
    ],
)
def test_candidates(words, offered):
    assert candidates(words) == offered


def test_every_verb_has_options():
    for verb in VERBS:
        assert "--help" in candidates([verb, "--"]), verb


def test_a_run_folder_is_offered(tmp_path, monkeypatch):
    (tmp_path / "runs" / "novel").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert candidates(["sample", "runs/"]) == ["runs/novel"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_takes_its_script(shell, tmp_path, capsys):
    assert run([shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=20)


def test_bash_completes(tmp_path, capsys):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    run(["bash"])
    command = tmp_path / "pentameter"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pentameter "$@"\n')
    command.chmod(0o755)
    script = capsys.readouterr().out + (
        f'PATH="{tmp_path}:$PATH"; COMP_WORDS=(pentameter train quickstart --train.prec); '
        'COMP_CWORD=3; _pentameter; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "--train.precision\n", done.stderr


def test_the_schema_takes_every_preset_and_every_resolved_configuration(capsys):
    run(["toml"])
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema)
    folder = resources.files("pentameter.config") / "presets"
    for name in preset_names():
        valid.validate(tomllib.loads((folder / f"{name}.toml").read_text()))
        valid.validate(tomllib.loads(to_toml(load_config(name))))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"train": {"stepz": 5}}, "stepz"),
        ({"train": {"precision": "bf8"}}, "bf8"),
        ({"model": {"n_heads": 0}}, "0"),
        ({"extends": 3}, "3"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(table, said):
    (error, *_) = jsonschema.Draft202012Validator(json_schema()).iter_errors(table)
    assert said in error.message
