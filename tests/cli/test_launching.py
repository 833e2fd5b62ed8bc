"""What `train --nodes` and `--respawn` refuse, and the processes that a launcher starts."""

from __future__ import annotations

import pytest

from pentameter.cli.launching import newest_checkpoint, parse_nodes
from pentameter.cli.main import main
from pentameter.errors import ConfigError


def test_numbers_of_nodes():
    assert parse_nodes("1:4") == (1, 4)
    assert parse_nodes("2") == (2, 2)
    for wrong in ("", "0:2", "4:1", "1:", "one", "9" * 5000):
        with pytest.raises(ConfigError, match="must be MIN:MAX, like 1:4"):
            parse_nodes(wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "1:4"], "each number of nodes needs a layout that fits it; add --layout best"),
        (["--nodes", "2", "--resume", "never"], "--resume never would refuse it"),
        (
            ["--nodes", "3", "--parallel.data", "2"],
            "parallel.data=2 needs 2 processes, there are 3",
        ),
        (["--nodes", "2", "--time", "5m"], "--nodes and --time exclude each other"),
        (["--respawn", "2", "--sweep", "seed=1,2"], "--respawn and --sweep exclude each other"),
        (["--respawn", "-1"], "--respawn -1 must be 0 or more"),
    ],
)
def test_what_cannot_be(options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", *options]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_respawn_in_a_process_of_torchrun(monkeypatch, capsys):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pentameter.processes.failure.HOLD_BACK_SECONDS", 0)
    assert main(["train", "quickstart", "--respawn", "2"]) == 2
    assert "--respawn and environment exclude each other" in capsys.readouterr().err


def test_the_newest_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) == ""
    for name in ("step-00000005", "step-00000010", "step-00000015.tmp-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == "step-00000010"
