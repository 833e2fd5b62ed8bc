"""The records of NCCL's collectives that ranks leave when a collective is not done in time.

On a GPU nobody waits for a collective in Python: `wait` lets the device wait, and the host goes on.
PyTorch's watchdog, a thread, sees that a collective takes too long, and ends the process by SIGABRT
before Python learns of it. But first it tells all ranks, through the store, to write what PyTorch's
flight recorder remembers: the last collectives, each with its state, its process group and the
stack that called it. So a rank whose record has a collective that is not done waits for another
one. The one that hangs has none; or it has one in another group, as it had gone ahead of its
device: then the collective for which others wait is not in its record.

The state of a batch of messages is in the entry `nccl:coalesced` behind them alone. Their own
entries stay `scheduled`.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pentameter.processes.failures.activity import read_activity
from pentameter.processes.failures.failure import unanswered, went_away
from pentameter.processes.failures.waiting import MODULES, Wait, calls_in_words, first_wait

_PREFIX = "flight-"  # the recorder appends the rank

DUMP_SECONDS = 1.0
"""Longest time that a rank may take to write its record. The watchdog ends the process after four
times as long."""

_COLLECTIVE = re.compile(
    "(all_?gather|all_?reduce|all_?to_?all|barrier|broadcast|gather|reduce_?scatter|reduce|scatter)"
)
_BATCH = "nccl:coalesced"
_HYPHENATED = {"allgather": "all-gather", "allreduce": "all-reduce", "alltoall": "all-to-all"}
_NO_DIMENSION = ("", "default_pg", "undefined")  # PyTorch's descriptions of groups without one
_BACKWARD = {"_engine_run_backward", "backward", "pre_backward", "post_backward"}


@dataclass(frozen=True)
class FlightRecord:
    """The record of one rank by NCCL's flight recorder in PyTorch: the first collective that is not
    done (None if all are), and the timeout of collectives."""

    wait: Wait | None = None
    timeout_seconds: float = 0.0
    group: str = ""
    """The name of that collective's process group."""
    number: int = 0
    """Number of collectives that group had begun with it; 0 for messages, which not all count."""
    begun: Mapping[str, int] = field(default_factory=dict)
    """Number that each group had begun when the record ends, by the groups' names."""
    end: int = 0
    """Time at which the last of them was begun, in nanoseconds since the epoch."""

    def is_waited_for(self, rank: int, other: FlightRecord) -> bool:
        """Return whether the rank of `other` waits for a collective that `rank`, whose record this
        is, has not begun."""
        assert other.wait is not None
        is_member = not other.wait.ranks or rank in other.wait.ranks
        return is_member and self.begun.get(other.group, 0) < other.number


def recorder_variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make PyTorch write each rank's record of NCCL collectives
    to the launch folder when a collective times out. Variables that `environ` already sets are the
    user's, and are left out."""
    ours = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / _PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": f"{1000 * DUMP_SECONDS:.0f}",
    }
    return {name: value for name, value in ours.items() if name not in environ}


