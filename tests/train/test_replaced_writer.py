"""A run that was frozen, and replaced meanwhile where `flock` does not reach, writes no more."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import events, fit

RUN = """
import errno, fcntl, os, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pentameter.disk import lock
from tiny_runs import fit
from pentameter.errors import PentameterError

folder, host, interval, slow = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])

def no_locks(fd, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

own = lock.current_owner
fcntl.flock = no_locks
lock.current_owner = lambda: replace(own(), host=host, boot=host)  # each on a machine of its own
lock.RunLock.__init__.__kwdefaults__.update(beat_seconds=0.05, stale_seconds=0.5)

class Steps:
    def on_step(self, run, step):
        print(step.step, flush=True)
        time.sleep(slow)

sections = {
    "train": {"steps": 24, "eval_interval": 3, "sample_interval": 2, "sample_tokens": 2},
    "checkpoint": {"interval": interval, "keep_last": 1, "keep_best": True},
    "log": {"interval": 1},
}
try:
    fit(folder, hooks=[Steps()], sections=sections)
except PentameterError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def content(folder: Path) -> dict[str, str]:
    """Path → hash of every file in a folder, but the lock's, which beats."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.lock"
    }


@pytest.fixture
def start():
    started = []

    def begin(folder: Path, host: str, interval: int, slow: float = 0.0) -> subprocess.Popen[str]:
        here = str(Path(__file__).parents[1] / "kit")
        arguments = [here, str(folder), host, str(interval), str(slow)]
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("interval", [4, 100])
def test_a_frozen_run_that_was_replaced_ends_with_73_and_writes_no_byte(tmp_path, start, interval):
    """With another save ahead, and with none but the last one."""
    first = start(tmp_path / "run", "a", interval, slow=0.1)
    for line in first.stdout:
        if int(line) == 6:
            break
    first.send_signal(signal.SIGSTOP)
    second = start(tmp_path / "run", "b", interval)
    said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    before = content(tmp_path / "run")
    first.send_signal(signal.SIGCONT)
    _, told = first.communicate(timeout=120)
    assert first.returncode == 73, told
    assert "run.lock is gone" in told
    assert "Traceback" not in told
    assert content(tmp_path / "run") == before
    assert [each["step"] for each in events(tmp_path / "run", "train")] == [*range(1, 25)]
    assert [each["kind"] for each in events(tmp_path / "run", "end")] == ["completed"]


def test_a_frozen_run_ends_while_its_successor_trains(tmp_path, start):
    first = start(tmp_path / "run", "a", 4, slow=0.1)
    for line in first.stdout:
        if int(line) == 10:
            break
    first.send_signal(signal.SIGSTOP)
    second = start(tmp_path / "run", "b", 4, slow=0.1)
    assert int(second.stdout.readline()) in (5, 9)  # from the last checkpoint
    first.send_signal(signal.SIGCONT)
    _, told = first.communicate(timeout=120)
    assert first.returncode == 73, told
    assert "process" in told
    assert "on b has taken over" in told
    assert second.wait(timeout=120) == 0
    assert [each["step"] for each in events(tmp_path / "run", "train")] == [*range(1, 25)]
    fit(tmp_path / "alone", sections={"train": {"steps": 24, "eval_interval": 3}})
    losses = [
        [each["loss"] for each in events(tmp_path / run, "train")] for run in ("run", "alone")
    ]
    assert losses[0] == losses[1]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp-*"))


def test_a_run_whose_lock_was_removed_ends_with_73(tmp_path, start):
    first = start(tmp_path / "run", "a", 4, slow=0.1)
    assert int(first.stdout.readline()) == 1
    (tmp_path / "run" / "run.lock").unlink()
    _, told = first.communicate(timeout=120)
    assert first.returncode == 73, told
    assert "run.lock is gone" in told
    assert not any(json.loads(line)["event"] == "end" for line in
                   (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())  # fmt: skip
