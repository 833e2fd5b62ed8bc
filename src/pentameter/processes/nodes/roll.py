"""The roll of a run's nodes: which machines are there, and which of them reach each other.

All nodes share the run folder, so that is where they meet, and no node keeps anything for the
others: any may be lost. Each launcher keeps one file in RUN/nodes, rewritten twice a second, and
answers pings over UDP. A node whose file no longer changes is gone; two nodes without an answer
between them, in either direction, cannot train together. Files are compared with what they held,
never by their times, and clocks of different machines play no part.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pentameter.disk.atomic import make_folder
from pentameter.disk.beat import Beat
from pentameter.disk.held_folder import HeldFolder
from pentameter.disk.record import read_record, write_record
from pentameter.errors import ConfigError, StorageError
from pentameter.machine.address import bind

BEAT_SECONDS = 0.5
PING_SECONDS = 0.25

GONE_SECONDS = 4.0
"""A node is gone after so many seconds without a change in its file's counter (its beat), and out
of reach after as many without an answer to a ping. A link that loses a fifth of all messages loses
sixteen pings in a row once in 10⁷ times."""

FORGOTTEN_SECONDS = 600.0
"""Seconds without a new beat after which a node's file is removed."""


@dataclass(frozen=True)
class Node:
    """A machine that takes part in a run, as its launcher describes it in a file for the other
    nodes."""

    name: str
    """A random name, new for each start of a launcher. Only who can read the run folder knows
    it."""
    host: str
    address: str
    ping_port: int
    """UDP port at which it answers pings."""
    store_port: int
    """TCP port at which rank 0 keeps the store, if it is on this node."""
    n_processes: int
    attempt: int = 0
    """Number of the latest attempt in which it took part."""
    state: str = "idle"
    """`idle`; `running` its processes; or how they ended: `done`, `lost`, `failed`, `stopped`; or
    `leaving` after a stop signal."""
    message: str = ""
    """Reason of `failed` and `lost`, for people."""
    exit_code: int = 0
    reaches: tuple[str, ...] = ()
    """Names of the nodes that answer its pings."""
    refused_by: tuple[str, ...] = ()
    """Names of the nodes whose machine refuses pings: it is there, but no launcher on it any
    more."""
    beat: int = 0