def record_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in the launch folder to which PyTorch writes the record of
    `rank`."""
    return folder / f"{_PREFIX}{rank}"


def read_flight_record(folder: Path, rank: int) -> FlightRecord | None:
    """Return the record of NCCL collectives that PyTorch wrote for `rank` in the launch folder.
    Return None if there is none, if it is incomplete, or if its format is unknown."""
    with (
        suppress(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError),
        suppress(pickle.UnpicklingError),
        record_path(folder, rank).open("rb") as file,
    ):
        recorded = _PlainUnpickler(file).load()
        entries = sorted(recorded["entries"], key=lambda entry: entry["record_id"])
        batches = {_turn(each): each for each in entries if each["profiling_name"] == _BATCH}
        begun = {_turn(each)[0]: _turn(each)[1] for each in entries}
        end = max((each["time_created_ns"] for each in entries), default=0)
        for entry in entries:
            shown = batches.get(_turn(entry), entry)
            if not shown["retired"] and shown["state"] != "completed":
                timeout = entry["timeout_ms"] / 1000
                wait = _wait(entry, recorded["pg_config"])
                waited = os.fstat(file.fileno()).st_mtime - wait.seconds
                wait = replace(wait, timed_out=waited > timeout)
                group, number, _ = _turn(entry)
                number = 0 if entry["is_p2p"] else number
                return FlightRecord(wait, timeout, group, number, begun, end)
        return FlightRecord(begun=begun, end=end)
    return None


def waits_on_nccl(folder: Path, ranks: Iterable[int]) -> dict[int, Wait]:
    """Return rank → the NCCL collective in which it waits, for those of `ranks` that wait in one by
    their records in the launch folder. If all do, that one is left out whose record ends first
    among those for which others wait."""
    found = {rank: read_flight_record(folder, rank) for rank in ranks}
    records = {rank: record for rank, record in found.items() if record and record.wait}
    if len(records) == len(found):
        late = [
            rank
            for rank, own in records.items()
            if any(own.is_waited_for(rank, other) for other in records.values())
        ]
        if late:
            del records[min(late, key=lambda rank: records[rank].end)]
    return {rank: record.wait for rank, record in records.items() if record.wait}


def told_by_records(folder: Path, world_size: int, hanging: Sequence[int]) -> str | None:
    """Return a sentence that names the ranks for which others wait in an NCCL collective, by the
    records in the launch folder; None if no rank waits in one.

    hanging: ranks that were seen to hang, which are then named. If it is empty, those are named
        that belong to the group of the earliest unfinished collective and do not wait in one
        themselves.
    """
    waits = waits_on_nccl(folder, range(world_size))
    absent = hanging or [rank for rank in range(world_size) if rank not in waits]
    first = first_wait(list(waits.values()), absent)
    if first is None:
        return None
    rank = next(rank for rank, wait in waits.items() if wait is first)
    if not hanging and first.ranks:
        absent = [rank for rank in first.ranks if rank not in waits]
    doing = str(read_activity(folder, rank))
    if not any(wait.timed_out for wait in waits.values()):
        return went_away(absent, waits, doing)
    record = read_flight_record(folder, rank)
    return unanswered(absent, waits, record.timeout_seconds if record else 0.0, doing)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for files that PyTorch has written, of dictionaries, lists, strings and numbers
    only. It refuses to import anything, so that no file can have it run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise UnpicklingError, whatever class or function a file names."""
        raise pickle.UnpicklingError(f"{module}.{name} in a flight record")


def _turn(entry: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the name of an entry's process group, and how many collectives and messages that had
    begun with it: the same numbers for all of one batch."""
    return entry["process_group"][0], entry["collective_seq_id"], entry["p2p_seq_id"]


def _wait(entry: Mapping[str, Any], groups: Mapping[str, Any]) -> Wait:
    """Return a Wait that describes the collective in `entry`, one item of a rank's record. groups:
    process group's name → its description and ranks."""
    name, dimension = entry["process_group"]
    along = "" if dimension in _NO_DIMENSION else dimension.removeprefix("mesh_")
    of_all = dimension == "default_pg" or name not in groups
    ranks = [] if of_all else [int(rank) for rank in re.findall(r"\d+", groups[name]["ranks"])]
    # The frames of autograd's own threads do not reach down to the call of the backward pass.
    calls = [(each["filename"], each["line"], each["name"]) for each in entry.get("frames", ())]
    during, where, stack = "", "", ""
    if calls:
        where, stack = calls_in_words(calls)
        if _BACKWARD & {function for _, _, function in calls}:
            during = "backward pass"
        elif any(path.endswith(MODULES) for path, _, _ in calls):
            during = "forward pass"
    seconds = entry["time_created_ns"] / 1e9
    collective = _in_words(entry["profiling_name"], is_message=entry["is_p2p"])
    return Wait(collective, along, ranks, "", during, where, seconds, stack)


def _in_words(name: str, *, is_message: bool) -> str:
    """Return a collective's name for people: `all-gather` for `nccl:_all_gather_base`. `is_message`
    says that it is a send or receive between two ranks."""
    found = None if is_message else _COLLECTIVE.search(name)
    if found is None:
        return "messages" if is_message or re.search("send|recv", name) else "collective"
    return _HYPHENATED.get(found[0], found[0].replace("_", "-"))
