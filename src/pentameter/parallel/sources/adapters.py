"""Low-rank adapters (LoRA), attached to a plain model's linear layers from outside; the model does
not know.

A layer keeps its weight and its name. A and B become its parameters, and it adds (alpha ÷ rank) ·
B A x to its output. If tensor parallelism shards the weight, it also shards the one that
has the sharded axis, A or B; the other is replicated.

Shapes: r LoRA rank; n inputs and m outputs per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from pentameter.model.matmul import Matmul
from pentameter.parallel.linear import adapt
from pentameter.planning.adapters import A, B
from pentameter.planning.plan import Plan


def add_adapters(model: nn.Module, plan: Plan, matmul: Matmul) -> None:
    """Freeze a slice and adapt, in place, those of the plan's adapted linear layers that it has.

    Call it before data parallelism shards the model. A weight that is already a DTensor gets
    DTensor adapters, A (r, n) and B (m, r). Adapters are on the weight's device, uninitialized;
    initialize or load them afterwards.
    """
    model.requires_grad_(False)
    lora = plan.config.lora
    assert lora.rank is not None
    modules = dict(model.named_modules())
    for path in plan.adapted_modules:
        module = modules.get(path)
        if module is None:
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        m, n = weight.shape
        a, b = weight.new_empty(lora.rank, n), weight.new_empty(m, lora.rank)
        if isinstance(weight, DTensor):
            (sharding,) = weight.placements
            a, b = (
                _shard(torch.empty(shape, dtype=weight.dtype, device="meta"), weight, placement)
                for shape, placement in (
                    ((lora.rank, n), sharding if sharding == Shard(1) else Replicate()),
                    ((m, lora.rank), sharding if sharding == Shard(0) else Replicate()),
                )
            )
        module.register_parameter(A, Parameter(a))
        module.register_parameter(B, Parameter(b))
        adapt(module, lora.factor, matmul)


def _shard(full: Tensor, weight: DTensor, placement: Placement) -> DTensor:
    """Shard `full` over the weight's mesh, without communication."""
    return distribute_tensor(full, weight.device_mesh, [placement], src_data_rank=None)
