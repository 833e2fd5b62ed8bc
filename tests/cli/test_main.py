"""The command: verbs, help, exit codes, no traceback."""

import subprocess
import sys

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


def test_debug_shows_the_traceback(monkeypatch):
    def fail(verb, arguments):
        raise ConfigError("x")

    monkeypatch.setattr(cli, "_run_verb", fail)
    with pytest.raises(ConfigError):
        cli.main(["--debug", "train"])
