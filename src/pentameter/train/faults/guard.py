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
    """Return the median of each row of `values` (rows, n), as (rows,); the lower one of the two in
    the middle if n is even."""
    # Not `Tensor.median`, which a GPU refuses if only deterministic algorithms are allowed.
    return values.sort(1).values[:, (values.shape[1] - 1) // 2]


class Guard:
    """Decides for each step whether its update is left out, because the loss or the gradient norm
    is not finite or is a spike. It computes on `device`: the GPU, or the CPU if losses and norms
    are numbers on the host.

    settings: the `[guard]` section.
    state: the run's state, whose history of losses and norms it begins with.
    halts: True to leave out every further update once more than `guard.skips` in a row were left
        out. The host may learn that several steps later, and then rolls back or gives up; until
        then the weights stay as they were.
    """

    def __init__(
        self, settings: GuardConfig, state: TrainState, device: torch.device, *, halts: bool
    ) -> None:
        self._factor, self._halts, self._most = settings.spike_factor, halts, settings.skips
        self._history = initial_history(settings, state).to(device)
        self._n_skipped = torch.tensor(state.consecutive_skips, device=device)

    def judge(self, loss: LossSum, norm: Tensor | float) -> Tensor:
        """Return 1 if this step's update is to be left out, else 0, as float32 () on the device. It
        is left out if `loss` (summed over all ranks) or `norm` (of the gradient, before clipping)
        is not finite or is a spike; with `halts` also if too many in a row were left out before.
        The values of a step that is not left out are added to the history."""
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
