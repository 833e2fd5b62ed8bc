"""The guard's decision: whether a step's update is left out, from its loss and gradient norm.

It is made where these numbers lie. On a GPU that is the device, which leaves updates out without a
wait of the host. Both numbers are summed over all ranks before, so the decision is the same on each
of them, and it sends nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pentameter.config.schema import GuardConfig
from pentameter.parallel.engine import LossSum
from pentameter.train.state import TrainState

NORMAL_SCATTER = 1.4826
"""A normal distribution's standard deviation ÷ its median absolute deviation."""
LEAST_SCATTER = 0.01
"""Least scatter, as a fraction of the median: values that are all alike have none."""


def spike_limits(history: Tensor, factor: float) -> Tensor:
    """Return limits (2,): a loss, or a gradient norm, at or above its limit is a spike. Each is
    median + `factor` × scatter of the row of `history` (2, window), the values at the latest
    updates. The limit is infinite until the history is full; before, its oldest values are NaN."""
    median = _median(history)
    scatter = NORMAL_SCATTER * _median((history - median[:, None]).abs())
    limits = median + factor * torch.maximum(scatter, LEAST_SCATTER * median.abs())
    return limits.where(history[:, 0].isfinite(), torch.inf)


def _median(values: Tensor) -> Tensor:
    """Return each row's median, the lower one of two; (rows, n) → (rows,)."""
    # Not `Tensor.median`, which a GPU refuses if only deterministic algorithms are allowed.
    return values.sort(1).values[:, (values.shape[1] - 1) // 2]


class Guard:
    """Decides for each step in turn whether its update is left out. `device` is where losses and
    norms are computed: the GPU's, or the CPU if the host has them as numbers.

    The history of losses and norms begins with that in `state`. With `halts`, once more than
    `guard.skips` updates in a row were left out, every further one is too. The device may be
    several steps ahead of the host, which reads later that the run must roll back or give up; the
    weights then still are those of that step.
    """

    def __init__(
        self, settings: GuardConfig, state: TrainState, device: torch.device, *, halts: bool
    ) -> None:
        self._factor, self._halts, self._most = settings.spike_factor, halts, settings.skips
        self._history = initial_history(settings, state).to(device)
        self._n_skipped = torch.tensor(state.consecutive_skips, device=device)

    def judge(self, loss: LossSum, norm: Tensor | float) -> Tensor:
        """Return 1 to leave the step's update out, else 0, as float32 (). It is left out if loss or
        gradient norm is not finite or a spike, or, with `halts`, if too many in a row were left out
        before. `loss` is summed over all ranks, `norm` is that before clipping. A step that is not
        left out enters the history."""
        if isinstance(norm, Tensor):
            total, norm = (torch.as_tensor(each).double() for each in (loss.total, norm))
            values = torch.stack([total / loss.n_targets, norm])
        else:
            values = torch.tensor([loss.mean, norm], dtype=torch.float64)
        left_out = ~(values.isfinite() & (values < self._limits())).all()
        if self._halts:
            left_out |= self._n_skipped > self._most
            self._n_skipped = torch.where(left_out, self._n_skipped + 1, 0)
        if self._factor is not None:
            longer = torch.cat([self._history[:, 1:], values[:, None]], 1)
            self._history = torch.where(left_out, self._history, longer)
        return left_out.float()

    def _limits(self) -> Tensor | float:
        return torch.inf if self._factor is None else spike_limits(self._history, self._factor)


def initial_history(settings: GuardConfig, state: TrainState) -> Tensor:
    """Return losses and gradient norms of the latest updates in `state`, float64 (2, window),
    oldest first; NaN before the first update."""
    history = torch.full((2, settings.window), torch.nan, dtype=torch.float64)
    for row, values in zip(history, (state.guard.losses, state.guard.norms), strict=True):
        kept = values[-settings.window :]
        if kept:
            row[-len(kept) :] = torch.tensor(kept, dtype=torch.float64)
    return history
