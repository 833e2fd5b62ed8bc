"""Processes that are killed while a launcher starts them again, with as many or with fewer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trials.faults.oracle import STEPS, assert_same_run, curve, events, finish, tiny_config

PATIENCE_SECONDS = 120.0
SLOWED = {"train.sample_interval": 1}
"""A sample after each step takes some tens of milliseconds, so that a kill hits one of 40 steps."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture
def launch(tmp_path):
    """Start a command on the run folder; what still runs at the end is ended with it."""
    started = []

    def start(*command):
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def ranks(launcher: int) -> dict[int, int]:
    """Rank → process id of those that a launcher, or its fork server, has started; a forked one
    says its rank nowhere, and is numbered in the order of process ids."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    children = [pid for pid, parent in parents.items() if parent == launcher]
    forked = [pid for pid, parent in parents.items() if parent in children]
    return dict(enumerate(sorted(forked or children)))


def kill_at(
    step: int, run: Path, launcher: subprocess.Popen[str], rank: int, *, resumes: int = 0
) -> None:
    """Kill a rank once a step is recorded by a run that has resumed so often."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def is_reached() -> bool:
        if not (run / "metrics.jsonl").exists():
            return False
        made = curve(run)
        return bool(made) and made[-1][0] >= step and len(events(run, "resume")) == resumes

    while not is_reached():
        assert time.monotonic() < deadline, f"step {step} is not reached"
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.01)
    os.kill(ranks(launcher.pid)[rank], signal.SIGKILL)


def test_a_killed_process_is_started_again_and_the_run_is_bit_equal(launch, tmp_path):
    config = tiny_config(tmp_path, **SLOWED)
    command = ("-m", "pentameter", "train", str(config), "--nproc", "2", "--parallel.zero", "1")
    undisturbed = launch(*command, "--run-dir", str(tmp_path / "undisturbed"))
    assert undisturbed.wait(PATIENCE_SECONDS) == 0
    run = tmp_path / "run"
    disturbed = launch(*command, "--respawn", "2", "--run-dir", str(run))
    kill_at(12, run, disturbed, 1)
    kill_at(22, run, disturbed, 0, resumes=1)
    errors = disturbed.communicate(timeout=PATIENCE_SECONDS)[1]
    assert disturbed.returncode == 0, errors
    assert errors.count("starting 2 processes again") == 2
    assert "Traceback" not in errors
    assert_same_run(run, tmp_path / "undisturbed")


def test_who_is_lost_twice_is_left_out(launch, tmp_path):
    config = tiny_config(tmp_path, **SLOWED, **{"train.precision": "fp64"})
    finish(config, tmp_path / "alone")
    run = tmp_path / "run"
    command = ("-m", "pentameter", "train", str(config), "--nproc", "4", "--layout", "best")
    launched = launch(*command, "--respawn", "5", "--run-dir", str(run))
    kill_at(11, run, launched, 3)
    kill_at(11, run, launched, 2, resumes=1)  # before step 15 is saved
    errors = launched.communicate(timeout=PATIENCE_SECONDS)[1]
    assert launched.returncode == 0, errors
    assert_same_curve(run, tmp_path / "alone")
    sizes = re.findall(r"starting (\d) processes again", errors)
    assert sizes == ["4", "3"]
    assert [event["world_size"] for event in events(run, "resume")][-1] == 2  # one was spare


def test_torchrun_starts_again_in_the_best_layout(launch, tmp_path):
    config = tiny_config(tmp_path, **SLOWED, **{"train.precision": "fp64"})
    finish(config, tmp_path / "alone")
    run = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3")
    train = ("-m", "pentameter", "train", str(config), "--layout", "best", "--run-dir", str(run))
    launched = launch(*torchrun, "--nproc-per-node", "3", *train)
    kill_at(12, run, launched, 1)
    errors = launched.communicate(timeout=PATIENCE_SECONDS)[1]
    assert launched.returncode == 0, errors
    assert_same_curve(run, tmp_path / "alone")
    assert {event["world_size"] for event in events(run, "resume")} == {2}
    assert "1 of 3 processes is spare" in errors


def assert_same_curve(run: Path, alone: Path) -> None:
    """Every loss in fp64 is that of one process, to rounding: 40 steps in another order of sums."""
    ours, theirs = curve(run), curve(alone)
    assert [step for step, _, _ in ours] == list(range(1, STEPS + 1))
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-10)
        assert norm == pytest.approx(expected_norm, abs=1e-10)
