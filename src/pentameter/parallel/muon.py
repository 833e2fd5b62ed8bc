"""Muon for sharded matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from pentameter.parallel.local_parts import copy_part


class ShardedMuon(torch.optim.Muon):
    """Muon that gathers each sharded matrix for its update, as the rule needs whole ones.

    Every process then makes the same update and keeps its part. On the parts themselves DTensor
    could compute it too, but adds up products of bf16 in another order for every layout, and
    Newton and Schulz's iteration makes a difference of a thousandth of that.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter from its gradient. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, options)

    def _update(self, parameter: Parameter, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        whole = Parameter(_gathered(parameter))
        whole.grad = _gathered(parameter.grad)
        rule = torch.optim.Muon([whole], **options)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        rule.state[whole]["momentum_buffer"] = _gathered(state["momentum_buffer"])
        rule.step()
        _keep_part(parameter, whole)
        _keep_part(state["momentum_buffer"], rule.state[whole]["momentum_buffer"])


def _gathered(tensor: Tensor | None) -> Tensor:
    """The whole tensor; where it is whole already, itself."""
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _keep_part(own: Tensor, whole: Tensor) -> None:
    if isinstance(own, DTensor):
        copy_part(own, whole)
