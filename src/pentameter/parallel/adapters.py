"""Low-rank adapters put on a plain model's linear layers, from outside; the model does not know.

A layer keeps its weight and its name; A and B become parameters of its own, and a forward hook adds
(alpha ÷ rank) · B A x to its result. Where tensor parallelism has cut the weight, A and B are cut
with it: the one that shares the divided axis is divided, the other whole in each process.

Shapes: r rank; of a layer n inputs and m outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from pentameter.parallel.tensor_parallel import own_part
from pentameter.planning.adapters import A, B, adapter_factor
from pentameter.planning.plan import Plan


def add_adapters(model: nn.Module, paths: Iterable[str], plan: Plan) -> None:
    """Freeze a slice of the model and adapt those of the linear layers at `paths` that it has, as
    the plan says, in place.

    For after its matrices are cut and before its state is shared out; the adapters are on the
    weights' device and meant to be initialised or loaded afterwards.
    """
    model.requires_grad_(False)
    lora = plan.config.lora
    assert lora.rank is not None
    modules = dict(model.named_modules())
    for path in paths:
        module = modules.get(path)
        if module is None:
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        m, n = weight.shape
        a, b = weight.new_empty(lora.rank, n), weight.new_empty(m, lora.rank)
        if isinstance(weight, DTensor):
            (place,) = weight.placements
            a, b = (
                _cut(torch.empty(shape, dtype=weight.dtype, device="meta"), weight, placement)
                for shape, placement in (
                    ((lora.rank, n), place if place == Shard(1) else Replicate()),
                    ((m, lora.rank), place if place == Shard(0) else Replicate()),
                )
            )
        module.register_parameter(A, Parameter(a))
        module.register_parameter(B, Parameter(b))
        # First of all hooks: before the one that adds up the processes' partial sums.
        module.register_forward_hook(partial(_adapted, adapter_factor(lora)), prepend=True)


def _cut(whole: Tensor, weight: DTensor, placement: Placement) -> DTensor:
    return distribute_tensor(whole, weight.device_mesh, [placement], src_data_rank=None)


def _adapted(factor: float, module: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> Tensor:
    """The layer's result (…, m) with what its adapter adds, of inputs (…, n)."""
    x, a, b = inputs[0], module.lora_a, module.lora_b
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    if not isinstance(x, DTensor):  # PyTorch's styles pass DTensors, ours local ones
        a, b = own_part(a), own_part(b)
    return result + factor * F.linear(F.linear(x, a), b)
