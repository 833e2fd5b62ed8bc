"""A run whose host reads late, as beside a GPU, or at once, with what it reads and sends counted.

The device is the CPU. So floats are what a GPU would hold, to read or to all-reduce there, and
integers and objects are the host's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from asynchronous_worlds import patient
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pentameter.errors import TrainingFailedError
from pentameter.parallel.engine import Engine, LossSum
from pentameter.processes.group.world import World
from pentameter.train import loop

OF_HOST = ("all_gather_object", "broadcast_object_list", "barrier", "monitored_barrier")
READING = ("tolist", "numpy", "cpu")


class Reads(TorchDispatchMode):
    """Counts what the host reads of tensors, and what it says to other ranks, by step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.reads: Counter[int] = Counter()
        self.words: Counter[int] = Counter()
        self.step = 0
        for name in READING:  # these reach no operation on a CPU
            self._count(patch, Tensor, name, self.reads, lambda x: x.is_floating_point())
        for name in OF_HOST:
            self._count(patch, dist, name, self.words)
        self._count(patch, dist, "all_reduce", self.words, lambda x: not x.is_floating_point())
        train_step = loop._Loop._train_step

        def counted_step(self_: loop._Loop) -> None:
            self.step = self_.run.state.step + 1
            train_step(self_)

        patch.setattr(loop._Loop, "_train_step", counted_step)

    def _count(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        counter: Counter[int],
        counts: Callable[[Any], bool] = lambda first: True,
    ) -> None:
        """Count calls of a function whose first argument `counts`."""
        function = getattr(owner, name)

        def counted(first: Any = None, *arguments: Any, **named: Any) -> Any:
            counter[self.step] += counts(first)
            given = () if first is None else (first,)
            return function(*given, *arguments, **named)

        patch.setattr(owner, name, counted)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count `item`, `float`, `int` and `bool`, which are one operation."""
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads[self.step] += 1
        return func(*args, **(kwargs or {}))


def spoil(patch: pytest.MonkeyPatch, bad_losses: set[int], bad_gradients: set[int]) -> None:
    """Make losses and gradients of these steps, 0-based, not finite, on the device."""
    real = Engine.forward_backward

    def forward_backward(self: Engine, batch: Any, step: int, **options: Any) -> LossSum:
        loss = real(self, batch, step, **options)
        if step in bad_gradients:
            next(p.grad for p in self.parameters() if p.grad is not None).fill_(math.inf)
        if step in bad_losses:
            return LossSum(loss.total * math.nan, loss.n_targets)
        return loss

    patch.setattr(Engine, "forward_backward", forward_backward)


def run_counted(
    world: World,
    config: Any,
    run_dir: Path,
    late: bool,
    bad_losses: set[int],
    bad_gradients: set[int],
    prompt_seconds: float = 1e6,
) -> tuple[dict[int, int], dict[int, int]]:
    """Train. Returns the host's reads and its words with other ranks, by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "host_waits", late)
        patch.setattr("pentameter.train.signals.PROMPT_SECONDS", prompt_seconds)
        spoil(patch, bad_losses, bad_gradients)
        trainer = loop.Trainer(config, run_dir=run_dir, quiet=True, world=patient(world))
        with Reads(patch) as reads, suppress(TrainingFailedError):
            trainer.fit()
    return dict(+reads.reads), dict(+reads.words)
