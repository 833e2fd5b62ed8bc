"""The processes of verify: none is left behind, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.errors import TrainingFailedError
from pentameter.machine import child
from pentameter.verify.cases import chosen_cases
from pentameter.verify.compare import verify_layouts
from pentameter.verify.shrink import shrink
from pentameter.verify.workers import Workers

HANGS = """
import sys
sys.path.insert(0, {here!r})
from pentameter.config.files.load import load_config
from pentameter.verify.cases import chosen_cases
from pentameter.verify.compare import verify_layouts
from pentameter.verify.shrink import shrink
from pentameter.verify.workers import Workers
config = load_config("quickstart")
cases = chosen_cases(config, "data=2")
with Workers() as workers:
    print(workers.server.pid, flush=True)
    list(verify_layouts(shrink(config, cases), cases, workers, prepare="planted_faults:hang"))
"""


def session_of(leader):
    """The processes of a session that still run."""
    found = subprocess.run(
        ["ps", "-s", str(leader), "-o", "pid=,stat="], capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in found.stdout.splitlines()]
    return [int(pid) for pid, state in lines if not state.startswith("Z")]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_middle_leaves_nothing_behind(number, tmp_path):
    """SIGKILL gives this process no chance to end the others."""
    code = HANGS.format(here=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    leader = None
    try:
        leader = int(process.stdout.readline())
        wait_until(lambda: len(session_of(leader)) == 3)  # the fork server and two workers
        process.send_signal(number)
        process.wait(20)
        wait_until(lambda: not session_of(leader), seconds=20)
        assert not list(tmp_path.glob("pentameter-*"))  # torch leaves a cache there
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if leader is not None and session_of(leader):
            os.killpg(leader, signal.SIGKILL)


def test_leaving_the_block_ends_all_and_removes_the_folder():
    config = load_config("quickstart")
    cases = chosen_cases(config, "data=1,micro_batches=2")
    with Workers() as workers:
        folder = Path(workers.new_file()).parent
        (outcome,) = verify_layouts(shrink(config, cases), cases, workers, n_steps=1)
        assert len(session_of(workers.server.pid)) == 2
        threads = Path(f"/proc/{workers.server.pid}/task")
        if threads.exists():
            assert len(list(threads.iterdir())) == 1  # or forking it would not be safe
    assert outcome.passed
    assert not session_of(workers.server.pid)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_nothing_may_be_forked_each_worker_is_an_interpreter(monkeypatch):
    monkeypatch.setattr(child, "forks", lambda: False)
    config = load_config("quickstart")
    cases = chosen_cases(config, "data=2")
    with Workers() as workers:
        (outcome,) = verify_layouts(shrink(config, cases), cases, workers, n_steps=1)
        pids = session_of(workers.server.pid)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids]
        maps = Path(f"/proc/{workers.server.pid}/maps").read_text()
    assert outcome.passed
    assert sum(b"worker" in line for line in lines) == 2
    assert "libtorch" not in maps


def test_processes_that_cannot_start_are_told(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    config = load_config("quickstart")
    cases = chosen_cases(config, "data=2")
    with (
        Workers() as workers,
        pytest.raises(TrainingFailedError, match="cannot be started: ModuleNotFoundError"),
    ):
        list(verify_layouts(shrink(config, cases), cases, workers))
