"""Commands on a system that is not Linux, as far as Linux can pretend to be one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SYSCTL = """#!/bin/sh
case "$2" in
  kern.bootsessionuuid) echo 7D1A-BOOT ;;
  machdep.cpu.brand_string) echo Apple M3 Pro ;;
  hw.perflevel0.logicalcpu) echo 2 ;;
  *) exit 1 ;;
esac
"""
HOLD = """
import sys, time
from pathlib import Path
from pentameter.disk.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
TAKE = """
import sys, time
from pathlib import Path
from pentameter.disk.lock import RunLock, is_held, owner_of
path, started = Path(sys.argv[1]), time.monotonic()
owner, held = owner_of(path), is_held(path)
with RunLock(path, waiting=print):
    print(owner.boot, owner.process_start > 1e9, held, time.monotonic() - started < 10)
"""
BOARD = """
import json, sys
from pathlib import Path
from pentameter.report.watch.board import Board
print(json.dumps(Board(Path(sys.argv[1])).news("", -1)))
"""


@pytest.fixture(scope="module")
def other_system(tmp_path_factory):
    """The environment of a process on another system, with a folder of its own."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copy(HERE / "other_system.py", folder / "sitecustomize.py")
    (folder / "sysctl").write_text(SYSCTL)
    (folder / "sysctl").chmod(0o755)
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    there = {name: f"{folder}{os.pathsep}{value}" for name, value in paths.items()}
    return {**os.environ, **there, "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(scope="module")
def say(other_system, tmp_path_factory):
    """Call `say(*arguments)` to run Python there; returns stdout."""
    folder = tmp_path_factory.mktemp("runs")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], env=other_system, cwd=folder, check=False,
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def trained(say):
    settings = ["--train.steps=2", "--train.compile=false", "--train.device=cpu"]
    sizes = ["--train.batch-size=2", "--model.n-layers=1", "--model.d-model=16"]
    return say("-m", "pentameter", "train", "grammar", *settings, *sizes, "--run-dir=run")


def test_the_simulation_hides_what_it_is_to_hide(say):
    code = (
        "import os, sys; from pentameter.machine import cores_and_memory as cores, choices; "
        "print(os.path.exists('/proc'), hasattr(os, 'sched_getaffinity'), sys.platform, "
        "cores.sys.platform, choices.sys.platform, len(cores.usable_cores()))"
    )
    assert say("-c", code).split() == ["False", "False", "linux", "darwin", "darwin", "2"]


def test_a_run_trains_there_on_a_chip_that_has_a_name(trained):
    assert "ended at step 2: completed" in trained
    assert "Apple M3 Pro" in trained


def test_its_model_writes(trained, say):
    assert say("-m", "pentameter", "sample", "run", "--device=cpu", "--max-new-tokens=4")


def test_its_report_is_written(trained, say):
    assert "report.html" in say("-m", "pentameter", "report", "run")


def test_the_board_of_watch_shows_the_run_as_ended(trained, say):
    (row,) = json.loads(say("-c", BOARD, "."))["rows"]
    assert (row["steps"], row["kind"]) == (2, "good")


def test_doctor_tells_the_machine(say):
    facts = json.loads(say("-m", "pentameter", "doctor", "--json"))
    assert facts["devices"]["cpu"]["name"] == "Apple M3 Pro"
    assert facts["devices"]["cpu"]["cores"] == 2


def test_after_a_crash_the_folder_is_free_at_once(say, other_system, tmp_path):
    path = tmp_path / "run.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        env=other_system, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert say("-c", TAKE, str(path)) == "7D1A-BOOT True False True\n"
