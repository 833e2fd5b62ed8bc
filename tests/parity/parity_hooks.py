"""Hooks for the runs of these tests, made in each process by what its world says of it."""

from __future__ import annotations

from typing import Any

import torch

from pentameter.parallel.local_shards import local_shard
from pentameter.processes.group.world import World


class StopInOne:
    """Asks for the end of the run, in the last process only."""

    def __init__(self, world: World, step: int) -> None:
        self.speaks = world.rank == world.size - 1
        self.step = step

    def on_step(self, trainer: Any, metrics: Any) -> None:
        if self.speaks and metrics.step == self.step:
            trainer.stop("one of us has had enough")

    on_skip = on_step


class OverflowInOne:
    """Makes the gradients of some steps (0-based) infinite, in the last process only, as products
    in fp16 do: on their way back, before anything is summed. The loss stays what it is."""

    def __init__(self, world: World, steps: tuple[int, ...]) -> None:
        self.plants = world.rank == world.size - 1
        self.steps = steps

    def on_start(self, trainer: Any) -> None:
        def forward_hook(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled() or trainer.state.step not in self.steps:
                return output
            return _Overflowing.apply(output)

        if self.plants:
            for model in trainer.engine.models:
                block = next(iter(model.blocks.values()))
                block.register_forward_hook(forward_hook)


class SpoilInOne:
    """Makes one weight NaN after a step, in the last process only."""

    def __init__(self, world: World, step: int) -> None:
        self.plants = world.rank == world.size - 1
        self.step = step

    def on_step(self, trainer: Any, metrics: Any) -> None:
        if self.plants and metrics.step == self.step:
            with torch.no_grad():
                local_shard(next(iter(trainer.engine.parameters())))[0].view(-1)[-1] = float("nan")


class _Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e30 * 1e30
