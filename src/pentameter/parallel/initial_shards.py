"""Initial weights of a model of which this process holds shards: it draws those and no others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pentameter.model.initial import fill
from pentameter.parallel.local_parts import local_part
from pentameter.planning.architecture import ParameterSpec


def initialize_shards(model: nn.Module, table: Sequence[ParameterSpec], seed: int) -> None:
    """Set every parameter of a slice of the model to what the whole model has there, in place."""
    specs = {spec.name: spec for spec in table}
    for name, parameter in model.named_parameters():
        own, offset = local_part(parameter)
        region = tuple((start, start + size) for start, size in zip(offset, own.shape, strict=True))
        fill(specs[name], own, region, seed)
