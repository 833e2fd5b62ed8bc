"""What the processes of `test_sharded_failures` do."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from layout_worlds import LAYOUTS, hold, join, save, store_in, true_value
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pentameter.checkpoint.format.save_phases import Contents, HostBuffers
from pentameter.processes.group.world import World
from trials.faults.file_operations import DieAt, before_each

PATIENCE = timedelta(seconds=20)
"""Longest wait for another process, as every run has one: a collective that a killed process leaves
half sent may not end of itself."""


@dataclass(frozen=True)
class Case:
    rank: int
    operation: str
    number: int

    def __str__(self) -> str:
        return f"{self.operation}-{errno.errorcode[self.number]}-in-{self.rank}"


BROKEN = [
    Case(rank, operation, number)
    for rank in (0, 1)
    for operation in ("open", "write", "fsync")
    for number in (errno.ENOSPC, errno.EIO)
] + [Case(0, "mkdir", errno.EROFS), Case(0, "rename", errno.EIO)]


def fail_in_turn(world: World, folder: Path) -> dict[Case, tuple[str, list[str]]]:
    """Case → the error that this process's save raised, and what lay there afterwards."""
    held = hold(LAYOUTS["zero"], world.rank, filled=True)
    save(folder, held, world)
    outcomes = {}
    for case in BROKEN:
        failed = False

        def act(operation, arguments, case=case):
            nonlocal failed
            is_new = operation in ("write", "fsync") or ".tmp-" in str(arguments[0])
            if (world.rank, operation) == (case.rank, case.operation) and is_new and not failed:
                failed = True
                raise OSError(case.number, os.strerror(case.number))

        with before_each(act):
            error = outcome(lambda: save(folder, held, world, step=2))
        world.barrier()  # the main process has cleaned up
        names = os.listdir(folder / "checkpoints")
        world.barrier()
        outcomes[case] = (error, names)
    assert "step-00000002" in outcome(lambda: save(folder, held, world, step=2))
    return outcomes


def outcome(work: Callable[[], object]) -> str:
    try:
        return repr(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refuse_in_turn(world: World, folder: Path) -> dict[str, object]:
    held = hold(LAYOUTS["zero"], world.rank, filled=True)
    save(folder, held, world)
    store = store_in(folder)

    def attempt(tensors, state) -> str:
        return outcome(lambda: store.save(Contents(2, tensors, state, {}), world))

    whole = held.state()
    outcomes: dict[str, object] = {"state": attempt(whole, {"loss": float("nan")})}
    meta = {"norm.weight": torch.empty(3, device="meta")} if world.rank else {}
    outcomes["tensor"] = attempt({"model": meta}, {})
    part = {} if world.rank else {"embedding.weight": whole["model"]["embedding.weight"]}
    outcomes["missing part"] = attempt({"model": part}, {})
    with pytest.MonkeyPatch.context() as patch:
        full = os.statvfs_result((4096, 4096, 10**6, 10, 10, 10, 10, 10, 0, 255))
        patch.setattr(os, "statvfs", lambda path: full)
        outcomes["space"] = attempt(whole, {})
    world.barrier()
    outcomes["names"] = os.listdir(store.folder)
    return outcomes


# -- killed ---------------------------------------------------------------------------------------


def die_at_each(_: World, folder: Path, scene: str, rank: int, how: str) -> int:
    """How many operations `rank` has in a save by two; it was killed before each of them once."""
    os.fsync = lambda fd: None  # a killed process loses nothing that it wrote
    n = 0
    arrived = True
    while arrived:
        n += 1
        here = folder / str(n)
        save_mark(World(), here, 1, 1.0)
        after = (1 if scene == "again" else 2, 2.0)
        arrived = two_save(here, after, rank, n, how)
        assert found(here) in (((1, 1.0), after) if arrived else (after,)), n
        store = store_in(here)
        standing = found(here)
        store.clean()  # the next start
        assert found(here) == standing
        assert all(name[5:].isdigit() for name in os.listdir(store.folder))
        save_mark(World(), here, *after)
        store.prune(1)
        assert found(here) == after
        assert os.listdir(store.folder) == [f"step-{after[0]:08d}"]
    return n - 1


def save_mark(world: World, folder: Path, step: int, mark: float, how: str = "waited for") -> None:
    weight, meshes = true_value("head.weight") * mark, []
    if world.size > 1:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        weight, meshes = distribute_tensor(weight, mesh, [Shard(0)]), [mesh]
    tensors = {
        "model": {"w": weight},
        "optimizer": {"w.exp_avg": weight, "w.step": torch.tensor(1)},
    }
    extra = {"config.toml": b"seed = 1\n"}
    store, state = store_in(folder), {"step": step, "mark": mark}
    save = store.plan(Contents(step, tensors, state, extra), world, meshes)
    if how == "beside training":
        save.start_writing(HostBuffers())
        weight.mul_(-1)  # the next step
    store.commit(save)


def found(folder: Path) -> tuple[int, float]:
    checkpoint = store_in(folder).latest()
    weight = checkpoint.tensors("model")["w"][...]
    assert torch.equal(weight, true_value("head.weight") * checkpoint.state["mark"])
    return checkpoint.step, checkpoint.state["mark"]


def two_save(folder: Path, after: tuple[int, float], victim: int, n: int, how: str) -> bool:
    """Let two processes save; whether `victim` came to its n-th operation, where it is killed."""
    pids = [_fork(folder, after, rank, n if rank == victim else 0, how) for rank in (0, 1)]
    deadline = time.monotonic() + 3 * PATIENCE.total_seconds()
    statuses: dict[int, int] = {}
    while len(statuses) < 2:
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = status
        if time.monotonic() > deadline:
            for pid in set(pids) - statuses.keys():
                os.kill(pid, signal.SIGKILL)
            stacks = [path.read_text() for path in sorted(folder.glob("stack-*"))]
            raise AssertionError("\n".join((f"{victim} dies at {n}, and one waits:", *stacks)))
        time.sleep(0.005)
    if os.WIFSIGNALED(statuses[pids[victim]]):
        return True
    assert list(statuses.values()) == [0, 0], "the save failed of itself"
    return False


def _fork(folder: Path, after: tuple[int, float], rank: int, n: int, how: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115 - open until the process ends
        faulthandler.dump_traceback_later(2 * PATIENCE.total_seconds(), file=stack)
        join(str(folder / "rendezvous"), rank, 2, PATIENCE)
        with before_each(DieAt(n)):
            save_mark(World(rank, 2, rank, 2), folder, *after, how)
        status = 0
    finally:
        os._exit(status)