class Roll:
    """The list of the nodes (machines) of a run, kept as one file for each node in `folder`, inside
    the run folder. From construction to `close` this node is on it: a thread writes this node's
    file, reads the others', and sends and answers pings over UDP.

    A node is gone only when it is silent for GONE_SECONDS or its launcher has removed its file; a
    file that cannot be read or written for a moment changes nothing.
    """

    def __init__(self, folder: Path, address: str, n_processes: int) -> None:
        """Write this node's file, read the other nodes' files, and start the thread that keeps both
        up to date.

        folder: the folder of the nodes' files, inside the run folder.
        address: this machine's network address, at which the other nodes reach it.
        n_processes: number of processes that this node can run.

        Raises StorageError if the folder cannot be written, ConfigError if `address` is not one of
        this machine's addresses.
        """
        self._folder = folder
        make_folder(folder)
        self._held = HeldFolder.at(folder.parent)
        self._answering = _udp_socket(address)
        # While it is open, the system gives its port to nobody but a process of ours that listens
        # there: not to an outgoing connection, either.
        self._store = bind(address, 0)
        self._me = Node(
            name=uuid.uuid4().hex,
            host=socket.gethostname(),
            address=address,
            ping_port=self._answering.getsockname()[1],
            store_port=self._store.getsockname()[1],
            n_processes=n_processes,
        )
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[Node, float, bool]] = {}  # node, when its beat changed, was it?
        self._pings: dict[str, _Ping] = {}
        self._listened_at = time.monotonic()  # when the thread's latest turn began
        self._next_beat = self._next_ping = 0.0
        self._write()
        self._read_others()
        self._beat = Beat(self._turn, 0.0)

    @property
    def me(self) -> Node:
        """This node."""
        return self._me

    def update(self, **changes: object) -> None:
        """Change fields of this node, and write its file at once. If that fails, the thread's next
        turn tries again; if it keeps failing, the others take this node for gone."""
        with self._lock:
            self._me = replace(self._me, **changes)  # type: ignore[arg-type]
            with contextlib.suppress(StorageError):
                self._write()

    def check_folder(self) -> None:
        """Raise StorageError unless the run folder is still the one that was there at first."""
        self._held.check(self._path(self._me.name).exists)

    def renew_store_port(self) -> None:
        """Choose another port for the next attempt's store: processes of the last one may still
        hold the old port."""
        self._store.close()
        self._store = bind(self._me.address, 0)
        self.update(store_port=self._store.getsockname()[1])

    def present(self) -> dict[str, Node]:
        """Return the nodes that are there, by name, this one included. The counter in a node's file
        (its beat) has then changed within GONE_SECONDS, and no other node's ping to it was
        refused."""
        now = self._heard_until()
        with self._lock:
            there = {
                name: node
                for name, (node, changed, is_beating) in self._seen.items()
                if is_beating and now < changed + GONE_SECONDS
            }
            there[self._me.name] = self._me
        refused = {name for node in there.values() for name in node.refused_by}
        return {name: node for name, node in sorted(there.items()) if name not in refused}

    def silent_hosts(self) -> set[str]:
        """Return the host names of nodes that have a file and do not answer, but may still be
        training: no machine has said that the launcher is gone, so it may be frozen."""
        present = self.present()
        with self._lock:
            silent = [node for node, _, _ in self._seen.values() if node.name not in present]
        refused = {name for name, ping in self._pings.copy().items() if ping.is_refused}
        return {node.host for node in silent if node.name not in refused}

    def knows_all(self) -> bool:
        """Return True if it is known of every other node's file whether a living node writes it. It
        takes this node some seconds after its start to find out."""
        now = self._heard_until()
        with self._lock:
            return all(
                is_beating or now > changed + GONE_SECONDS
                for _, changed, is_beating in self._seen.values()
            )

    def close(self) -> None:
        """Leave the roll: end the thread, and remove this node's file."""
        self._beat.close(2 * GONE_SECONDS)
        self._remove_files_of(self._me.name)
        self._answering.close()
        self._store.close()
        for ping in self._pings.values():
            ping.close()

    def _remove_files_of(self, name: str) -> None:
        """Remove the file of the node `name`, and temporary files that it was writing when it was
        killed."""
        with contextlib.suppress(OSError):
            for path in (self._path(name), *self._folder.glob(f"{name}.json.tmp-*")):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write(self) -> None:
        self.check_folder()
        write_record(self._path(self._me.name), self._me)

    def _heard_until(self) -> float:
        """Return the monotonic time until which this node has certainly listened to the others. If
        it was frozen since then, their silence means nothing."""
        return min(time.monotonic(), self._listened_at + BEAT_SECONDS)

    def _pass_over_own_silence(self, now: float) -> None:
        """If this node's thread did not run for a while before `now` (monotonic seconds), do not
        count that time as silence of the other nodes."""
        if (seconds := now - self._heard_until()) > 0:
            with self._lock:
                for name, (node, changed, is_beating) in self._seen.items():
                    self._seen[name] = node, changed + seconds, is_beating
            for ping in self._pings.values():
                ping.answered_at += seconds
        self._listened_at = now

    def _turn(self) -> None:
        now = time.monotonic()
        self._pass_over_own_silence(now)
        if now >= self._next_ping:
            self._next_ping = now + PING_SECONDS
            for ping in list(self._pings.values()):
                ping.send()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._read_others()
            self._pass_over_own_silence(time.monotonic())  # a disk may have hung
            reaches = sorted(name for name, each in self._pings.items() if each.is_answered())
            refused = sorted(name for name, each in self._pings.items() if each.is_refused)
            self.update(beat=self._me.beat + 1, reaches=tuple(reaches), refused_by=tuple(refused))
        self._receive(min(self._next_beat, self._next_ping) - time.monotonic())

    def _receive(self, seconds: float) -> None:
        """Answer other nodes' pings, and record their answers to this node's, for at most
        `seconds`."""
        sockets = {each.socket: each for each in self._pings.values()}
        ready, _, _ = select.select([self._answering, *sockets], [], [], max(0.0, seconds))
        for each in ready:
            if each is not self._answering:
                sockets[each].take()
                continue
            with contextlib.suppress(OSError):
                asked, sender = self._answering.recvfrom(64)
                if asked == self._me.name.encode():
                    self._answering.sendto(asked, sender)

    def _read_others(self) -> None:
        now = time.monotonic()
        try:
            names = {path.stem for path in self._folder.glob("*.json")} - {self._me.name, ATTEMPT}
        except OSError:
            return
        read = {name: read_record(self._path(name), Node) for name in names}
        found = {name: each for name, each in read.items() if each and each.name == name}
        is_there = os.path.lexists(self._path(self._me.name))
        with self._lock:
            for name, node in found.items():
                before = self._seen.get(name)
                if before is None:  # perhaps left by a dead one
                    self._seen[name] = node, now, False
                elif before[0] != node:
                    self._seen[name] = node, now, True
            for name, (_, changed, _) in list(self._seen.items()):
                # Else all of the folder may be away.
                has_left = is_there and _is_removed(self._path(name))
                if has_left or now > changed + FORGOTTEN_SECONDS:
                    del self._seen[name]
                    self._remove_files_of(name)
            seen = {name: node for name, (node, _, _) in self._seen.items()}
        for name in self._pings.keys() - seen.keys():
            self._pings.pop(name).close()
        for name in seen.keys() - self._pings.keys():
            # No route, no address.
            with contextlib.suppress(OSError, TypeError, ValueError, OverflowError):
                self._pings[name] = _Ping(self._me.address, seen[name])


