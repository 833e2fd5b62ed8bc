"""What the choice of an optimizer implies: its momentum, and what it keeps beside each weight."""

from __future__ import annotations

from pentameter.config.choices import MOMENTUM, look_up, refuse_unknown
from pentameter.config.schema import OptimizerConfig
from pentameter.planning.architecture import ParameterSpec


def momentum(optimizer: OptimizerConfig) -> float:
    """The momentum of SGD and Muon: their own default when it is not set."""
    if optimizer.momentum is not None:
        return optimizer.momentum
    return look_up(MOMENTUM, optimizer.name, "optimizer.name", "the planner") or 0.0


def optimizer_slots(optimizer: OptimizerConfig, spec: ParameterSpec) -> int:
    """Numbers that the optimizer keeps beside each weight of a parameter."""
    match optimizer.name:
        case "adamw" | "adam":
            return 2
        case "sgd":
            return 1 if momentum(optimizer) else 0
        case "muon":
            return 1 if spec.is_block_matrix else 2
        case unknown:
            refuse_unknown(unknown, "optimizer.name", "the planner's memory")
