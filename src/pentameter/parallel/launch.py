"""Joining the other processes of a run: what the environment says of them, and meeting them.

torchrun, SLURM's srun, a Kubernetes PyTorchJob and `--nproc` each start the same command several
times and tell each process its place by environment variables. Nothing set means one process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from pentameter.errors import ConfigError
from pentameter.parallel.lost import LostProcessError, lost_process
from pentameter.parallel.slurm import expand_counts, expand_nodes, rendezvous_port
from pentameter.parallel.threads import set_threads
from pentameter.parallel.world import TIMEOUT_SECONDS, World

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

LAUNCH_FOLDER = "PENTAMETER_LAUNCH_FOLDER"
"""The private folder of `--nproc`: where its processes meet, and where they leave their reports."""

SETTLE_SECONDS = 0.05
"""Given to gloo's threads, which want some microseconds, before the process may end."""

PATIENCE_SECONDS = 15.0
"""Until a process that waits for others to come says so."""


@dataclass(frozen=True)
class Place:
    """This process among those that were started together, and how it meets them."""

    rank: int
    world_size: int
    local_rank: int
    """Its number among those of its machine."""
    local_size: int
    init_method: str
    """`env://`, `tcp://HOST:PORT` or `file://PATH`, the path as it is."""
    source: str
    """Who started it: `torchrun`, `SLURM`, `--nproc` or `environment`."""


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The Place that the environment names; None for a process that runs alone.

    Raises ConfigError for variables that contradict each other, naming them.
    """
    place = _named_place(environ)
    return None if place is None or place.world_size == 1 else place


def _named_place(environ: Mapping[str, str]) -> Place | None:
    if LAUNCH_FOLDER in environ:
        meet = f"file://{os.path.join(environ[LAUNCH_FOLDER], 'rendezvous')}"
        return _place(environ, "--nproc", meet)
    # srun alone sets the step's number of tasks: a batch script itself is one process.
    is_srun_task = "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ
    # A batch script can export WORLD_SIZE for all its tasks, but not the RANK of each.
    if "RANK" in environ or ("WORLD_SIZE" in environ and not is_srun_task):
        return _torch_place(environ)
    if not is_srun_task:
        _refuse_unknown_launcher(environ)
        return None
    return _slurm_place(environ)


def _refuse_unknown_launcher(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where something has started several processes that each would run alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        count = environ.get(name, "").strip()
        if count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{name}={count} says that {count} processes were started together, and nothing "
                "says which of them this is; start them with torchrun or srun, or on one machine "
                f"with --nproc, or unset {name} to run as one process"
            )


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


def _torch_place(environ: Mapping[str, str]) -> Place:
    """The place by the variables of torch.distributed, set by torchrun or a PyTorchJob."""
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if "TORCHELASTIC_RUN_ID" in environ:
        source = "torchrun"
    elif "LOCAL_RANK" not in environ and per_pod not in ("", "1"):
        raise ConfigError(
            f"PET_NPROC_PER_NODE={per_pod} asks for that many processes in each pod, and this one "
            "runs alone: let the pod's command be torchrun -m pentameter train …"
        )
    else:
        source = "environment"
    place = _place(environ, source, "env://")
    if place.world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ConfigError(
                    f"WORLD_SIZE={place.world_size} processes are to meet, and {name} is not set; "
                    "set it to that of rank 0, or start the command with torchrun"
                )
        _number(environ, "MASTER_PORT", "")
    return place


def _slurm_place(environ: Mapping[str, str]) -> Place:
    """The place by the variables of a step that srun started."""
    remedy = "start the command with srun, or unset the SLURM_ variables to run as one process"
    rank = _number(environ, "SLURM_PROCID", remedy)
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", remedy)
    local_rank = _number(environ, "SLURM_LOCALID", remedy)
    if environ.get("WORLD_SIZE"):
        exported = _number(environ, "WORLD_SIZE", "unset WORLD_SIZE: srun says it already")
        if exported != world_size:
            raise ConfigError(
                f"WORLD_SIZE={exported} contradicts SLURM_STEP_NUM_TASKS={world_size}, the tasks "
                f"of this step: start it with srun --ntasks={exported}, or unset WORLD_SIZE"
            )
    if world_size == 1:
        return Place(0, 1, 0, 1, "", "SLURM")
    tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    hosts = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    node = _number(environ, "SLURM_NODEID", remedy)
    if sum(tasks) != world_size or node >= len(tasks):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']!r} does not fit "
            f"SLURM_STEP_NUM_TASKS={world_size} and SLURM_NODEID={node}; {remedy}"
        )
    if rank != sum(tasks[:node]) + local_rank:
        raise ConfigError(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}: SLURM deals the tasks out "
            "to the nodes in turn, and ranks that work closely together would be far apart; "
            "start with srun --distribution=block"
        )
    host = environ.get("MASTER_ADDR") or hosts[0]
    port = rendezvous_port(environ)
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT", "")
    host = f"[{host}]" if ":" in host else host
    return _checked(
        Place(rank, world_size, local_rank, tasks[node], f"tcp://{host}:{port}", "SLURM")
    )


def _place(environ: Mapping[str, str], source: str, init_method: str) -> Place:
    remedy = "torchrun sets it; unset RANK and WORLD_SIZE to run as one process"
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:
        local_rank = _number(environ, "LOCAL_RANK", remedy)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", remedy)
    else:  # a pod of a PyTorchJob has one process
        local_rank, local_size = 0, 1
    rank, world_size = _number(environ, "RANK", remedy), _number(environ, "WORLD_SIZE", remedy)
    return _checked(Place(rank, world_size, local_rank, local_size, init_method, source))


def _number(environ: Mapping[str, str], name: str, remedy: str) -> int:
    text = environ.get(name, "").strip()
    if text.isdecimal():
        return int(text)
    what = f"{name}={text!r} must be a whole number" if name in environ else f"{name} is not set"
    raise ConfigError(f"{what}{f'; {remedy}' if remedy else ''}")


def _checked(place: Place) -> Place:
    """`place`, or ConfigError where its numbers cannot be."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if place.source == "SLURM":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "the tasks of the node")
    rank, size, local_rank, local_size = names
    for number, name, count, of in (
        (place.rank, rank, place.world_size, size),
        (place.local_rank, local_rank, place.local_size, local_size),
    ):
        if number >= count:
            raise ConfigError(f"{name}={number} must be below {of}={count}; ranks count from 0")
    if place.local_size > place.world_size:
        raise ConfigError(
            f"{local_size}={place.local_size} of one machine cannot be more than {size}="
            f"{place.world_size} of all; set both, or unset both"
        )
    return place


