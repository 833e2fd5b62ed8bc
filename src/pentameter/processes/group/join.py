"""Join the other processes of a run into a process group, and leave it.

Processes meet through one store (a key-value server, or a file, that all reach). torchrun keeps its
agent's store over restarts, so a restarted process finds the keys of the dead attempt in it: gloo
would connect to those addresses and wait for minutes. No count in the environment distinguishes
attempts either (each agent counts the restarts on its own node). So the processes first agree,
through the store, on a name for this rendezvous that no earlier one had. All later keys have that
name as their prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pentameter.disk.record import record_of
from pentameter.disk.retrying import growing
from pentameter.errors import ConfigError
from pentameter.machine.cores_and_memory import (
    chosen_threads,
    cpu_quota,
    fair_thread_count,
    usable_cores,
)
from pentameter.processes.failures.activity import Activity, activity_path
from pentameter.processes.failures.failure import (
    GOES_BACK,
    LostProcessError,
    lost_process,
    spelled,
    unanswered,
    went_away,
)
from pentameter.processes.failures.waiting import Wait, wait_behind
from pentameter.processes.group.rank import LAUNCH_FOLDER, LaunchedRank, find_rank
from pentameter.processes.group.world import World
from pentameter.processes.launch.worker import watch_agent

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from pentameter.config.schema import Config

T = TypeVar("T")

RENDEZVOUS_SECONDS = 300.0
"""Longest wait, in seconds, until all processes that were started together have arrived. Imports
may take minutes if a thousand processes read the same disk."""

SAY_AFTER_SECONDS = 15.0
"""Seconds of waiting after which rank 0 prints which ranks have not arrived."""

SETTLE_SECONDS = 0.05
"""Seconds that a process waits before it may end, for gloo's threads, which need some
microseconds."""

ANSWER_SECONDS = 1.0
"""Shortest timeout for a request to a store; a working store responds within milliseconds."""

_STORE_SECONDS = 30.0
"""Seconds without a response after which a store that many may be asking counts as cut off."""

_SPARE_POLL_SECONDS = 0.5  # the longest interval of those that wait for a whole run
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.001, 0.05  # the first interval, and the longest

_ENDED = "ended"

_OTHERS_SECONDS = {"gone": 1.0, "late": 3.0}
"""Seconds to wait for the other ranks to report a loss too, by the result of `lost_process`. Ranks
that receive from the lost one notice a closed connection at once, but a timeout only when their own
has passed."""


def lone_world() -> World:
    """Return a World with this process alone.

    Raises ConfigError if environment variables say that a launcher started others with it: each
    would train alone, and write to the same folder.
    """
    launched = find_rank()
    if launched is not None:
        raise ConfigError(
            f"{launched.source} has started {launched.world_size} processes, and this Trainer was "
            f"given "
            "no world: with joined_world(device, find_rank()) as world: Trainer(…, world=world) "
            "(docs/python-api.md)"
        )
    return World()


def joined_world_of(
    config: Config, launched: LaunchedRank | None, meeting: Meeting | None = None
) -> contextlib.AbstractContextManager[World]:
    """Return a context manager that joins the processes of a run and yields their World. It is
    `joined_world` with the configuration's device and timeout; if ZeRO shards parameters, it makes
    a process group even for one process.

    launched: this process's rank among those that train, and how they meet; None for one process.
    meeting: the meeting of these processes, and perhaps others, if they have met already; else
        None.

    Raises ConfigError for a device that this machine does not have.
    """
    from pentameter.machine.choices import choose_device

    return joined_world(
        choose_device(config.train.device).type,
        launched,
        always_group=config.parallel.zero > 0,
        timeout_seconds=config.parallel.timeout_seconds,
        meeting=meeting,
    )


@contextlib.contextmanager
def joined_world(
    device_type: str,
    launched: LaunchedRank | None = None,
    *,
    always_group: bool = False,
    timeout_seconds: float | None = None,
    meeting: Meeting | None = None,
) -> Iterator[World]:
    """Context manager: join the processes that `launched` describes, and yield their World (ranks,
    sizes and small collectives). Collective.

    Inside, torch.distributed's default process group exists. CPU tensors are sent over gloo, CUDA
    tensors over nccl, and each process uses its part of the machine's cores.

    Args:
        device_type: `cpu`, `cuda` or `mps`.
        launched: this process's rank and how the processes meet; None for one process.
        always_group: create a process group for a single process, too, as sharded and offloaded
            parameters need one.
        timeout_seconds: longest wait for another rank; None for the default of
            `parallel.timeout_seconds`.
        meeting: the one in which these processes, perhaps with others, have met; None to meet now.

    An exception leaves at once, without waiting for the others. The process group is then not
    destroyed, since that could wait for them. Raises LostProcessError, naming the ranks, if others
    went away, did not arrive, or did not respond in time.
    """
    n_processes = 1 if launched is None else launched.world_size
    if n_processes == 1 and not always_group:
        yield World()
        return
    import torch
    import torch.distributed as dist

    from pentameter.config.schema import ParallelConfig

    if timeout_seconds is None:
        timeout_seconds = ParallelConfig().timeout_seconds
    launched = launched or LaunchedRank(0, 1, 0, 1, "", "one process")
    store = (meeting or meet(launched, timeout_seconds)).store
    is_launched = LAUNCH_FOLDER in os.environ  # the launcher reads activities, and asks for stacks
    path = activity_path(Path(os.environ[LAUNCH_FOLDER]), launched.rank) if is_launched else None
    dump_stacks = launched.world_size > 1 and not is_launched
    activity = Activity(path, timeout_seconds, dump_stacks=dump_stacks)
    sizes = (launched.rank, launched.world_size, launched.local_rank, launched.local_size)
    world = World(*sizes, timeout_seconds, activity, store)
    try:
        if device_type == "cuda" and torch.cuda.device_count() > launched.local_rank:
            # The default device for nccl and allocations.
            torch.cuda.set_device(launched.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=launched.rank,
            world_size=launched.world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        if world.size > 1:
            set_threads(world)
        yield world
        world.barrier()  # rank 0 may hold the store that the others need to say goodbye
        # Gloo's threads still have to release the last tensors, and need the interpreter's lock
        # for it. A thread that still requests the lock when Python ends aborts the process
        # (https://github.com/pytorch/pytorch/pull/179291).
        time.sleep(SETTLE_SECONDS)
    except RuntimeError as error:
        lost = loss_behind(error, world)
        if lost is None:
            raise
        raise lost from error
    finally:
        activity.close()
        if world.size == 1 and dist.is_initialized():
            dist.destroy_process_group()
    if world.size > 1:
        dist.destroy_process_group()


def loss_behind(error: Exception, world: World) -> LostProcessError | None:
    """Return the LostProcessError to raise in place of `error` (from gloo, NCCL or a store), if
    that only means that another process in `world` is missing; its message names the missing ranks.
    Return None if this process itself failed.

    Call it before anything slow: the other ranks take a rank that does not call it within some
    seconds for the missing one.
    """
    how = lost_process(error) if isinstance(error, RuntimeError) else None
    if how is None or world.store is None:
        return None
    is_cut_off = False
    activity = world.activity
    own = None
    with contextlib.suppress(Exception):  # a detail of the message must not hide the loss
        own = wait_behind(error, activity.naming, time.monotonic() - activity.latest.since)
    if own is not None:
        own = replace(own, timed_out=how == "late")
    waits = {} if own is None else {world.rank: own}
    try:
        absent, others = absent_ranks(
            world.store, world.rank, world.size, _OTHERS_SECONDS[how], own
        )
        waits |= others
    except TimeoutError:
        is_cut_off = True
        first = world.rank - world.local_rank  # the store is remote; this machine works
        here = range(first, first + world.local_size)
        absent = [rank for rank in range(world.size) if rank not in here]
    said = unanswered(absent, waits, world.timeout_seconds, str(activity.latest))
    if is_cut_off and absent:
        said = (
            f"{said[:-1]}, and neither does the store{_address(world.store)}: the network to that "
            "machine is cut, or it is down."
        )
    elif how == "gone" and not any(wait.timed_out for wait in waits.values()):
        said = went_away(absent, waits, str(activity.latest))
    return LostProcessError(f"{said} {GOES_BACK.capitalize()}", own)


def local_device(device: torch.device, world: World) -> torch.device:
    """Return this rank's device. For `cuda` it is the GPU with this process's local rank, or GPU 0
    if a scheduler shows each process just its own; for `cpu`, and for one process, it is `device`
    itself. Collective.

    Raises ConfigError if this machine has fewer GPUs than processes, or several processes ask for
    MPS.
    """
    import torch

    if world.size == 1 or device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(
            f"train.device={device.type} is one device, and cannot be shared by {world.size} "
            "processes; set --train.device cpu, or run one process"
        )
    n_gpus = torch.cuda.device_count()
    index = world.local_rank if n_gpus >= world.local_size else 0
    gpus = world.all_gather(str(torch.cuda.get_device_properties(index).uuid))
    if 1 < n_gpus < world.local_size or len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"there are {world.local_size} processes in this machine and {n_gpus} "
            f"GPU{'s' if n_gpus > 1 else ''}: each process needs one. Start {n_gpus}, or set "
            "--train.device cpu"
        )
    return torch.device("cuda", index)


def set_threads(world: World) -> int:
    """Set the number of threads that torch uses per operation in this process, and return it: the
    user's OMP_NUM_THREADS, else this process's share of its cores. Collective."""
    import torch

    machine, mine = platform.node(), usable_cores()
    places = world.all_gather((machine, mine))
    n_threads = chosen_threads()
    if n_threads is None:
        here = [cores for name, cores in places if name == machine]
        n_threads = fair_thread_count(mine, here, cpu_quota())
    torch.set_num_threads(n_threads)
    return n_threads


# -- the rendezvous ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """Processes that have found each other through a key-value `store`; `launched` has this one's
    rank among them. If a layout cannot use all of them, the rest are spares: they wait until the
    others have ended, because torchrun and srun take a process that ends early for one whose work
    is done."""

    launched: LaunchedRank
    store: Store

    def tell(self, key: str, value: str) -> None:
        """Set `key` for all processes; `read` waits for it."""
        self.store.set(key, value)

    def read(self, key: str, timeout_seconds: float = RENDEZVOUS_SECONDS) -> str:
        """Wait until another process has set `key`, and return its value. Raises LostProcessError
        if none has within `timeout_seconds`, or if the store is gone."""
        deadline = time.monotonic() + timeout_seconds
        pauses = growing(_FIRST_POLL_SECONDS, longest=_SPARE_POLL_SECONDS)
        read = _reader(self.store)
        try:
            while not (value := _ask_store(lambda: read(key), time.monotonic() + _STORE_SECONDS)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no {key} within {timeout_seconds:g} s")
                time.sleep(next(pauses))
        except (RuntimeError, TimeoutError) as error:
            raise LostProcessError(
                f"rank 0, or the store{_address(self.store)}, is gone ({error or 'no answer'}); "
                "look for its message"
            ) from error
        return value

    def wait_as_spare(self) -> None:
        """Return once the ranks that train have ended well. Raises LostProcessError if the store is
        gone, which ends with the process that keeps it."""
        self.read(_ENDED, math.inf)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{_ENDED}/{self.launched.rank}", "1")

    def release_spares(self, n_training: int) -> None:
        """End the wait of the spares, which are the ranks from `n_training` on. Return once they
        have seen it, or after _STORE_SECONDS: this process may keep the store, and must not end
        before. Called on rank 0."""
        answers = [f"{_ENDED}/{rank}" for rank in range(n_training, self.launched.world_size)]
        self.store.set(_ENDED, "1")
        deadline = time.monotonic() + _STORE_SECONDS
        while answers and not self.store.check(answers) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def meet(launched: LaunchedRank, timeout_seconds: float) -> Meeting:
    """Wait until all processes of `launched` have arrived, at most RENDEZVOUS_SECONDS or
    `timeout_seconds`, and return their Meeting. Collective. Raises the errors of `open_store`:
    LostProcessError and ConfigError."""
    if launched.source == "torchrun":
        watch_agent()
    return Meeting(launched, open_store(launched, min(RENDEZVOUS_SECONDS, timeout_seconds)))


def open_store(launched: LaunchedRank, timeout_seconds: float) -> Store:
    """Open the store in which the processes of `launched` meet, wait until all have arrived, and
    return it. Its keys are separate from those of an earlier attempt. Collective.

    Raises LostProcessError, naming the ranks, if some have not arrived within `timeout_seconds`. If
    the port is in use, raises LostProcessError where the launchers of `--nodes` chose the port,
    else ConfigError.
    """
    import torch.distributed as dist

    if launched.world_size == 1:
        return dist.HashStore()
    where = launched.init_method
    if where == "env://":
        where = "MASTER_ADDR={MASTER_ADDR} MASTER_PORT={MASTER_PORT}".format(**os.environ)
    deadline = time.monotonic() + timeout_seconds
    try:
        store = _reach(launched, timeout_seconds)
        name = _agree(store, launched, where, deadline)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            taken = f"the port of {where} is in use on this machine"
            if launched.source == "--nodes":  # the next attempt has another
                raise LostProcessError(taken) from error
            raise ConfigError(f"{taken}; set MASTER_PORT to another") from error
        if lost_process(error) is None:
            raise
        raise _did_not_come(launched, where, timeout_seconds, None) from error
    return dist.PrefixStore(f"pentameter/{name}", store)


def absent_ranks(
    store: Store, rank: int, world_size: int, timeout_seconds: float, wait: Wait | None = None
) -> tuple[list[int], dict[int, Wait]]:
    """Tell the other ranks, through the store, that `rank` has lost a process, and wait up to
    `timeout_seconds` for them to tell the same. Those that do not are dead or hang. Every process
    that lost another one calls this.

    wait: where this rank waits, to be told to the others; None if that is not known.

    Return (absent ranks, reporting rank → where it waits, if known). Both are empty if the store
    itself is gone. Raises TimeoutError if the store does not respond: the network to it is cut.
    """
    others = [other for other in range(world_size) if other != rank]
    told = "1" if wait is None else wait.to_json()

    def silent() -> list[int]:
        return [other for other in others if not store.check([f"misses-another/{other}"])]

    deadline = time.monotonic() + timeout_seconds
    absent = others
    with contextlib.suppress(RuntimeError):
        _ask_store(lambda: store.set(f"misses-another/{rank}", told), deadline)
        while absent and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            absent = _ask_store(silent, deadline)
        heard = [other for other in others if other not in absent]
        read = _reader(store)
        texts = _ask_store(lambda: [read(f"misses-another/{each}") for each in heard], deadline)
        waits = {each: record_of(text, Wait) for each, text in zip(heard, texts, strict=True)}
        return absent, {each: wait for each, wait in waits.items() if wait is not None}
    return [], {}


def _ask_store(ask: Callable[[], T], deadline: float) -> T:
    """Call `ask`, a request to a store, in a thread, and return its result. Raises TimeoutError if
    there is none by `deadline`, in monotonic seconds, or ANSWER_SECONDS from now if that is later.

    A store's `check` and `set` have no timeout of their own. Over a cut link they wait as long as
    TCP retransmits, a quarter of an hour, and Python handles no signal meanwhile. The waiting
    thread is left behind, and ends with the process.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return answer.result(max(ANSWER_SECONDS, deadline - time.monotonic()))
    except TimeoutError:
        raise
    except BaseException:  # a signal: Python may end now, and abort if a thread leaves C++
        thread.join(ANSWER_SECONDS)
        raise


