"""An optimizer whose groups come from the parameter table, not from guesses about names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from pentameter.config.schema import OptimizerConfig
from pentameter.plan.table import ParameterSpec


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    table: Sequence[ParameterSpec],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """One group that decays and one that does not, in the order of `named_parameters`.

    With `decay = "matrices"` only parameters the table marks (matrices and embeddings) decay;
    with `"all"` every parameter does, which is PyTorch's own default.
    """
    decays: Mapping[str, bool] = {spec.name: spec.decay for spec in table}
    decayed: list[Parameter] = []
    kept: list[Parameter] = []
    for name, parameter in named_parameters:
        (decayed if config.decay == "all" or decays[name] else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]],
    table: Sequence[ParameterSpec],
    config: OptimizerConfig,
) -> torch.optim.Optimizer:
    """AdamW or SGD over the table's groups; fused, one kernel for all parameters, where it exists.

    The learning rate here is a placeholder: `set_learning_rate` writes the schedule's each step.
    """
    groups = parameter_groups(named_parameters, table, config)
    devices = {p.device.type for group in groups for p in group["params"]}
    fused = devices <= {"cpu", "cuda", "mps"}
    if config.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused
        )
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
