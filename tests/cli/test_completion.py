"""What the Tab key offers, and the JSON schema for editors."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tomllib
from importlib import resources

import pytest

from pentameter.cli.completion import SHELLS, candidates, run
from pentameter.cli.main import VERBS
from pentameter.config.files.load import load_config, preset_names
from pentameter.config.files.write import json_schema, to_toml

jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([], list(VERBS)),
        (["tr"], ["train"]),
        (["train", "gpt3"], ["gpt3-175b"]),
        (["train", "quickstart", "--train.prec"], ["--train.precision"]),
        (["train", "quickstart", "--model.attention.n-h"], ["--model.attention.n-heads"]),
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


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_script(shell, tmp_path, capsys):
    assert run([shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=20)


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """A function that writes a shell's script; `pentameter` is in the PATH, and a run in runs/."""
    executable = tmp_path / "pentameter"
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pentameter "$@"\n')
    executable.chmod(0o755)
    (tmp_path / "runs" / "novel" / "checkpoints").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def command(shell, name):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        run([shell])
        (tmp_path / name).write_text(capsys.readouterr().out)

    return command


def output(*arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert not done.stderr
    return done.stdout


def test_bash_completes(command):
    command("bash", "script")
    code = (
        "source ./script; COMP_WORDS=(pentameter train quickstart --train.prec); "
        'COMP_CWORD=3; _pentameter; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert output("bash", "-c", code) == "--train.precision\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pentameter train quickstart --train.prec", ["--train.precision"]),
        ("pentameter export runs/novel --to ", ["hf", "peft", "safetensors"]),  # and no file
        ("pentameter sample runs/", ["runs/novel"]),
        ("pentameter sample runs/novel/", ["runs/novel/checkpoints/"]),
    ],
)
def test_fish_completes(command, typed, offered):
    command("fish", "script")
    lines = output("fish", "--no-config", "-c", f"source ./script; complete -C '{typed}'")
    assert [line.split("\t")[0] for line in lines.splitlines()] == offered


def test_zsh_completes(command, tmp_path):
    """At a terminal, as only there zsh completes, with the script found in $fpath."""
    command("zsh", "_pentameter")
    typed = {
        "pentameter tr": "pentameter train ",  # the first call, which loads the script
        "pentameter train quickstart --tra": "pentameter train quickstart --train.",
        "pentameter export runs/novel --to h": "pentameter export runs/novel --to hf ",
        "pentameter sample runs/novel/": "pentameter sample runs/novel/checkpoints/",
    }
    lines = ["PS1=; fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D"]
    lines += [f"{each}\t!\x01print -r -- '<\x05>'" for each in typed]  # ! ends what Tab leaves open
    leader, follower = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    ) as shell:
        os.close(follower)
        found: list[str] = []
        screen = b""
        for line in lines:
            os.write(leader, f"{line}\n".encode())
        while len(found) < len(typed) and select.select([leader], [], [], 60)[0]:
            screen += os.read(leader, 1 << 16)
            found = re.findall(r"^<(.*)>\r?$", screen.decode(errors="replace"), flags=re.MULTILINE)
        shell.kill()
    os.close(leader)
    assert found == [f"{each}!" for each in typed.values()]


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
        ({"model": {"attention": {"n_heads": 0}}}, "0"),
        ({"extends": 3}, "3"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(table, said):
    (error, *_) = jsonschema.Draft202012Validator(json_schema()).iter_errors(table)
    assert said in error.message
