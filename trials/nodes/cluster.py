"""A run on several nodes of one machine, and what is done to it and asked of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trials.nodes.network import Network, network
from trials.nodes.noting import FOLDER
from trials.programs import environment, program

CONFIG = Path(__file__).with_name("nodes.toml")
PATIENCE_SECONDS = 180.0
"""Longest wait for anything on a machine that does much else."""


def train_command(run_dir: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """The command that trains CONFIG in `run_dir`, and its environment. What its ranks read is
    noted in the folder `batches_of(run_dir)`."""
    arguments = ("train", str(CONFIG), "--run-dir", str(run_dir), *options)
    noted = {FOLDER: str(batches_of(run_dir)), "OMP_NUM_THREADS": "1"}
    return program("trials.nodes.noting", *arguments), environment(**noted)


def batches_of(run_dir: Path) -> Path:
    """The folder in which the ranks of a run note what they read."""
    return run_dir.with_name(f"{run_dir.name}-batches")


class Cluster:
    """Launchers of one run on the nodes of a Network, in the run folder `run_dir`."""

    def __init__(self, net: Network, run_dir: Path, least: int) -> None:
        self.net, self.run_dir = net, run_dir
        self._least = least
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._attempts_file = run_dir / "nodes" / "attempt.json"

    def start(self, *nodes: int) -> None:
        """Start the command on these nodes."""
        nodes_option = ("--nodes", f"{self._least}:{self.net.n}")
        command, environment = train_command(
            self.run_dir, *nodes_option, "--layout", "best", "--respawn", "20"
        )
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
        for node in nodes:
            with self._output(node).open("ab") as output:
                self.launchers[node] = subprocess.Popen(
                    ["ip", "netns", "exec", self.net.name(node), *command],
                    stdout=output, stderr=output, env=environment, start_new_session=True,
                )  # fmt: skip

    def power_off(self, node: int) -> None:
        """End everything on a node at once; nobody is told, as when a machine loses its power."""
        self.net.cut(node)
        self.net.kill_all(node)
        self.launchers.pop(node).wait()

    def stop(self) -> list[int]:
        """Ask all launchers to stop, as a scheduler does, and return their exit codes."""
        for launcher in self.launchers.values():
            launcher.send_signal(signal.SIGTERM)
        return [launcher.wait(PATIENCE_SECONDS) for launcher in self.launchers.values()]

    def said(self) -> str:
        """Everything that launchers and their processes have printed."""
        return "".join(
            self._output(node).read_text(errors="replace")
            for node in range(self.net.n)
            if self._output(node).exists()
        )

    def _output(self, node: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-node{node}.txt")

    # -- what the run says of itself -----------------------------------------------------------

    def attempt(self) -> dict[str, Any]:
        """The record of the current attempt; an empty one before the first."""
        return _read_json(self._attempts_file)

    def addresses(self) -> list[str]:
        """Addresses of the nodes that train together now, in the order of their ranks."""
        nodes = self.run_dir / "nodes"
        records = [_read_json(nodes / f"{name}.json") for name in self.attempt().get("members", [])]
        return [record.get("address", "") for record in records]

    def node_of_rank_0(self) -> int:
        """The node of rank 0, which keeps the store."""
        return self.net.addresses.index(self.addresses()[0])

    def workers(self, node: int) -> list[int]:
        """Processes of the node that train, or wait as spares: forked by its launcher's child."""
        parents = {pid: _parent(pid) for pid in self.net.pids(node)}
        launcher = self.launchers[node].pid
        return [pid for pid, parent in parents.items() if parents.get(parent) == launcher]

    def events(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return events_of(self.run_dir)

    def last_step(self) -> int:
        """The newest step that is recorded; 0 before the first."""
        return max((each["step"] for each in self.events()[-3:] if "step" in each), default=0)

    def wait_for(self, what: str, reached: Callable[[], bool]) -> None:
        """Return once `reached()`. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached: {what}")
            time.sleep(0.05)

    def wait_for_steps(self, n: int) -> None:
        """Return once `n` more steps are made."""
        goal = self.last_step() + n
        self.wait_for(f"step {goal}", lambda: self.last_step() >= goal)

    def wait_for_members(self, n: int) -> None:
        """Return once `n` nodes train together, and have made a step."""
        self.wait_for(
            f"{n} nodes together",
            lambda: self.attempt().get("state") == "running" and len(self.addresses()) == n,
        )
        number = self.attempt()["number"]
        self.wait_for("a step of theirs", lambda: self._stepped_since(number))

    def wait_until_recovered(self, number: int) -> None:
        """Return once a later attempt than `number` has made a step."""
        self.wait_for(
            f"an attempt after {number}",
            lambda: self.attempt().get("number", 0) > number and self._stepped_since(number + 1),
        )

    def _stepped_since(self, number: int) -> bool:
        """True if the attempt `number`, or a later one, has made a step: rank 0's launcher says
        which attempt begins, and rank 0 prints a line for each step."""
        attempts = self.said().split("pentameter: attempt ")[1:]
        return any(int(each.partition(":")[0]) >= number and "\nstep " in each for each in attempts)


@contextmanager
def cluster(n: int, folder: Path, *, least: int = 1) -> Iterator[Cluster]:
    """A Cluster of `n` nodes that train together; all is ended at the end."""
    with network(n) as net:
        made = Cluster(net, folder / "run", least)
        made.start(*range(n))
        made.wait_for_members(n)
        yield made


# -- faults: each returns the attempt that was hit, and the nodes to start again ------------------

Fault = Callable[[Cluster, random.Random], tuple[int, list[int]]]


def node_off(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """A node loses its power."""
    return _off(run, chance.randrange(run.net.n))


def rank_0_off(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """The node of rank 0 loses its power: it keeps the store, and writes the run folder."""
    return _off(run, run.node_of_rank_0())


def launcher_killed(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """The launcher of a node alone is killed; its processes end with it."""
    node, number = chance.randrange(run.net.n), run.attempt()["number"]
    launcher = run.launchers.pop(node)
    launcher.kill()
    launcher.wait()
    return number, [node]


def process_killed(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """One process is killed."""
    number = run.attempt()["number"]
    os.kill(run.workers(chance.randrange(run.net.n))[0], signal.SIGKILL)
    return number, []


def link_cut(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """A node is cut off, in both directions, until the others have gone on."""
    number = run.attempt()["number"]
    run.net.cut(chance.randrange(run.net.n))
    return number, []


def link_cut_one_way(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """Nothing that a node sends arrives, until the others have gone on."""
    number = run.attempt()["number"]
    run.net.cut_one_way(chance.randrange(run.net.n))
    return number, []


def back_elsewhere(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """A node loses its power, and comes back with another address."""
    number, (node,) = node_off(run, chance)
    run.net.move(node, f"10.77.0.{chance.randrange(10, 250)}")
    return number, [node]


def two_off(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """Two nodes lose their power, one up to 3 s after the other."""
    first, second = chance.sample(range(run.net.n), 2)
    number, _ = _off(run, first)
    time.sleep(chance.uniform(0, 3))
    run.power_off(second)
    return number, [first, second]


def off_during_save(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """A node loses its power while a checkpoint is written."""
    checkpoints = run.run_dir / "checkpoints"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(checkpoints.glob("*.tmp-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    return _off(run, chance.randrange(run.net.n))


def off_during_resume(run: Cluster, chance: random.Random) -> tuple[int, list[int]]:
    """A node loses its power, and another one while the rest resume."""
    first, second = chance.sample(range(run.net.n), 2)
    number, _ = _off(run, first)
    run.wait_for("the next attempt", lambda: run.attempt()["number"] > number)
    time.sleep(chance.uniform(0, 2))
    again, _ = _off(run, second)
    return again, [first, second]


LOSSES: dict[str, Fault] = {
    each.__name__: each
    for each in (
        node_off, rank_0_off, launcher_killed, process_killed, link_cut, link_cut_one_way,
        back_elsewhere, two_off, off_during_save, off_during_resume,
    )
}  # fmt: skip
"""Faults after which a run goes on in another attempt, with the nodes that are left or all."""


def _off(run: Cluster, node: int) -> tuple[int, list[int]]:
    number = run.attempt()["number"]
    run.power_off(node)
    return number, [node]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, up to the first that is not whole."""
    found: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            found.append(json.loads(line))
    return found


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    return {}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
