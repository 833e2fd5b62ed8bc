"""Low-rank adapters (LoRA) for a plain model's linear layers; the model's code does not know.

A layer keeps its weight and its name. A and B become its parameters, and (alpha ÷ rank) · B A x is
added to its output (`adapted` in `parallel/linear.py`). If tensor parallelism shards the weight
along an axis, it also shards whichever of A and B has that axis; the other is replicated.

Shapes: r LoRA rank; n inputs and m outputs per layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from pentameter.config.schema import LoraConfig
from pentameter.planning.adapters import A, B


def add_adapters(model: nn.Module, paths: Iterable[str], lora: LoraConfig) -> None:
    """Freeze all parameters in `model`, a slice, and add trainable adapter parameters A (r, n) and
    B (m, r) to its linear layers, in place. `paths` are the adapted layers' in the full model;
    those that the slice lacks are skipped. Without a rank in `lora`, leave the model as it is.

    Call it before data parallelism shards the model. If a weight is a DTensor, so are its A and B.
    These are on the weight's device, uninitialized; initialize or load them afterwards.
    """
    if lora.rank is None:
        return
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_call_linear_layers)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which only the same kernel can read
    modules: dict[str, Any] = dict(model.named_modules())
    for module in (modules[path] for path in paths if path in modules):
        weight = module.weight
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
        module.lora_factor = lora.factor


def _call_linear_layers(module: nn.Module, arguments: object) -> None:
    """Forward pre-hook that does nothing. That a PyTorch transformer layer has any hook makes it
    call its linear layers in evaluation too. Without one it uses a kernel that reads their weights,
    and so leaves their adapters out."""


def _shard(full: Tensor, weight: DTensor, placement: Placement) -> DTensor:
    """Return the tensor `full` as a DTensor with `placement` on the weight's mesh, without
    communication."""
    return distribute_tensor(full, weight.device_mesh, [placement], src_data_rank=None)