class _Ping:
    """A UDP socket that pings one other node from this machine's `address`, with the time of its
    last answer."""

    def __init__(self, address: str, node: Node) -> None:
        self.socket = _udp_socket(address)
        self.socket.connect((node.address, node.ping_port))  # so that a refusal is told
        self._name = node.name.encode()
        self.answered_at = -GONE_SECONDS
        """Time at which it answered last, in monotonic seconds of this node's listening."""
        self.is_refused = False

    def send(self) -> None:
        with self._told():
            self.socket.send(self._name)

    def take(self) -> None:
        with self._told():
            if self.socket.recv(64) == self._name:
                self.answered_at = time.monotonic()
                self.is_refused = False

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ConnectionRefusedError:
            self.is_refused = True
        except OSError:
            pass  # no route, a full buffer: as good as lost

    def is_answered(self) -> bool:
        return time.monotonic() < self.answered_at + GONE_SECONDS

    def close(self) -> None:
        self.socket.close()


ATTEMPT = "attempt"
"""Name of the file, beside the nodes', that says which nodes train together."""


def _is_removed(path: Path) -> bool:
    """Return True if a file is certainly not there."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def reachable_group(nodes: Mapping[str, Node]) -> list[Node]:
    """Return the nodes that can all reach each other, ordered by name. As long as some cannot, drop
    the node that fails to reach the most others; of several such, the one with the last name."""
    group = dict(nodes)
    while True:
        missed = dict.fromkeys(group, 0)
        for one, other in itertools.permutations(group.values(), 2):
            missed[one.name] += other.name not in one.reaches or one.name not in other.reaches
        if not any(missed.values()):
            return [group[name] for name in sorted(group)]
        del group[max(missed, key=lambda name: (missed[name], name))]


def _udp_socket(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    try:
        made.bind((address, 0))
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot use this machine's address {address}: {error}") from error
    return made


def names(nodes: Sequence[Node]) -> str:
    """Return nodes in words: `2 nodes, alpha (10.0.0.1) and beta (10.0.0.2)`."""
    each = [f"{node.host} ({node.address})" for node in nodes]
    listed = " and ".join([", ".join(each[:-1]), each[-1]] if len(each) > 1 else each)
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}, {listed}"
