"""Optimizers whose parameter groups (with and without weight decay) follow the model's parameter
table, a list with each parameter's name, shape and role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import OptimizerConfig
from pentameter.optim.expert_muon import ExpertMuon
from pentameter.optim.plain_rules import ADAM, SGD, Adam, AdamW, Muon
from pentameter.planning.architecture import ParameterSpec

NamedParameters = Iterable[tuple[str, Parameter]]

DECAYS_ALL = {"matrices": False, "all": True}
"""`optimizer.decay` → True if weight decay also acts on parameters that the table does not mark for
it."""


class JointOptimizer:
    """Several torch optimizers with disjoint parameters, used as one: `step()` updates all
    parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all its optimizers. They are the optimizers' own dicts, so
        writing to one has effect."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Update every parameter from its gradient."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of every parameter."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


AnyOptimizer = torch.optim.Optimizer | JointOptimizer


def parameter_groups(
    named_parameters: NamedParameters,
    table: Sequence[ParameterSpec],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer: the trainable parameters with weight decay
    (`config.weight_decay`), and those without (0), each in the order of `named_parameters`.

    named_parameters: (name, parameter) pairs. table: the model's parameters by name, each marked
    whether it decays. With `decay = "matrices"`, only marked parameters (matrices and embeddings)
    decay; with `"all"`, every parameter does, which is PyTorch's own default. Sharded parameters
    get one group per device mesh: an optimizer updates a group's parameters together, which is
    impossible across meshes.
    """
    decays_all = look_up(DECAYS_ALL, config.decay, "optimizer.decay", "the optimizer")
    decays: Mapping[str, bool] = {spec.name: spec.decay for spec in table}
    groups: dict[tuple[bool, Any], list[Parameter]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        kept = not (decays_all or decays[name])
        groups.setdefault((kept, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.0 if kept else config.weight_decay}
        for (kept, _), parameters in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def build_optimizer(
    named_parameters: NamedParameters,
    table: Sequence[ParameterSpec],
    config: OptimizerConfig,
    muon: type[torch.optim.Muon] = Muon,
) -> AnyOptimizer:
    """Build the configured optimizer over the trainable parameters, grouped by `parameter_groups`.

    named_parameters: (name, parameter) pairs. table: the model's parameters by name, with whether
    each decays and is a matrix in a block. muon: PyTorch's rule, or `ShardedMuon` if these matrices
    are sharded.

    For `optimizer.name = "muon"`, the result is a JointOptimizer: `muon` for matrices in blocks,
    ExpertMuon for those of experts, AdamW for all others. SGD, Adam and AdamW are fused (one kernel
    for all parameters) on CPU, CUDA and MPS, except for SGD with DTensors, for which torch has no
    fused update. The initial learning rate is a placeholder: `set_learning_rate` writes the
    scheduled rate before each step.
    """
    named = [pair for pair in named_parameters if pair[1].requires_grad]
    if config.name != "muon":
        return _one_rule(named, table, config)
    for_muon = {spec.name for spec in table if spec.is_orthogonalized}
    parts: list[torch.optim.Optimizer] = []
    if matrices := [(n, p) for n, p in named if n in for_muon and p.ndim == 2]:
        matrix_rule = muon(
            parameter_groups(matrices, table, config),
            lr=config.learning_rate,
            momentum=config.momentum_used,
            # Updates as large as AdamW's, 0.2 · √max(rows, columns) (Liu et al. 2025, "Muon is
            # scalable for LLM training"), so that one learning rate and one decay serve both.
            adjust_lr_fn="match_rms_adamw",
        )
        parts.append(matrix_rule)
    if stacks := [(n, p) for n, p in named if n in for_muon and p.ndim == 3]:
        groups = parameter_groups(stacks, table, config)
        rate, momentum = config.learning_rate, config.momentum_used
        parts.append(ExpertMuon(groups, lr=rate, momentum=momentum))
    # Torch refuses an empty optimizer, and adapters train matrices only.
    if rest := [(n, p) for n, p in named if n not in for_muon]:
        parts.append(_one_rule(rest, table, config))
    return JointOptimizer(*parts)


def _one_rule(
    named: NamedParameters, table: Sequence[ParameterSpec], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build one torch optimizer over `named`, (name, parameter) pairs: SGD, Adam or AdamW by
    `config.name`; for `muon`, AdamW, which updates the parameters that Muon does not."""
    groups = parameter_groups(named, table, config)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = {parameter.device.type for parameter in parameters} <= {"cpu", "cuda", "mps"}
    rate, betas, eps = config.learning_rate, config.betas, config.eps
    match config.name:
        case "sgd":
            # DTensor supports Adam's fused update, not SGD's.
            fused = fused and not any(hasattr(each, "device_mesh") for each in parameters)
            return SGD(groups, lr=rate, momentum=config.momentum_used, fused=fused)
        case "adam":
            return Adam(groups, lr=rate, betas=betas, eps=eps, fused=fused)
        case "adamw" | "muon":
            return AdamW(groups, lr=rate, betas=betas, eps=eps, fused=fused)
        case unknown:
            refuse_unknown(unknown, "optimizer.name", "the optimizer")


def set_learning_rate(optimizer: AnyOptimizer, rate: float) -> None:
    """Set the learning rate in every parameter group, from the next step on. If a custom optimizer
    has it in a tensor (as compiled updates need it), that tensor is filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def can_step_unless(optimizer: AnyOptimizer) -> bool:
    """Return True if `step_unless` accepts a tensor for this optimizer, which must be a fused Adam
    or AdamW. Fused SGD would leave the first momentum uninitialized, and Muon or a custom optimizer
    would ignore the tensor."""
    return type(optimizer) in ADAM and all(group["fused"] for group in optimizer.param_groups)


def step_unless(optimizer: AnyOptimizer, is_off: torch.Tensor | None) -> None:
    """Make the optimizer's step, unless `is_off` holds 1: then weights and state stay as they are.
    The host does not wait for the device. `is_off` is a float32 tensor () on the parameters'
    device, allowed only if `can_step_unless` is true; None always makes the step.

    `torch.amp.GradScaler` tells a fused optimizer about an infinite gradient in the same way. The
    kernel returns early: nothing is multiplied by zero, nothing decays.
    """
    if is_off is None:
        optimizer.step()
        return
    fused: Any = optimizer
    fused.found_inf = is_off
    try:
        fused.step()
    finally:
        del fused.found_inf