@contextlib.contextmanager
def joined_world(
    device_type: str,
    place: Place | None = None,
    *,
    always_group: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[World]:
    """The World of the processes that meet at `place`, for as long as the block runs.

    Within it torch.distributed's default process group exists, CPU tensors travel over gloo and
    CUDA tensors over nccl, and each process computes with its share of the machine's cores (see
    `set_threads`). One process has nobody to meet: it gets `World()`, and a group of its own only
    where `always_group` asks for one, as sharded and offloaded parameters do.

    An exception leaves at once, without waiting for the others; the group is then left as it is,
    since ending it could wait for them. Raises LostProcessError where another process went away
    or did not come within `timeout_seconds`.
    """
    n_processes = 1 if place is None else place.world_size
    if n_processes == 1 and not always_group:
        yield World()
        return
    import torch.distributed as dist

    place = place or Place(0, 1, 0, 1, "", "one process")
    world = World(place.rank, place.world_size, place.local_rank, place.local_size, timeout_seconds)
    try:
        _meet(place, device_type, timeout_seconds)
        if world.size > 1:
            set_threads(world)
        yield world
        world.wait()  # rank 0 may hold what the others need to say goodbye
        # Gloo's threads have yet to let go of the last tensors, for which they need the lock of the
        # interpreter; one that still asks for it when Python ends aborts the process
        # (https://github.com/pytorch/pytorch/pull/179291).
        time.sleep(SETTLE_SECONDS)
    except RuntimeError as error:
        lost = lost_process(error)
        if lost is None or isinstance(error, LostProcessError):
            raise
        raise lost from error
    finally:
        if world.size == 1 and dist.is_initialized():
            dist.destroy_process_group()
    if world.size > 1:
        dist.destroy_process_group()


def _meet(place: Place, device_type: str, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    if device_type == "cuda" and torch.cuda.device_count() > place.local_rank:
        torch.cuda.set_device(place.local_rank)  # what nccl and allocations use unless told
    timeout = timedelta(seconds=timeout_seconds)
    store: Store | None = None
    if place.world_size == 1:
        store = dist.HashStore()
    elif place.init_method.startswith("file://"):
        # Not by init_method, which would read a ? or # in the path as the end of it.
        store = dist.FileStore(place.init_method.removeprefix("file://"), place.world_size)
    where = place.init_method
    if where == "env://":
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
    try:
        with _saying_so_when_it_takes_long(place, where):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
                init_method=place.init_method if store is None else None,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
            )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"the port of {where} is in use on this machine; set MASTER_PORT to another"
            ) from error
        if lost_process(error) is not None:
            raise LostProcessError(
                f"not all of the {place.world_size} processes that {place.source} names came to "
                f"{where} within {timeout_seconds:g} s; look for the message of one that did not"
            ) from error
        raise


@contextlib.contextmanager
def _saying_so_when_it_takes_long(place: Place, where: str) -> Iterator[None]:
    """Have rank 0 tell whom it waits for, once that is longer than starting takes."""
    said = f"pentameter: waiting for all {place.world_size} processes to come to {where}"
    timer = threading.Timer(PATIENCE_SECONDS, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if place.rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
