"""Bytes that each process holds for the model's state: weights, gradients, optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pentameter.config.schema import Config, OptimizerConfig
from pentameter.plan.layout import Layout
from pentameter.plan.table import Axis, ParameterSpec, parameter_table

MUON_MOMENTUM = 0.95  # where the configuration leaves it out (Jordan et al. 2024)
TENSOR_AXES: frozenset[Axis] = frozenset({"vocab", "heads", "mlp"})
"""The axes that tensor-parallel processes divide; each parameter has at most one of them."""


@dataclass(frozen=True)
class StateMemory:
    """The fullest process's."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int


def momentum(optimizer: OptimizerConfig) -> float:
    """The momentum of SGD and Muon: their own default when it is not set."""
    if optimizer.momentum is not None:
        return optimizer.momentum
    return MUON_MOMENTUM if optimizer.name == "muon" else 0.0


def optimizer_slots(optimizer: OptimizerConfig, spec: ParameterSpec) -> int:
    """Numbers that the optimizer keeps beside each weight of a parameter."""
    if optimizer.name == "sgd":
        return 1 if momentum(optimizer) else 0
    return 1 if optimizer.name == "muon" and spec.is_block_matrix else 2


def tensor_dimension(spec: ParameterSpec) -> int | None:
    """The dimension of a parameter that tensor-parallel processes divide; None where each has it
    whole."""
    return next((dim for dim, axis in enumerate(spec.axes) if axis in TENSOR_AXES), None)


def local_elements(spec: ParameterSpec, tensor: int) -> int:
    """Numbers of a parameter that the fullest of `tensor` processes holds."""
    dim = tensor_dimension(spec)
    if dim is None or tensor == 1:
        return spec.n_elements
    cut = -(-spec.shape[dim] // tensor)
    return cut * math.prod(spec.shape[:dim] + spec.shape[dim + 1 :])


def state_memory(
    config: Config, layout: Layout, stages: Sequence[range], table: Sequence[ParameterSpec]
) -> StateMemory:
    """What the fullest process holds of the model's state."""
    element_bytes = 8 if config.train.precision == "fp64" else 4
    most = StateMemory(0, 0, 0)
    for index in range(layout.pipeline):
        specs = [
            spec
            for stage in layout.stages_of(index)
            for spec in parameter_table(
                config.model, first_layer=stages[stage].start, last_layer=stages[stage].stop
            )
        ]
        n = sum(local_elements(spec, layout.tensor) for spec in specs)
        n_optimizer = sum(
            local_elements(spec, layout.tensor) * optimizer_slots(config.optimizer, spec)
            for spec in specs
        )
        state = StateMemory(n * element_bytes, n * element_bytes, n_optimizer * element_bytes)
        most = max(most, state, key=lambda each: each.weights_bytes + each.optimizer_bytes)
    return most
