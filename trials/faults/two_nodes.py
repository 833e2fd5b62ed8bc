"""Two nodes on one machine, in network namespaces, until the link between them is cut.

`python -m trials.faults.two_nodes [torchrun|environment]` trains on both, cuts the link for good
and prints when each side left, with which exit code, and what it said last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trials.nodes.network import network, reason_not_to

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29477"
PATIENCE_SECONDS = 60.0
"""Longest wait for training to begin, and for a side to leave."""


@dataclass(frozen=True)
class Left:
    """One node's end: seconds after the cut (None: still there), exit code and stderr."""

    seconds: float | None
    code: int | None
    said: str


def cut_while_training(folder: Path, launcher: str, timeout_seconds: float) -> list[Left]:
    """Train on two nodes, cut the link, and return how node 0 (the near one) and node 1 left."""
    with network(2) as net:
        assert tuple(net.addresses) == ADDRESSES
        nodes = [_start(node, net.name(node), folder, launcher, timeout_seconds) for node in (0, 1)]
        try:
            _wait_for_steps(folder / "run" / "metrics.jsonl", nodes)
            net.cut(0)
            cut, ended = time.monotonic(), dict[int, float]()
            while len(ended) < 2 and time.monotonic() < cut + timeout_seconds + PATIENCE_SECONDS:
                for number, node in enumerate(nodes):
                    if number not in ended and node.poll() is not None:
                        ended[number] = time.monotonic() - cut
                time.sleep(0.05)
        finally:
            for node in nodes:  # the whole session: torchrun's workers with their agent
                with suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()
        said = [(folder / f"stderr-{number}").read_text(errors="replace") for number in range(2)]
        return [
            Left(ended.get(number), node.poll() if number in ended else None, said[number])
            for number, node in enumerate(nodes)
        ]


def _start(
    node: int, name: str, folder: Path, launcher: str, timeout_seconds: float
) -> subprocess.Popen[bytes]:
    """The process of one node: torchrun with a worker, or the worker by itself."""
    train = [
        "-m", "pentameter", "train", str(Path(__file__).with_name("two_nodes.toml")),
        "--run-dir", str(folder / "run"), f"--parallel.timeout-seconds={timeout_seconds:g}",
    ]  # fmt: skip
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        "GLOO_SOCKET_IFNAME": "eth0",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    if launcher == "torchrun":
        train = [
            "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", PORT, *train,
        ]  # fmt: skip
    else:
        environment |= {
            "RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT,
        }  # fmt: skip
    with (folder / f"stderr-{node}").open("wb") as stderr:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *train],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )


def _wait_for_steps(metrics: Path, nodes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (metrics.exists() and '"step": 20,' in metrics.read_text()):
        assert all(node.poll() is None for node in nodes), "a node did not begin to train"
        assert time.monotonic() < deadline, "the nodes do not train"
        time.sleep(0.05)


if __name__ == "__main__":
    reason = reason_not_to()
    if reason is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as scratch:
        sides = cut_while_training(Path(scratch), (*sys.argv[1:], "torchrun")[0], 15.0)
    for number, side in enumerate(sides):
        when = "never" if side.seconds is None else f"after {side.seconds:.1f} s"
        print(f"node {number} left {when} with exit code {side.code}:\n{side.said[-2500:]}")