def _address(store: Store) -> str:
    """Return ` at HOST:PORT` for the server behind a store, to be put into a message; empty if the
    store has no server."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


def _reach(launched: LaunchedRank, timeout_seconds: float) -> Store:
    """Open the store at `launched.init_method`, a server or file that the launcher or rank 0 keeps
    for all. It may hold an earlier attempt's keys. This is done before `init_process_group`, so
    that an error while waiting can name the missing ranks."""
    import torch.distributed as dist

    if launched.init_method.startswith("file://"):
        # not by a URL, which a ? or # in the path would end
        return dist.FileStore(launched.init_method.removeprefix("file://"), launched.world_size)
    if launched.init_method == "env://":
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    else:
        host, _, port = launched.init_method.removeprefix("tcp://").rpartition(":")
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        host.strip("[]"),
        int(port),
        is_master=launched.rank == 0 and not kept_by_agent,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
    )


def _agree(store: Store, launched: LaunchedRank, where: str, deadline: float) -> str:
    """Wait until all processes of this attempt have arrived, and return a random name for their
    meeting, which no earlier attempt had. Collective. Raises LostProcessError after `deadline`, in
    monotonic seconds.

    Each rank writes a random token to the store. Rank 0 proposes the tokens that it finds there,
    until every rank has confirmed that its own token, and not a dead process's, is among them.
    """
    come = _propose if launched.rank == 0 else _confirm
    mine = uuid.uuid4().hex
    store.set(f"came/{launched.rank}", mine)
    start, pauses = time.monotonic(), growing(_FIRST_POLL_SECONDS, longest=_POLL_SECONDS)
    has_said = False
    while True:
        try:
            name, missing = _ask_store(lambda: come(store, launched, mine), deadline)
        except TimeoutError as error:
            raise _did_not_come(launched, where, time.monotonic() - start, None) from error
        if name is not None:
            return name
        now = time.monotonic()
        if now > deadline:
            raise _did_not_come(launched, where, now - start, missing)
        if launched.rank == 0 and now > start + SAY_AFTER_SECONDS and not has_said:
            has_said = True
            who = f"{spelled(missing)} of {launched.world_size}"
            print(f"pentameter: waiting for {who} to come to {where}", file=sys.stderr, flush=True)
        time.sleep(next(pauses))


def _propose(store: Store, launched: LaunchedRank, mine: str) -> tuple[str | None, list[int]]:
    """Make one attempt, on rank 0, at the agreement that `_agree` describes: propose the tokens
    found in the store, `mine` among them. Return (the meeting's name, []) once all ranks have
    confirmed, else (None, the ranks that have not arrived or confirmed)."""
    others = range(1, launched.world_size)
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


def _confirm(store: Store, launched: LaunchedRank, mine: str) -> tuple[str | None, list[int]]:
    """Make one attempt, on a rank other than 0, at the agreement that `_agree` describes: confirm a
    proposal that has this rank's token `mine`. Return (the meeting's name, []) once rank 0 says
    that all agree, else (None, [0]), as rank 0 is waited for."""
    read = _reader(store)
    proposal = read("proposal")
    words = json.loads(proposal) if proposal else []
    # An earlier attempt may have had another size.
    if len(words) != launched.world_size or words[launched.rank] != mine:
        return None, [0]
    name = _name(proposal)
    if read(f"agreed/{launched.rank}") != name:
        store.set(f"agreed/{launched.rank}", name)
    return (name, []) if store.check([f"begun/{name}"]) else (None, [0])


def _reader(store: Store) -> Callable[[str], str]:
    """Return a function that reads a key's value from the store as text, without waiting; empty if
    the key is not set."""
    return lambda key: store.get(key).decode() if store.check([key]) else ""


def _name(proposal: str) -> str:
    return hashlib.sha256(proposal.encode()).hexdigest()[:16]


def _did_not_come(
    launched: LaunchedRank, where: str, seconds: float, missing: list[int] | None
) -> LostProcessError:
    which = f" ({spelled(missing)})" if missing and launched.rank == 0 else ""
    return LostProcessError(
        f"not all of the {launched.world_size} processes that {launched.source} names came to "
        f"{where} within {seconds:.3g} s{which}; look for the message of one that did not"
    )
