"""What `train --nodes` and `--respawn` refuse, and the processes that a launcher starts."""

from __future__ import annotations

import time

import pytest

from pentameter.cli.main import main
from pentameter.errors import ConfigError
from pentameter.machine import cores_and_memory as cores
from pentameter.processes.failures.failure import Failure, WorkerFailedError
from pentameter.processes.launch import local_launch, node_launch, program, training_launch
from pentameter.processes.launch.training_launch import parse_nodes


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
    monkeypatch.setattr("pentameter.processes.failures.failure.HOLD_BACK_SECONDS", 0)
    assert main(["train", "quickstart", "--respawn", "2"]) == 2
    assert "--respawn and environment exclude each other" in capsys.readouterr().err


def test_many_machines_are_checked_against_this_ones_share_of_them(monkeypatch, tmp_path):
    """Without --layout best, too."""
    asked = []
    monkeypatch.setattr(cores, "n_usable_cores", lambda: 4)
    monkeypatch.setattr(local_launch, "check_memory", lambda n, state_bytes: asked.append(n))
    monkeypatch.setattr(node_launch, "run_on_nodes", lambda *arguments: asked.append("begun"))
    monkeypatch.chdir(tmp_path)
    layout = ["--parallel.data", "32", "--train.batch_size", "64", "--data.corpus", "grammar"]
    assert main(["train", "quickstart", "--nodes", "8", "--nproc", "4", *layout]) == 0
    assert asked[-1] == "begun"
    assert set(asked[:-1]) <= {4}


class Runs:
    """What `--respawn` starts: the first run saves a checkpoint, then `happens`, and it is lost."""

    def __init__(self, folder, happens):
        self.folder, self._happens = folder, happens
        self.resumes = []

    def run(self, program, n_processes, *, look):
        (resume,) = [each for each in program.arguments if each.startswith("--resume")]
        self.resumes.append(resume)
        if len(self.resumes) > 1:
            return
        self.folder.mkdir()
        look()
        (self.folder / "checkpoints" / "step-00000005").mkdir(parents=True)
        time.sleep(1.1 * training_launch.LOOK_SECONDS)
        look()
        self._happens()
        raise WorkerFailedError(Failure(0, 70, "killed by SIGKILL", 0.0, killed=True))


@pytest.mark.parametrize("resume", ["auto", "never", "extend"])
@pytest.mark.parametrize("is_away", [False, True])
def test_who_follows_a_checkpoint_never_begins_anew(monkeypatch, tmp_path, resume, is_away, capsys):
    """Also if the run folder was moved, or its disk unmounted, meanwhile."""
    folder = tmp_path / "run"
    runs = Runs(folder, lambda: is_away and folder.rename(tmp_path / "elsewhere"))
    monkeypatch.setattr(training_launch, "run_local", runs.run)
    monkeypatch.setattr(program, "Preloaded", Program)
    options = ["--run-dir", str(folder), "--respawn", "3", "--resume", resume]
    code = main(["train", "quickstart", *options])
    if is_away:
        assert code == 74
        assert "was its disk unmounted?" in capsys.readouterr().err
        assert not folder.exists()
        assert runs.resumes == [f"--resume={resume}"]
    else:
        assert code == 0
        after = "extend" if resume == "extend" else "must"
        assert runs.resumes == [f"--resume={resume}", f"--resume={after}"]


def test_a_node_that_follows_a_checkpoint_never_begins_anew(monkeypatch, tmp_path):
    started = []

    def run(program, n_processes, folder, rules, progress, prepare):
        for has_checkpoint in (False, True):
            prepare(has_checkpoint)
            started.append([each for each in program.arguments if each.startswith("--resume")])

    monkeypatch.setattr(node_launch, "run_on_nodes", run)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "--nodes", "1", "--resume", "auto"]) == 0
    assert started == [["--resume=auto"], ["--resume=must"]]


class Program:
    """A program that is not started."""

    def __init__(self, *arguments):
        self.arguments = []

    def close(self):
        pass
