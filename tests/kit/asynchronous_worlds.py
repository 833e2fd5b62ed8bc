"""What the two processes of `test_asynchronous_worlds` do: they train, and save beside it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config

from pentameter.checkpoint.format import save_phases
from pentameter.errors import PentameterError, StorageError
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer


def sections(*, asynchronous: bool, zero: int = 0) -> dict[str, Any]:
    settings = {"interval": 4, "keep_last": 9, "asynchronous": asynchronous}
    return {
        "train": {"eval_interval": None},
        "checkpoint": settings,
        "parallel": {"data": 2, "zero": zero},
    }


def patient(world: World) -> World:
    """The same with an end to its patience, as groups of processes need it."""
    return replace(world, timeout_seconds=60.0)


class Seen:
    """Notes what happened in order, and opens the gate after a step."""

    def __init__(self, gate: threading.Event, step: int) -> None:
        self.order: list[object] = []
        self.gate, self.step = gate, step

    def on_step(self, trainer: Trainer, step: Any) -> None:
        self.order.append(step.step)
        if step.step == self.step:
            self.gate.set()

    def on_checkpoint(self, trainer: Trainer, saved: Any) -> None:
        self.order.append(f"saved {saved.step}")


def train(world: World, run: Path, asynchronous: bool, zero: int) -> list[object]:
    """What happened in this process of a run in which rank 1's disk waits for step 6."""
    gate = threading.Event()
    real = save_phases.write_verified

    def write(path: Path, chunks: Any) -> Any:
        if world.rank == 1 and threading.current_thread().name.startswith("save of step"):
            assert gate.wait(30)
        return real(path, chunks)

    seen = Seen(gate, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_phases, "write_verified", write)
        chosen = config(**sections(asynchronous=asynchronous, zero=zero))
        Trainer(chosen, run_dir=run, quiet=True, world=patient(world), hooks=[seen]).fit()
    return seen.order


def fail_to_write(world: World, run: Path, rank: int) -> tuple[str, int]:
    """The error in this process of a run in which the disk of `rank` refuses step 8."""
    real = save_phases.write_verified

    def write(path: Path, chunks: Any) -> Any:
        if world.rank == rank and "step-00000008" in str(path):
            raise StorageError(f"cannot write {path}: No space left on device")
        return real(path, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_phases, "write_verified", write)
        try:
            chosen = sections(asynchronous=True)
            chosen["train"]["steps"] = 16  # not the last but one, which would be a warning
            chosen = config(**chosen)
            Trainer(chosen, run_dir=run, quiet=True, world=patient(world)).fit()
        except PentameterError as error:
            return str(error), error.exit_code
    return "no error", 0
