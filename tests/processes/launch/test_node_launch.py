"""Launchers of `--nodes`, here on one machine's loopback, and processes that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pentameter.disk.lock import RunLock
from pentameter.processes.nodes.attempts import Attempt, write_attempt

NODE = Path(__file__).parents[1] / "node.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its interfaces")


class Nodes:
    """Launchers that share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, **options: int) -> subprocess.Popen[str]:
        launcher = subprocess.Popen(
            [sys.executable, str(NODE), "launch", str(self.folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            **(options or {"start_new_session": True}),
        )  # fmt: skip
        self.launchers.append(launcher)
        return launcher

    def at_work(self) -> dict[int, list[int]]:
        """Process id → rank, world size, local rank and local size, of those that run."""
        found = {}
        for path in self.folder.glob("pid-*"):
            if path.suffix or not Path("/proc", path.name[4:]).exists():
                continue
            *numbers, _store = path.read_text().split()
            found[int(path.name[4:])] = [int(number) for number in numbers]
        return found

    def wait_for(self, world_size: int, other_than: dict[int, list[int]]) -> dict[int, list[int]]:
        """Return the processes of the next attempt, once all of its world are there."""
        deadline = time.monotonic() + 60
        while True:
            there = self.at_work()
            sizes = [size for pid, (_, size, _, _) in there.items() if pid not in other_than]
            if sizes == [world_size] * world_size and not there.keys() & other_than.keys():
                return there
            assert time.monotonic() < deadline, there
            time.sleep(0.02)


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    for launcher in made.launchers:
        launcher.kill()
        launcher.communicate(timeout=30)


def test_losses_returns_and_the_end(nodes):
    first, second = nodes.start(), nodes.start()
    four = nodes.wait_for(4, {})
    assert sorted(four.values()) == [[rank, 4, rank % 2, 2] for rank in range(4)]
    os.kill(max(four), signal.SIGKILL)
    again = nodes.wait_for(4, four)  # all anew, also those that were well
    second.kill()
    two = nodes.wait_for(2, again)
    assert sorted(two.values()) == [[0, 2, 0, 2], [1, 2, 1, 2]]
    third = nodes.start()
    all_again = nodes.wait_for(4, two)
    third.send_signal(signal.SIGTERM)  # this node is wanted back
    assert third.wait(60) == 75
    nodes.wait_for(2, all_again)
    (nodes.folder / "go").touch()
    assert first.wait(60) == 0
    said = "".join(launcher.communicate()[1] for launcher in nodes.launchers)
    assert "was killed by SIGKILL" in said
    assert "taking in 1 node" in said
    assert "Traceback" not in said
    assert [path.name for path in (nodes.folder / "nodes").glob("*.json")] != []  # the attempt
    deadline = time.monotonic() + 20
    while nodes.at_work():
        assert time.monotonic() < deadline, "a process outlives its launcher"
        time.sleep(0.05)


def test_an_error_ends_all_launchers_with_its_code(nodes):
    both = [nodes.start(), nodes.start()]
    nodes.wait_for(4, {})
    (nodes.folder / "go.new").write_text("the number must be even")
    (nodes.folder / "go.new").rename(nodes.folder / "go")
    for launcher in both:
        assert launcher.wait(60) == 2
        assert "pentameter: the number must be even" in launcher.stderr.read()


def test_a_launcher_that_stands_still_keeps_its_run_while_another_comes(nodes):
    """Its processes train on; when it goes on, the other one is taken in, and nothing is lost."""
    first = nodes.start()
    two = nodes.wait_for(2, {})
    first.send_signal(signal.SIGSTOP)
    second = nodes.start()
    assert "trains this run, and its launcher is silent: waiting" in second.stderr.readline()
    time.sleep(1.0)
    assert nodes.at_work() == two
    first.send_signal(signal.SIGCONT)
    nodes.wait_for(4, two)
    (nodes.folder / "go").touch()
    assert [first.wait(60), second.wait(60)] == [0, 0]
    said = first.communicate()[1] + second.communicate()[1]
    assert "taking in 1 node" in said
    assert "the attempt is over: stopped" in said  # at a step's end, and not for a loss
    assert "gone" not in said


def test_a_folder_that_another_process_holds_is_tried_again_and_then_refused(nodes):
    """As after an attempt whose processes may be there still."""
    write_attempt(nodes.folder / "nodes", Attempt(1, "running", ("lost",), (2,)))
    with RunLock(nodes.folder / "run.lock"):
        launcher = nodes.start()
        assert launcher.wait(120) == 73
    said = launcher.stderr.read()
    assert "lost 4 times without a new checkpoint" in said
    assert f"in use by process {os.getpid()} " in said


def test_a_launcher_whose_run_folder_is_gone_makes_no_other(nodes, tmp_path):
    """As after an unmount: at its path there is an empty folder, the mount point, or nothing."""
    for mount_point in (False, True):
        nodes.folder = tmp_path / f"run-{mount_point}"
        nodes.folder.mkdir()
        launcher = nodes.start()
        there = nodes.wait_for(2, {})
        nodes.folder.rename(tmp_path / f"elsewhere-{mount_point}")
        if mount_point:
            nodes.folder.mkdir()
        assert launcher.wait(60) == 74
        assert "was its disk unmounted?" in launcher.stderr.read()
        assert not nodes.folder.exists() or not list(nodes.folder.iterdir())
        deadline = time.monotonic() + 20
        while any(Path("/proc", str(pid)).exists() for pid in there):
            assert time.monotonic() < deadline, "a process outlives its launcher"
            time.sleep(0.05)


def test_a_run_folder_that_comes_back_soon_is_gone_on_in(nodes, tmp_path):
    nodes.folder = tmp_path / "run"
    nodes.folder.mkdir()
    launcher = nodes.start()
    two = nodes.wait_for(2, {})
    nodes.folder.rename(tmp_path / "elsewhere")
    time.sleep(1.0)
    (tmp_path / "elsewhere").rename(nodes.folder)
    time.sleep(1.0)
    assert nodes.at_work() == two
    (nodes.folder / "go").touch()
    assert launcher.wait(60) == 0
    assert "attempt 2" not in launcher.stderr.read()


def test_the_interfaces_that_nccl_is_told_stay(nodes, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    nodes.start()
    for pid in nodes.wait_for(2, {}):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {b"NCCL_SOCKET_IFNAME=^docker0", b"GLOO_SOCKET_IFNAME=lo"} <= {*variables}


def test_suspending_a_launcher_suspends_its_processes(nodes):
    launcher = nodes.start(process_group=0)
    pids = [launcher.pid, *nodes.wait_for(2, {})]
    launcher.send_signal(signal.SIGTSTP)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTSTP)  # these processes know no steps to wait for
    deadline = time.monotonic() + 30
    while {Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids} != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGCONT)
    (nodes.folder / "go").touch()
    assert launcher.wait(60) == 0
