"""Replacement forwards, the one way in which parallelism and precision enter a plain model: a
tensor mode's computation on local shards, activation recomputation, the run's matmul, adapters
(LoRA).

Shapes: K inputs and N outputs of a layer, or of this rank's shard of it; r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.adapter import adapter_of
from pentameter.model.experts import GroupedLinear
from pentameter.model.gpt import TiedHead
from pentameter.model.loss import HeadLoss
from pentameter.model.matmul import PLAIN, PRECISE_SUMS, Matmul
from pentameter.parallel.gradients import local
from pentameter.planning.adapters import A

Forward = Callable[..., Tensor]


def install_forwards(
    model: nn.Module, matmul: Matmul, forwards: Mapping[nn.Module, Forward]
) -> None:
    """Replace the `forward` methods of the model's modules, in place, by those that the run's
    layout and precision need. Parameters, hooks and the names in `state_dict()` stay.

    A module that is a key in `forwards` gets the function there. Any other linear layer, experts'
    linear, tied head or head loss gets a forward that multiplies by `matmul`; if that is PyTorch's
    plain matmul, it keeps its own forward, except the head loss with PRECISE_SUMS. A linear layer
    without an entry but with an adapter (LoRA) then gets a forward that adds the adapter's output.
    """
    in_layers = matmul is not PLAIN and matmul is not PRECISE_SUMS
    for module in model.modules():
        if module in forwards:
            _replace(module, forwards[module])
            continue
        if matmul is not PLAIN and isinstance(module, HeadLoss):
            _replace(module, partial(module.forward, matmul=matmul))
        if in_layers:  # else they multiply by themselves
            if isinstance(module, TiedHead | GroupedLinear):
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
    """Return a linear layer's output (…, N) for x (…, K), computed by `matmul`."""
    return matmul.linear(x, linear.weight, linear.bias)


def _with_adapter(matmul: Matmul, linear: Any, forward: Forward, x: Tensor) -> Tensor:
    """Return a linear layer's output (…, N) for x (…, K), computed by `forward`, plus its adapter's
    output."""
    return adapted(matmul, linear, x, forward(x))


def adapted(matmul: Matmul, linear: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return y (…, N) plus the output of the linear layer's adapter, factor · B A x with factor
    alpha ÷ rank; y itself if it has none. y is the layer's output for x (…, K), full or this rank's
    shard. `matmul` multiplies by A and B."""
    adapter = adapter_of(linear)
    if adapter is None:
        return y
    a, b, factor = adapter
    if not isinstance(x, DTensor):  # PyTorch's styles pass DTensors, ours local shards
        a, b = local(a), local(b)
    return y + factor * matmul.linear(matmul.linear(x, a), b)
