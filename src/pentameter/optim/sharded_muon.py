"""Muon for matrices that are sharded as DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pentameter.optim.plain_rules import Muon
from pentameter.parallel.local_shards import copy_shard, is_distributed


class ShardedMuon(Muon):
    """Muon that all-gathers each sharded matrix for its update, because the rule needs whole
    matrices.

    Every rank then computes the same update and keeps its shard. DTensor could also compute the
    update on the shards, but it sums bf16 matmuls in a different order for every layout, and the
    Newton-Schulz iteration amplifies that rounding to a difference of a thousandth.

    Collective: every rank must step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient, all-gathering sharded ones. Collective.
        `closure` must be None; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, options)

    def _update(self, parameter: Parameter, options: dict[str, Any]) -> None:
        """Update one parameter and its momentum, in place, by torch's Muon on the whole matrix.
        options: its group's settings (`lr`, `momentum`, …). Collective if it is sharded."""
        state = self.state[parameter]
        whole = Parameter(_gathered(parameter))
        whole.grad = _gathered(parameter.grad)
        rule = Muon([whole], **options)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        rule.state[whole]["momentum_buffer"] = _gathered(state["momentum_buffer"])
        rule.step()
        _keep_shard(parameter, whole)
        _keep_shard(state["momentum_buffer"], rule.state[whole]["momentum_buffer"])


def _gathered(tensor: Tensor | None) -> Tensor:
    """Return the whole tensor, without its autograd history: all-gathered if it is sharded (then
    collective), else the tensor itself."""
    assert tensor is not None
    distributed: Any = tensor.detach()
    whole: Tensor = distributed.full_tensor() if is_distributed(tensor) else distributed
    return whole


def _keep_shard(target: Tensor, whole: Tensor) -> None:
    if is_distributed(target):
        copy_shard(target, whole)
