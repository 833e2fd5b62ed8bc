"""Nodes on one machine: network namespaces, each joined by a veth pair to a bridge in another.

Nothing but iproute2 and the right to make namespaces is needed. Loss is a classic BPF program for
the packets that leave an end of a link, as few kernels lack that and some lack netem.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOBODY = "02:00:00:00:00:99"
"""An Ethernet address that no node has."""

RELAY = Path(__file__).with_name("relay.py")

_RANDOM = 4294963256  # SKF_AD_OFF + SKF_AD_RANDOM: a load of 32 random bits
_DROP, _PASS = 2, 4294967295  # TC_ACT_SHOT, TC_ACT_UNSPEC


class Network:
    """`n` nodes in namespaces that reach each other and nothing else. Node i has the address
    `addresses[i]` on its interface `eth0`; its link's other end is `port{i}` of the switch."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.addresses = [f"10.77.0.{node + 1}" for node in range(n)]
        self._prefix = f"pentameter-{os.getpid()}-{id(self) % 10_000}"
        self.switch = f"{self._prefix}-switch"
        self._relay: subprocess.Popen[bytes] | None = None

    def name(self, node: int) -> str:
        """The node's namespace."""
        return f"{self._prefix}-{node}"

    def make(self) -> None:
        """Make all namespaces and links. Raises CalledProcessError without the right to."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for node in range(self.n):
            name = self.name(node)
            ip("netns", "add", name)
            end = ("peer", "name", f"port{node}", "netns", self.switch)
            ip("-n", name, "link", "add", "eth0", "type", "veth", *end)
            ip("-n", self.switch, "link", "set", f"port{node}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Kill what runs in the namespaces, and remove them; their devices go with them."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for node in range(self.n):
            self.kill_all(node)
        for name in (self.switch, *map(self.name, range(self.n))):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def pids(self, node: int) -> list[int]:
        """Processes that run on the node."""
        try:
            return [int(pid) for pid in ip("netns", "pids", self.name(node)).split()]
        except subprocess.CalledProcessError:
            return []

    def kill_all(self, node: int, seconds: float = 5.0) -> None:
        """Kill every process on the node, and wait until none is left."""
        deadline = time.monotonic() + seconds
        while (pids := self.pids(node)) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    # -- faults of links, each until `heal` ----------------------------------------------------

    def cut(self, node: int) -> None:
        """Let nothing through to the node or from it, and tell nobody."""
        ip("-n", self.switch, "link", "set", f"port{node}", "down")

    def cut_one_way(self, node: int) -> None:
        """Lose all that the node sends; what others send it arrives."""
        for other in range(self.n):
            if other != node:
                address = self.addresses[other]
                to = ("lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
                ip("-n", self.name(node), "neigh", "replace", address, *to)

    def lose(self, node: int, fraction: float) -> None:
        """Lose this fraction of the packets on the node's link, in each direction."""
        limit = int((1 - fraction) * 0xFFFFFFFF)
        program = f"4,32 0 0 {_RANDOM},37 1 0 {limit},6 0 0 {_PASS},6 0 0 {_DROP}"
        for name, device in self._ends(node):
            _tc(name, "qdisc", "add", "dev", device, "clsact")
            _tc(name, "filter", "add", "dev", device, "egress", "bpf", "da", "bytecode", program)

    def slow_down(self, node: int, rate: str) -> None:
        """Let at most `rate` (`1mbit`) through the node's link, in each direction."""
        for name, device in self._ends(node):
            limits = ("rate", rate, "burst", "16kb", "latency", "400ms")
            _tc(name, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def delay(self, node: int, seconds: float) -> None:
        """Let everything on the node's link arrive so much later, in each direction."""
        ends = ("detour0", "type", "veth", "peer", "name", "detour1")
        ip("-n", self.switch, "link", "add", *ends)
        devices = [(self.name(each), "eth0") for each in range(self.n)]
        for name, device in [*devices, (self.switch, "detour0"), (self.switch, "detour1")]:
            _run("ip", "netns", "exec", name, sys.executable, str(RELAY), "whole", device)
        for device in ("detour0", "detour1"):
            ip("-n", self.switch, "link", "set", device, "up")
        inside = ["ip", "netns", "exec", self.switch, sys.executable, str(RELAY)]
        self._relay = subprocess.Popen([*inside, f"port{node}", "detour0", str(seconds)])
        time.sleep(1.0)  # it starts: the link is not to be cut meanwhile
        ip("-n", self.switch, "link", "set", f"port{node}", "nomaster")
        ip("-n", self.switch, "link", "set", "detour1", "master", "bridge")

    def heal(self, node: int) -> None:
        """Make the node's link whole again."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            self._relay = None
            ip("-n", self.switch, "link", "delete", "detour0")
            ip("-n", self.switch, "link", "set", f"port{node}", "master", "bridge")
        ip("-n", self.switch, "link", "set", f"port{node}", "up")
        for other in range(self.n):
            if other != node:
                with suppress(subprocess.CalledProcessError):
                    ip("-n", self.name(node), "neigh", "del", self.addresses[other], "dev", "eth0")
        for name, device in self._ends(node):
            for kind in ("clsact", "root"):
                with suppress(subprocess.CalledProcessError):
                    _tc(name, "qdisc", "del", "dev", device, kind)

    def move(self, node: int, address: str) -> None:
        """Give the node another address."""
        ip("-n", self.name(node), "address", "flush", "dev", "eth0")
        ip("-n", self.name(node), "address", "add", f"{address}/24", "dev", "eth0")
        self.addresses[node] = address

    def _ends(self, node: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.name(node), "eth0"), (self.switch, f"port{node}")


@contextmanager
def network(n: int) -> Iterator[Network]:
    """A Network of `n` nodes, removed with all that runs in it."""
    made = Network(n)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def reason_not_to() -> str | None:
    """Why this machine cannot make such a network; None where it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "`ip` or `tc` is not installed (iproute2)"
    try:
        with network(2) as made:
            made.lose(0, 0.5)
            made.slow_down(1, "1mbit")
            return None
    except subprocess.CalledProcessError as error:
        return f"no right to make network namespaces: {error.stderr.strip()}"


def ip(*arguments: str) -> str:
    """Run `ip` with these arguments, and return what it prints."""
    return _run("ip", *arguments)


def _tc(name: str, *arguments: str) -> str:
    return _run("ip", "netns", "exec", name, "tc", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout
