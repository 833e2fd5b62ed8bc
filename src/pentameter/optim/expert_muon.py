"""Muon for experts: each matrix of a stack is orthogonalized by itself, many of them at once.

`torch.optim.Muon` takes single matrices, one after another, and launches some thirty small kernels
for each. A large mixture has thousands of experts.

Shapes: E experts (or those that this rank holds), N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pentameter.optim.plain_rules import PlainRule
from pentameter.parallel.local_shards import is_distributed, local_shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration (Jordan et al. 2024), those of `torch.optim.Muon`."""
N_ITERATIONS = 5
EPS = 1e-7
"""Lower bound for the norm by which a matrix is divided."""


class ExpertMuon(PlainRule):
    """Muon for parameters (E, N, K): each matrix gets the update of `torch.optim.Muon` with
    Nesterov momentum and `adjust_lr_fn="match_rms_adamw"`. `params` are parameter groups (dicts),
    which may set `lr`, `momentum` and `weight_decay` (0 by default).

    If a stack is sharded by expert, as ZeRO shards it, each rank updates its experts without
    communication. If the matrices themselves are sharded, they are all-gathered for their update:
    `step` is then collective.
    """

    def __init__(self, params: Iterable[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update, in place, every parameter that has a gradient. Collective if matrices are
        sharded. Returns None; a `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Parameter, group: dict[str, Any]) -> None:
        """Update one parameter, and its momentum in the optimizer's state, in place. Collective if
        its matrices are sharded."""
        state, rate, momentum = self.state[parameter], group["lr"], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        update = parameter.grad.clone()
        (weights, offset), (buffer, _) = map(local_shard, (parameter, state["momentum_buffer"]))
        own, _ = local_shard(update)
        buffer.lerp_(own, 1 - momentum)
        own.lerp_(buffer, momentum)  # in place: `update` has it, too
        rows, columns = (
            slice(start, start + n) for start, n in zip(offset[1:], weights.shape[1:], strict=True)
        )
        orthogonal = _orthogonalized_in_parts(_whole_matrices(update))[:, rows, columns]
        weights.mul_(1 - rate * group["weight_decay"])
        # As large as AdamW's: see `build_optimizer`.
        weights.add_(orthogonal, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape[1:])))


def _whole_matrices(stack: Tensor) -> Tensor:
    """Return the whole matrices (E, N, K) of the experts that this rank holds. Collective if the
    matrices themselves are sharded (along N or K), which are then all-gathered; otherwise nothing
    is sent."""
    own, (first, *_) = local_shard(stack)
    distributed: Any = stack
    placements = distributed.placements if is_distributed(stack) else ()
    if not any(not each.is_replicate() and each.dim % stack.ndim for each in placements):
        return own
    whole: Tensor = distributed.full_tensor()
    return whole[first : first + len(own)]


def _orthogonalized_in_parts(matrices: Tensor) -> Tensor:
    """Return `orthogonalized(matrices)`; on a CPU it is called for one matrix after another. There
    a batched matmul rounds differently with the number of matrices, and an update would depend on
    how many experts a rank holds."""
    n_at_once = 1 if matrices.device.type == "cpu" else max(1, len(matrices))
    return torch.cat([orthogonalized(each) for each in matrices.split(n_at_once)])


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices (E, N, K) with about the same singular vectors as `matrices` and singular
    values near 1, in bf16, each by Newton-Schulz iterations on it alone."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)  # singular values of at most 1
    for _ in range(N_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
