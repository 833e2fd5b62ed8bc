"""Joining the other processes of a run, and leaving them."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.errors import ConfigError
from pentameter.machine.threads import chosen_threads, fair_share, usable_cores
from pentameter.processes.failure import LostProcessError, lost_process
from pentameter.processes.place import LAUNCH_FOLDER, Place, find_place
from pentameter.processes.progress import Progress, progress_path
from pentameter.processes.rendezvous import (
    RENDEZVOUS_SECONDS,
    absent_ranks,
    open_store,
    spelled,
)
from pentameter.processes.worker import watch_agent
from pentameter.processes.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

SETTLE_SECONDS = 0.05
"""Given to gloo's threads, which want some microseconds, before the process may end."""

_OTHERS_SECONDS = {"gone": 1.0, "late": 3.0}
"""Wait for the others to say that they, too, lost somebody. Those that were to hear from the lost
one next notice a closed connection at once, and each notices a timeout when its own has passed."""


def lone_world() -> World:
    """The World of a process by itself.

    Raises ConfigError where the environment says that others were started with it: each would
    train alone, and write to the same folder.
    """
    place = find_place()
    if place is not None:
        raise ConfigError(
            f"{place.source} has started {place.world_size} processes, and this Trainer was given "
            "no world: with joined_world(device, find_place()) as world: Trainer(…, world=world) "
            "(docs/python-api.md)"
        )
    return World()


@contextlib.contextmanager
def joined_world(
    device_type: str,
    place: Place | None = None,
    *,
    always_group: bool = False,
    timeout_seconds: float | None = None,
) -> Iterator[World]:
    """The World of the processes that meet at `place`, for as long as the block runs.

    Within it torch.distributed's default process group exists, CPU tensors travel over gloo and
    CUDA tensors over nccl, and each process computes with its share of the machine's cores (see
    `set_threads`). One process has nobody to meet: it gets `World()`, and a group of its own only
    where `always_group` asks for one, as sharded and offloaded parameters do.

    An exception leaves at once, without waiting for the others; the group is then left as it is,
    since ending it could wait for them. Raises LostProcessError, naming the ranks, where others
    went away, did not come, or did not answer within `timeout_seconds`, by default that of
    `parallel.timeout_seconds`.
    """
    if place is not None and place.source == "torchrun":
        watch_agent()
    n_processes = 1 if place is None else place.world_size
    if n_processes == 1 and not always_group:
        yield World()
        return
    import torch.distributed as dist

    from pentameter.config.schema import ParallelConfig

    if timeout_seconds is None:
        timeout_seconds = ParallelConfig().timeout_seconds
    place = place or Place(0, 1, 0, 1, "", "one process")
    store = open_store(place, min(RENDEZVOUS_SECONDS, timeout_seconds))
    progress = _progress(place, timeout_seconds)
    sizes = (place.rank, place.world_size, place.local_rank, place.local_size)
    world = World(*sizes, timeout_seconds, progress, store)
    try:
        _make_group(place, device_type, store, timeout_seconds)
        if world.size > 1:
            set_threads(world)
        yield world
        world.wait()  # rank 0 may hold what the others need to say goodbye
        # Gloo's threads have yet to let go of the last tensors, for which they need the lock of the
        # interpreter; one that still asks for it when Python ends aborts the process
        # (https://github.com/pytorch/pytorch/pull/179291).
        time.sleep(SETTLE_SECONDS)
    except RuntimeError as error:
        lost = loss_behind(error, world)
        if lost is None:
            raise
        raise lost from error
    finally:
        progress.close()
        if world.size == 1 and dist.is_initialized():
            dist.destroy_process_group()
    if world.size > 1:
        dist.destroy_process_group()


def loss_behind(error: Exception, world: World) -> LostProcessError | None:
    """The error to raise instead of `error`, which only says in the words of gloo, nccl or a store
    that another process of `world` is missing; None where it is this process's own failure.

    Tell the others first, and do what may take long afterwards: who does not tell is the one that
    is missed.
    """
    how = lost_process(error) if isinstance(error, RuntimeError) else None
    if how is None or world.store is None:
        return None
    absent = absent_ranks(world.store, world.rank, world.size, _OTHERS_SECONDS[how])
    return LostProcessError(_lost(how, absent, world))


def _progress(place: Place, timeout_seconds: float) -> Progress:
    """The Progress of this process: under `--nproc` the launcher reads it, and asks for stacks."""
    if place.source == "--nproc":
        path = progress_path(Path(os.environ[LAUNCH_FOLDER]), place.rank)
        return Progress(path, timeout_seconds)
    return Progress(None, timeout_seconds, dump_stacks=place.world_size > 1)


def _lost(how: str, absent: list[int], world: World) -> str:
    """The message of a LostProcessError: who was lost, and while this process was where.

    Several that do not tell need not all be lost: one that is may keep others from noticing.
    """
    where, back = world.progress.latest, "The same command goes back to the last checkpoint"
    who = spelled(absent) if len(absent) == 1 else f"at least one of {spelled(absent)}"
    if how == "gone":
        who = who if absent else "another process of the run"
        return f"{who} went away {where}; look for its message. {back}"
    waited = f"within {world.timeout_seconds:g} s (parallel.timeout_seconds) {where}"
    if absent:
        return f"{who} did not answer {waited}. {back}"
    return f"no answer {waited}, and no process hangs: is the network cut? {back}"


def _make_group(place: Place, device_type: str, store: Store, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    if device_type == "cuda" and torch.cuda.device_count() > place.local_rank:
        torch.cuda.set_device(place.local_rank)  # what nccl and allocations use unless told
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def local_device(device: torch.device, world: World) -> torch.device:
    """The device of this process: among CUDA devices the one of its local rank. Collective.

    Where a scheduler shows each process only its own GPU, that is the first. Raises ConfigError
    for fewer GPUs than processes in this machine.
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
    gpus = world.collect(str(torch.cuda.get_device_properties(index).uuid))
    if 1 < n_gpus < world.local_size or len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"there are {world.local_size} processes in this machine and {n_gpus} "
            f"GPU{'s' if n_gpus > 1 else ''}: each process needs one. Start {n_gpus}, or set "
            "--train.device cpu"
        )
    return torch.device("cuda", index)


def set_threads(world: World) -> int:
    """Threads that each operation of torch now uses in this process. Collective."""
    import torch

    machine, mine = platform.node(), usable_cores()
    places = world.collect((machine, mine))
    n_threads = chosen_threads()
    if n_threads is None:
        n_threads = fair_share(mine, [cores for name, cores in places if name == machine])
    torch.set_num_threads(n_threads)
    return n_threads
