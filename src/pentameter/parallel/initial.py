"""Initial weights of a model of which this process holds shards: it draws those and no others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.initial import Region, fill
from pentameter.plan.table import ParameterSpec


def initialize_shards(model: nn.Module, table: Sequence[ParameterSpec], seed: int) -> None:
    """Set every parameter of a slice of the model to what the whole model has there, in place."""
    specs = {spec.name: spec for spec in table}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            fill(specs[name], own.detach(), local_region(parameter), seed)


def local_region(tensor: Tensor) -> Region:
    """Which rows (and columns) of the whole tensor this process holds: (start, stop) of each
    dimension."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    chunks = tensor.__create_chunk_list__()
    if not chunks or 0 in tensor.to_local().shape:
        return tuple((0, 0) for _ in tensor.shape)
    (chunk,) = chunks
    return tuple(
        (start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )
