"""The command: verbs, help, exit codes, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.cli import main as cli
from pentameter.errors import (
    ConfigError,
    CorruptError,
    InterruptedRunError,
    RunFolderInUseError,
    StorageError,
    TrainingFailedError,
)
from pentameter.processes.failures.failure import Failure, WorkerFailedError


def run_in_process(*arguments):
    command = [sys.executable, "-m", "pentameter", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"\n  {verb} " in text


def test_no_arguments_is_wrong_usage(capsys):
    assert cli.main([]) == 2
    assert "usage" in capsys.readouterr().out


def test_an_unknown_verb_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_and_refuses_nonsense(verb):
    shown = run_in_process(verb, "--help")
    assert shown.returncode == 0
    assert f"pentameter {verb}" in shown.stdout
    refused = run_in_process(verb, "--no-such-option")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (CorruptError("x"), 65),
        (TrainingFailedError("x"), 70),
        (RunFolderInUseError("x"), 73),
        (StorageError("x"), 74),
        (InterruptedRunError("x"), 75),
        (OSError(28, "No space left on device", "/full/disk"), 74),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_one_line_and_a_code(monkeypatch, capsys, error, code):
    def fail(verb, arguments):
        raise error

    monkeypatch.setattr(cli, "_run_verb", fail)
    assert cli.main(["train"]) == code
    message = capsys.readouterr().err
    assert message.startswith("pentameter: ")
    assert message.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch, capsys):
    def fail(verb, arguments):
        raise ConfigError("x")

    monkeypatch.setattr(cli, "_run_verb", fail)
    assert cli.main(["--debug", "train"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("ConfigError: x\npentameter: x\n")


def test_an_error_nobody_expected_shows_its_traceback(monkeypatch, capsys):
    def fail(verb, arguments):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(cli, "_run_verb", fail)
    assert cli.main(["train"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("pentameter: ZeroDivisionError: a fault of ours\n")


HOSTILE = "a\x1b[31m\x1b]0;title\x07b\r\x9b\x7f\u202e\ud800c"
"""What a terminal acts on: colours, its title, the bell, marks of direction."""


@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize(
    "error",
    [
        ConfigError(f"{HOSTILE} is no file; name one:\n  a.toml\n  b.toml"),
        OSError(2, "No such file or directory", f"{HOSTILE}\npentameter: all is well"),
        ValueError(HOSTILE),
        WorkerFailedError(Failure(1, 70, HOSTILE, 0.0, f"Traceback\n  {HOSTILE}", expected=False)),
    ],
    ids=["config", "storage", "unexpected", "worker"],
)
def test_nothing_on_stderr_acts_on_the_terminal(monkeypatch, capsys, error, debug):
    def fail(verb, arguments):
        raise error

    monkeypatch.setattr(cli, "_run_verb", fail)
    cli.main([*debug, "train"])
    shown = capsys.readouterr().err
    assert shown.replace("\n", "").isprintable()
    assert r"a\x1b[31m\x1b]0;title\x07b\r\x9b\x7f\u202e\ud800c" in shown
    if isinstance(error, ConfigError):
        assert shown.endswith("is no file; name one:\n  a.toml\n  b.toml\n")
    if isinstance(error, OSError):
        assert "\npentameter: all is well" not in shown


@pytest.mark.parametrize("filling", ["x", "x y", "\x1b", "é\n"])
def test_a_long_path_loses_its_middle_and_leaves_the_remedy(monkeypatch, capsys, filling):
    def fail(verb, arguments):
        raise ConfigError(f"/first/{filling * 100_000}/last is not there; name another")

    monkeypatch.setattr(cli, "_run_verb", fail)
    cli.main(["train"])
    shown = capsys.readouterr().err
    assert shown.startswith("pentameter: /first/")
    assert shown.endswith("/last is not there; name another\n")
    assert "…" in shown
    assert len(shown) < 7000


def test_usage_of_a_hostile_option_is_escaped(capsys):
    assert cli.main(["sample", "model", f"--{HOSTILE}"]) == 2
    assert r"\x1b[31m" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["sample", "model", "--seed", HOSTILE])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert r"\x1b[31m" in shown
    assert shown.replace("\n", "").isprintable()


def test_help_of_a_verb_is_that_verbs_own(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["help", "export"])
    assert stop.value.code == 0
    assert "usage: pentameter export" in capsys.readouterr().out
    assert cli.main(["help", "exprot"]) == 2
    assert "did you mean export?" in capsys.readouterr().err


PRINTING = [["--help"], ["--version"], ["plan", "--help"], ["completion", "bash"]]


def run_into(output, arguments, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        [sys.executable, "-m", "pentameter", *arguments], stdout=output, stderr=subprocess.PIPE,
        text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", PRINTING)
def test_output_that_the_disk_does_not_take_is_told(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        ended = run_into(full, arguments, unbuffered)
    assert (ended.returncode, ended.stderr) == (
        74,
        "pentameter: stdout: No space left on device\n",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", PRINTING)
def test_a_reader_that_goes_away_is_no_failure(arguments, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        ended = run_into(pipe, arguments, unbuffered)
    assert (ended.returncode, ended.stderr) == (0, "")
