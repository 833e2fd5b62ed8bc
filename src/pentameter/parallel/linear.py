"""What a module computes in place of its own `forward`: on its local shards, by the styles of a
tensor mode; a block whose activations are recomputed; a linear layer in a run's arithmetic, and
with its adapter. The one way in which these come into a model.

Shapes: K inputs and N outputs of a layer, or of this rank's shard of it; r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.experts import GroupedLinear
from pentameter.model.gpt import TiedHead
from pentameter.model.loss import HeadLoss
from pentameter.model.matmul import PLAIN, Matmul
from pentameter.parallel.gradients import local
from pentameter.planning.adapters import A

Forward = Callable[..., Tensor]


def install_forwards(
    model: nn.Module, matmul: Matmul, forwards: Mapping[nn.Module, Forward]
) -> None:
    """Replace, in place and in one pass, the `forward` of each module that does not compute by its
    own: by that in `forwards`; by one that multiplies by `matmul`, for other linear layers,
    experts, head and loss; by one that adds its adapter, for such a linear layer that has one.
    Parameters, hooks and names in `state_dict()` stay.
    """
    for module in model.modules():
        if module in forwards:
            _replace(module, forwards[module])
            continue
        if matmul is not PLAIN:  # by which they multiply by themselves
            if isinstance(module, TiedHead | HeadLoss | GroupedLinear):
                _replace(module, partial(module.forward, matmul=matmul))
            elif type(module).forward is nn.Linear.forward:
                _replace(module, partial(_linear, matmul, module))
        if hasattr(module, A):
            _replace(module, partial(_with_adapter, matmul, module, module.forward))


def _replace(module: nn.Module, forward: Forward) -> None:
    """Set a module's `forward`, in place."""
    target: Any = module
    target.forward = forward


def _linear(matmul: Matmul, linear: Any, x: Tensor) -> Tensor:
    """Return a linear layer's output (…, N) for x (…, K)."""
    return matmul.linear(x, linear.weight, linear.bias)


def _with_adapter(matmul: Matmul, linear: Any, forward: Forward, x: Tensor) -> Tensor:
    """Return the output (…, N) of a linear layer and its adapter for x (…, K)."""
    return adapted(matmul, linear, x, forward(x))


def adapted(matmul: Matmul, linear: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return y (…, N), the output of a linear layer or of this rank's shard for x (…, K), plus
    that of its adapter, factor · B A x, if it has one."""
    if not hasattr(linear, A):
        return y
    a, b = linear.lora_a, linear.lora_b  # (r, K), (N, r)
    if not isinstance(x, DTensor):  # PyTorch's styles pass DTensors, ours local shards
        a, b = local(a), local(b)
    return y + linear.lora_factor * matmul.linear(matmul.linear(x, a), b)
