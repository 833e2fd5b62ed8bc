"""The rendezvous of a run's processes: one store for all of them, and who of them came.

torchrun keeps its agent's store over restarts, so a process that is started again finds there what
the dead attempt has left: gloo would connect to its addresses and wait for minutes. No count in the
environment tells attempts apart either (each agent counts the restarts of its own node). So the
processes first agree, through the store, on a name for this rendezvous that no earlier one had, and
all that follows lies below that name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from pentameter.errors import ConfigError
from pentameter.processes.failure import LostProcessError, lost_process
from pentameter.processes.place import Place

if TYPE_CHECKING:
    from torch.distributed import Store

RENDEZVOUS_SECONDS = 300.0
"""Longest wait for processes that were started together to come; imports may take minutes where a
thousand of them read the same disk."""

SAY_AFTER_SECONDS = 15.0
"""Wait after which rank 0 says whom it waits for."""

_POLL_SECONDS = (0.001, 0.05)  # from the first look to the later ones
_MOST_RANKS_NAMED = 8


def open_store(place: Place, timeout_seconds: float = RENDEZVOUS_SECONDS) -> Store:
    """The store of this rendezvous, once every process of `place`'s world has come.

    Raises LostProcessError, naming the ranks, where some have not come within `timeout_seconds`,
    and ConfigError where the port is in use.
    """
    import torch.distributed as dist

    if place.world_size == 1:
        return dist.HashStore()
    where = _address(place)
    deadline = time.monotonic() + timeout_seconds
    try:
        store = _reach(place, where, timeout_seconds)
        name = _agree(store, place, where, deadline)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"the port of {where} is in use on this machine; set MASTER_PORT to another"
            ) from error
        if lost_process(error) is None:
            raise
        raise _did_not_come(place, where, timeout_seconds, None) from error
    return dist.PrefixStore(f"pentameter/{name}", store)


def _address(place: Place) -> str:
    """The address of the rendezvous, as messages call it."""
    if place.init_method != "env://":
        return place.init_method
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


def absent_ranks(store: Store, rank: int, world_size: int, timeout_seconds: float) -> list[int]:
    """Ranks that do not say within `timeout_seconds` that they, too, miss another process.

    Every process that lost another one calls this; those that do not are dead, or hang. Empty
    where the store itself is gone.
    """
    deadline = time.monotonic() + timeout_seconds
    absent = [other for other in range(world_size) if other != rank]
    with suppress(RuntimeError):
        store.set(f"misses-another/{rank}", "1")
        while absent and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS[1])
            absent = [other for other in absent if not store.check([f"misses-another/{other}"])]
        return absent
    return []


def spelled(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5`, a few of many."""
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    if len(ranks) > _MOST_RANKS_NAMED:
        shown = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
        return f"ranks {shown} and {len(ranks) - _MOST_RANKS_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _reach(place: Place, where: str, timeout_seconds: float) -> Store:
    """The store that the launcher, or rank 0, keeps for all; it may hold an earlier attempt's keys.

    It is made here, not by `init_process_group`, so that waiting for the others can name them.
    """
    import torch.distributed as dist

    if place.init_method.startswith("file://"):
        # Not by a URL, where a ? or # in the path would end it.
        return dist.FileStore(place.init_method.removeprefix("file://"), place.world_size)
    if place.init_method == "env://":
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    else:
        host, _, port = place.init_method.removeprefix("tcp://").rpartition(":")
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        host.strip("[]"),
        int(port),
        is_master=place.rank == 0 and not kept_by_agent,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
    )


def _agree(store: Store, place: Place, where: str, deadline: float) -> str:
    """A name that the processes of this attempt, all of them and no others, have agreed on.

    Each writes a word of its own below its rank. Rank 0 proposes the words it finds, until every
    process has answered that its own, and not a dead one's, is among them.
    """
    come = _propose if place.rank == 0 else _answer
    mine = uuid.uuid4().hex
    store.set(f"came/{place.rank}", mine)
    start, pause = time.monotonic(), _POLL_SECONDS[0]
    has_said = False
    while True:
        name, missing = come(store, place, mine)
        if name is not None:
            return name
        now = time.monotonic()
        if now > deadline:
            raise _did_not_come(place, where, now - start, missing)
        if place.rank == 0 and now > start + SAY_AFTER_SECONDS and not has_said:
            has_said = True
            who = f"{spelled(missing)} of {place.world_size}"
            print(f"pentameter: waiting for {who} to come to {where}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS[1])


def _propose(store: Store, place: Place, mine: str) -> tuple[str | None, list[int]]:
    """One turn of rank 0: the name once all have agreed to it, or the ranks that have not."""
    others = range(1, place.world_size)
    read = _reader(store)
    words = [mine, *(read(f"came/{rank}") for rank in others)]
    absent = [rank for rank in others if not words[rank]]
    if absent:
        return None, absent
    proposal = json.dumps(words)
    if read("proposal") != proposal:
        store.set("proposal", proposal)
    name = _name(proposal)
    missing = [rank for rank in others if read(f"agreed/{rank}") != name]
    if missing:
        return None, missing
    store.set(f"begun/{name}", "1")
    return name, []


def _answer(store: Store, place: Place, mine: str) -> tuple[str | None, list[int]]:
    """One turn of another rank: the name once rank 0 says that all agree."""
    read = _reader(store)
    proposal = read("proposal")
    words = json.loads(proposal) if proposal else []
    # An attempt before may have had another size.
    if len(words) != place.world_size or words[place.rank] != mine:
        return None, [0]
    name = _name(proposal)
    if read(f"agreed/{place.rank}") != name:
        store.set(f"agreed/{place.rank}", name)
    return (name, []) if store.check([f"begun/{name}"]) else (None, [0])


def _reader(store: Store) -> Callable[[str], str]:
    """A function that reads a key without waiting for it; the empty string where it is not set."""
    return lambda key: store.get(key).decode() if store.check([key]) else ""


def _name(proposal: str) -> str:
    return hashlib.sha256(proposal.encode()).hexdigest()[:16]


def _did_not_come(
    place: Place, where: str, seconds: float, missing: list[int] | None
) -> LostProcessError:
    which = f" ({spelled(missing)})" if missing and place.rank == 0 else ""
    return LostProcessError(
        f"not all of the {place.world_size} processes that {place.source} names came to {where} "
        f"within {seconds:.3g} s{which}; look for the message of one that did not"
    )
