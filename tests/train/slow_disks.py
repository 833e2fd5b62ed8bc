"""What the two processes of `test_slow_disks` do: they train where a file takes longer to be read
than one process may wait for another in a collective."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tiny_runs import config

from pentameter.checkpoint.format import save_phases
from pentameter.disk import atomic
from pentameter.parallel.engine import Engine, LossSum
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer

TIMEOUT_SECONDS = 6.0
SLOW_SECONDS = 8.0
SPIKES = (17, 18)
"""Steps, 0-based, whose loss is a spike: the second rolls back to step 15."""


def sections(**checkpoint: Any) -> dict[str, Any]:
    return {
        "data": {"grammar": {"n_characters": 3000}, "test_fraction": 0.1},
        "train": {"steps": 12, "eval_interval": 4, "sample_interval": None},
        "checkpoint": {"interval": 4, "keep_last": 9, "asynchronous": False, **checkpoint},
        "guard": {"spike_factor": 1000.0, "window": 8, "skips": 1, "rollback_interval": 5},
        "parallel": {"data": 2, "zero": 1},
    }


def spoils(step: int) -> float:
    """A learning rate with which the last step is not the best."""
    return 1e-2 if step < 20 else 1.0


def impatient(world: World, folder: Path) -> World:
    """The same world, whose collectives wait no longer than TIMEOUT_SECONDS."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    return replace(world, timeout_seconds=TIMEOUT_SECONDS)


def train(world: World, run: Path, **arguments: Any) -> tuple[str, list[str]]:
    """Train in the folder `run`, and return how it ended and the files whose content this process
    has hashed, as `step-00000004/model.safetensors`, but for those that it had just written."""
    hashed: list[str] = []
    check_file, write_verified = atomic.check_file, save_phases.write_verified
    real_pass, slow = Engine.forward_backward, arguments.pop("slow", True)
    writing = threading.local()

    def check(folder: Path, record: Any, **options: Any) -> None:
        if options["hash_content"] and not getattr(writing, "is_on", False):
            hashed.append(f"{folder.name}/{record.name}")
            time.sleep(SLOW_SECONDS if slow and "safetensors" in record.name else 0)
        check_file(folder, record, **options)

    def write(path: Path, chunks: Any) -> Any:
        writing.is_on = True
        try:
            if slow and world.rank == 1 and "step-00000020" in str(path) and "model" in path.name:
                time.sleep(SLOW_SECONDS)  # this rank alone
            return write_verified(path, chunks)
        finally:
            writing.is_on = False

    def forward_backward(self: Engine, batch: Any, step: int, **options: Any) -> LossSum:
        loss = real_pass(self, batch, step, **options)
        return LossSum(loss.total * (1e6 if step in SPIKES else 1), loss.n_targets)

    chosen = config(**arguments.pop("sections"))
    world = impatient(world, run.parent) if slow else replace(world, timeout_seconds=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "check_file", check)
        patch.setattr(save_phases, "write_verified", write)
        patch.setattr(Engine, "forward_backward", forward_backward)
        end = Trainer(
            chosen, run_dir=run, quiet=True, world=world, schedule=spoils, **arguments
        ).fit()
    return end.reason, hashed
