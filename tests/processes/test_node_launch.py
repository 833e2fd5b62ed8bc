"""Launchers of `--nodes`, here on one machine's loopback, and processes that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NODE = Path(__file__).with_name("node.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its interfaces")


class Nodes:
    """Launchers that share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        launcher = subprocess.Popen(
            [sys.executable, str(NODE), "launch", str(self.folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
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
