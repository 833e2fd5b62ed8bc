"""The optimizer update: from gradients to new weights by unscale, norm, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pentameter.optim.build import AnyOptimizer, can_step_unless, set_learning_rate, step_unless
from pentameter.parallel.engine import Engine, LossSum
from pentameter.train.faults.guard import Guard


@dataclass(frozen=True)
class Update:
    """A step's loss, summed over all ranks, its gradient's norm before clipping, and its experts'
    loads: tensors on the device until `read` makes them numbers, and the same on every rank."""

    loss: LossSum
    grad_norm: Tensor | float
    loads: Tensor | list[list[float]] | None = None
    """The totals from `ExpertLoads.total`, a row for each layer with experts; None if not asked
    for."""
    left_out: Tensor | float = 0.0
    """1 if the guard left the update out, else 0."""

    @property
    def made(self) -> bool:
        """False if loss or gradient norm is not finite, or the guard left the update out; weights
        and optimizer state are unchanged then. Waits for the device, unless the update was copied
        to the host (`read`)."""
        return self.is_finite and not self.left_out

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite. Waits for the device as `made` does."""
        return math.isfinite(self.loss.mean) and math.isfinite(self.grad_norm)

    def not_finite(self) -> Tensor:
        """Return whether loss or gradient norm is not finite, without waiting for the device,
        float32 (): 1 or 0."""
        loss, norm = self.loss, torch.as_tensor(self.grad_norm)
        is_finite = torch.isfinite(loss.total / torch.as_tensor(loss.n_targets))
        return (~(is_finite & torch.isfinite(norm))).float()


def read(updates: Sequence[Update]) -> list[Update]:
    """Return the updates with their numbers on the host, waiting for the device once for all.
    Updates that are numbers already are returned as they are."""
    found: list[Any] = []
    for each in updates:
        loss = each.loss
        found += [loss.total, loss.n_targets, each.grad_norm, each.loads, each.left_out]
    tensors = [each for each in found if isinstance(each, Tensor)]
    if not tensors:
        return list(updates)
    dtype = reduce(torch.promote_types, (each.dtype for each in tensors))
    values = iter(torch.cat([each.to(dtype).reshape(-1) for each in tensors]).tolist())
    found = [_from_host(values, each) if isinstance(each, Tensor) else each for each in found]
    return [
        Update(LossSum(total, int(n_targets)), norm, loads, left_out)
        for total, n_targets, norm, loads, left_out in zip(
            *(found[first::5] for first in range(5)), strict=True
        )
    ]


def _from_host(values: Iterator[float], tensor: Tensor) -> Any:
    """Take from `values` what was copied of `tensor`: a number if it is 0-dim, the rows as lists if
    it is a matrix."""
    if tensor.ndim == 0:
        return next(values)
    n_rows, n_columns = tensor.shape
    return [list(islice(values, n_columns)) for _ in range(n_rows)]


def may_read_late(engine: Engine, optimizer: AnyOptimizer) -> bool:
    """Return True if `update_weights` may leave loss and norm on the device, so that the host need
    not wait: the next step does not depend on them (as fp16's loss scale does), nothing is
    offloaded, and the optimizer can itself skip a non-finite update (`can_step_unless`)."""
    return (
        engine.host_waits
        and engine.arithmetic.precision != "fp16"
        and not engine.plan.config.train.offload
        and can_step_unless(optimizer)
    )


def update_weights(
    engine: Engine,
    optimizer: AnyOptimizer,
    loss: LossSum,
    rate: float,
    loss_scale: float,
    clip_norm: float,
    *,
    at_once: bool = True,
    with_loads: bool = False,
    guard: Guard | None = None,
) -> Update:
    """Make an optimizer step from the gradients in `engine`, unless loss or gradient norm is not
    finite, or `guard` leaves the step out. Return both, the same on every rank. Collective.

    loss: the step's loss, summed over all ranks.
    rate: the learning rate.
    loss_scale: factor by which the gradients are too large.
    clip_norm: largest gradient norm.
    at_once: True to copy loss and norm to the host, which decides whether to step. False (only if
        `may_read_late`) to leave them on the device, whose optimizer skips a non-finite update
        itself.
    with_loads: also return the loads of the experts, if the model has any.
    guard: decides whether loss or norm spikes; None if no step does.

    The gradients are zeroed afterwards.
    """
    engine.unscale_gradients(loss_scale)
    norm = engine.gradient_norm()
    loads = engine.expert_loads.total() if with_loads else None
    update = Update(loss, norm if engine.host_waits else norm.item(), loads)
    if guard is not None:
        update = replace(update, left_out=guard.judge(loss, update.grad_norm))
    not_made = None
    if at_once:
        (update,) = read([update])
    else:
        not_made = update.not_finite() if guard is None else torch.as_tensor(update.left_out)
    if not at_once or update.made:
        engine.clip_gradients(norm, clip_norm)
        set_learning_rate(optimizer, rate)
        step_unless(optimizer, not_made)
        engine.router_balance.move(not_made)
    engine.zero_gradients()
    return update
