"""What the choice of an optimizer implies: its momentum, and what it keeps beside each weight."""

from __future__ import annotations

from pentameter.config.schema import OptimizerConfig
from pentameter.plan.table import ParameterSpec

MUON_MOMENTUM = 0.95  # where the configuration leaves it out (Jordan et al. 2024)


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
