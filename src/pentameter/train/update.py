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
    """The outcome of one step: its loss, summed over all ranks, its gradient's norm before
    clipping, the loads of its experts, and whether the update was left out. The numbers may be
    tensors on the device; `read` copies them to the host. The same on every rank."""

    loss: LossSum
    grad_norm: Tensor | float
    loads: Tensor | list[list[float]] | None = None
    """Load of each expert and statistics of its router, as `ExpertLoads.total` returns them, a row
    for each layer with experts; None if not asked for."""
    left_out: Tensor | float = 0.0
    """1 if the guard left the update out, else 0; always 0 without a guard."""

    @property
    def made(self) -> bool:
        """True if the weights were updated. False if loss or gradient norm is not finite or the
        guard left the update out; weights and optimizer state are then unchanged. Waits for the
        device, unless the numbers are on the host (`read`)."""
        return self.is_finite and not self.left_out

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite. Waits for the device as `made` does."""
        return math.isfinite(self.loss.mean) and math.isfinite(self.grad_norm)

    def not_finite(self) -> Tensor:
        """Return 1 if loss or gradient norm is not finite, else 0, as float32 () on their device.
        The host does not wait."""
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
    """Take as many numbers from `values` as `tensor` has elements, and return them in its shape: a
    number for a 0-dim tensor, a list of rows for a matrix. `values` are all updates' numbers in
    turn, copied to the host at once."""
    if tensor.ndim == 0:
        return next(values)
    n_rows, n_columns = tensor.shape
    return [list(islice(values, n_columns)) for _ in range(n_rows)]


def may_read_late(engine: Engine, optimizer: AnyOptimizer) -> bool:
    """Return True if the host need not know loss and norm before it launches the next step, so that
    `update_weights` may be called with `at_once=False`. It is so on CUDA without fp16, whose next
    loss scale depends on them, without offload, and with an optimizer that can skip an update on
    the device (`can_step_unless`)."""
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
    finite, or `guard` leaves the step out. Return the Update (loss, norm, loads, whether it was
    left out), the same on every rank. The gradients are zeroed afterwards. Collective.

    loss: the step's loss, summed over all ranks.
    rate: the learning rate.
    loss_scale: factor by which the gradients are too large.
    clip_norm: largest gradient norm; 0 does not clip.
    at_once: True: the host waits for loss and norm, and decides whether to step. False (only if
        `may_read_late`): they stay on the device, and the optimizer's kernel skips the update
        there.
    with_loads: also return the loads of the experts, if the model has any.
    guard: judges whether to leave the step out, also for numbers that are not finite. None: only a
        number that is not finite leaves it out.
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
