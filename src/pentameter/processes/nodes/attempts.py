"""Attempts: which nodes train together next is chosen by one of them, from the files of all.

The node with the first name among those present decides, and the others follow what it writes to
the attempt's file. It keeps nothing: when it is lost, the next one decides by the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pentameter.disk.record import read_record, write_record
from pentameter.errors import TrainingFailedError
from pentameter.processes.nodes.roll import ATTEMPT, Node, names, reachable_group


@dataclass(frozen=True)
class Attempt:
    """The nodes that train together for a time, until one of them is lost, a new one comes or the
    run is complete. A frozen record, kept in a file in the run folder that all nodes read."""

    number: int = 0
    state: str = "over"
    """`running`; `stopping`, to save at the next boundary, since a node has come; `over`, to end at
    once, since one is lost or has stopped; `complete`; or `failed`."""
    members: tuple[str, ...] = ()
    """Names of the nodes, in the order of their ranks."""
    n_processes: tuple[int, ...] = ()
    """Number of processes on each member."""
    store: str = ""
    """HOST:PORT at which the processes meet: rank 0's node."""
    reason: str = ""
    """The reason that it is not running any more, for people."""
    exit_code: int = 0
    progress: str = ""
    """Newest checkpoint when it began."""
    n_lost: int = 0
    """Attempts in a row that were lost without a new checkpoint."""

    @property
    def is_final(self) -> bool:
        """True if no other attempt follows."""
        return self.state in ("complete", "failed")


@dataclass(frozen=True)
class Rules:
    """Bounds for a run on nodes: the fewest and the most that train together, and the number of
    attempts in a row that may be lost without a new checkpoint."""

    least: int
    most: int
    n_restarts: int


def read_attempt(folder: Path, before: Attempt | None = None) -> Attempt:
    """Return the attempt recorded in the nodes' folder. If it is missing or cannot be read at the
    moment, return `before`, the last one read; if that is None, a finished attempt numbered 0."""
    return read_record(folder / f"{ATTEMPT}.json", Attempt) or before or Attempt()


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Replace the attempt in the folder of nodes. Raises StorageError."""
    write_record(folder / f"{ATTEMPT}.json", attempt)


def next_attempt(
    now: Attempt, present: Mapping[str, Node], rules: Rules, *, settled: bool, progress: str
) -> Attempt:
    """Decide what follows the attempt `now`: return a new attempt, or `now` with another state, or
    `now` itself if nothing changes.

    present: the nodes that are alive, by name.
    rules: how many nodes must and may train together.
    settled: True if no node has come or gone for a moment, so that nodes started at the same time
        are all there.
    progress: name of the newest checkpoint.
    """
    if now.state in ("running", "stopping"):
        judged = _judged(now, present, rules, settled=settled)
        if judged is not now:
            return judged
    if now.state == "running" or _running(now, present):
        return now  # until all have ended what they have
    group = reachable_group(_willing(present))
    if len(group) < rules.least or not (settled or len(group) == rules.most):
        return now
    was_lost = now.state == "over" and now.exit_code != 0
    n_lost = now.n_lost + 1 if was_lost and progress == now.progress else int(was_lost)
    if n_lost > rules.n_restarts:
        after = f"lost {n_lost} times without a new checkpoint"
        return replace(now, state="failed", reason=f"{now.reason}; {after}")
    group = group[: rules.most]
    return Attempt(
        number=now.number + 1,
        state="running",
        members=tuple(node.name for node in group),
        n_processes=tuple(node.n_processes for node in group),
        store=f"{group[0].address}:{group[0].store_port}",
        progress=progress,
        n_lost=n_lost,
    )


def _judged(now: Attempt, present: Mapping[str, Node], rules: Rules, *, settled: bool) -> Attempt:
    """Return the attempt `now`, which runs or is stopping, with the state that it should have:
    "failed", "complete", "over" after a loss, "stopping" to take in a new node, or unchanged. The
    arguments are as for `next_attempt`."""
    members = [present[name] for name in now.members if name in present]
    ours = [node for node in members if node.attempt == now.number]
    for node in ours:
        if node.state == "failed":
            return replace(now, state="failed", reason=node.message, exit_code=node.exit_code)
    if ours and len(ours) == len(members) and all(node.state == "done" for node in ours):
        return replace(now, state="complete")
    if (reason := _loss(now, members)) is not None:
        codes = (node.exit_code for node in ours if node.state == "lost" and node.exit_code)
        code = next(codes, TrainingFailedError.exit_code)
        return replace(now, state="over", reason=reason, exit_code=code)
    if any(node.state in ("stopped", "leaving") for node in ours):
        return now if _running(now, present) else replace(now, state="over", reason="stopped")
    if now.state == "running" and settled and len(members) < rules.most:
        willing = reachable_group(_willing(present))
        newcomers = [node for node in willing if node.name not in now.members]
        if newcomers and {node.name for node in willing} >= set(now.members):
            return replace(now, state="stopping", reason=f"taking in {names(newcomers)}")
    return now


def _loss(now: Attempt, members: list[Node]) -> str | None:
    """Return a phrase that says which node the attempt `now` has lost; None if it has lost none.
    `members` are its nodes that are still alive."""
    for node in members:
        if node.attempt == now.number and node.state == "lost":
            return f"{node.host} ({node.address}): {node.message}"
        if node.attempt == now.number and node.state == "idle":
            return f"two nodes have decided at once, as {node.host} ({node.address}) saw"
    if len(members) < len(now.members):
        return f"{len(now.members) - len(members)} of {len(now.members)} nodes gone"
    group = reachable_group({node.name: node for node in members})
    apart = [node for node in members if node not in group]
    return f"out of reach: {names(apart)}" if apart else None


def _running(now: Attempt, present: Mapping[str, Node]) -> bool:
    """Return True if any node that is alive still runs processes of the attempt `now`."""
    return any(node.attempt == now.number and node.state == "running" for node in present.values())


def _willing(present: Mapping[str, Node]) -> dict[str, Node]:
    return {name: node for name, node in present.items() if node.state != "leaving"}
