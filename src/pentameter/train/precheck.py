"""Checks of a run before its first step: refusals of what cannot be, warnings of what misleads."""

from __future__ import annotations

import torch

from pentameter.data.batches.step import TrainingBatches
from pentameter.data.shards.dataset import Dataset
from pentameter.errors import ConfigError
from pentameter.machine.capabilities import memory_bytes
from pentameter.planning.plan import Plan

FEW_WINDOWS = 8
"""Contexts (model.context_length tokens) that a validation split should have to be relied on."""

MANY_PASSES = 10
"""Passes over the text from which on a small model without dropout may overfit."""


def check_run(
    plan: Plan,
    dataset: Dataset,
    batches: TrainingBatches,
    device: torch.device,
    local_size: int = 1,
) -> list[str]:
    """Warnings for the user, a line each; `local_size` processes share the machine.

    Raises ConfigError when the run's state does not fit the device's memory, or when it waits for
    evaluations and nothing is held out.
    """
    _check_memory(plan, device, local_size)
    warnings = []
    train, val = dataset.split("train"), dataset.split("val")
    if batches.tokens_per_epoch < train.n_tokens:
        warnings.append(
            f"data.order='{plan.config.data.order}' reads {batches.tokens_per_epoch:,} of "
            f"{train.n_tokens:,} tokens: documents are cut after model.context_length="
            f"{plan.config.model.context_length}; data.packing=true reads them whole"
        )
    asked = plan.config.data.validation_fraction > 0 or plan.config.data.validation_path is not None
    if asked and plan.config.train.eval_interval is not None and val.n_tokens < 2:
        advice = (
            "use data.split_by='position', more documents, or data.validation_path"
            if plan.config.data.split_by == "document"
            else "use a longer text, or data.validation_path"
        )
        patience = plan.config.train.patience
        if patience is not None:
            raise ConfigError(
                f"train.patience={patience} counts evaluations, and the validation split has "
                f"{val.n_tokens} tokens; {advice}, or leave patience out"
            )
        warnings.append(f"nothing is held out, so nothing will be evaluated; {advice}")
    return warnings + _does_not_fit(plan, val.n_tokens)


def _does_not_fit(plan: Plan, n_val: int) -> list[str]:
    """Warnings where the settings ask more of the text, or of the run's length, than there is."""
    warnings, config = [], plan.config
    evaluates = config.train.eval_interval is not None
    if evaluates and 2 <= n_val < FEW_WINDOWS * config.model.context_length:
        warnings.append(
            f"the validation loss will be a rough measure: only {n_val:,} tokens are held out. "
            "Use a longer text, or raise data.validation_fraction="
            f"{config.data.validation_fraction}"
        )
    warmup, length = config.schedule.warmup_steps, plan.steps - config.schedule.start_step
    if 2 * warmup > length:
        warnings.append(
            f"schedule.warmup_steps={warmup} take most of the {length} steps that the schedule "
            "has: the learning rate hardly falls again. Set fewer, or train longer"
        )
    n_passes = plan.epoch(plan.steps)
    is_guarded = config.model.dropout > 0 or config.train.patience is not None
    if n_passes >= MANY_PASSES and not is_guarded:
        warnings.append(
            f"train.steps={plan.steps} read the text {n_passes} times: the model may learn it by "
            "heart, and its validation loss rise. Use more text, or fewer steps, "
            "model.dropout=0.2 or train.patience=3"
        )
    return warnings


def _check_memory(plan: Plan, device: torch.device, local_size: int) -> None:
    """Raise ConfigError where weights, gradients and optimizer exceed the memory of the device."""
    needed = plan.weights_bytes + plan.gradients_bytes + plan.optimizer_bytes
    offload = plan.config.train.offload
    where = torch.device("cpu") if offload else device
    there = memory_bytes(where)
    n_sharing = 1 if where.type == "cuda" else local_size
    if there is not None and needed * n_sharing > there:
        whose = f"{needed / 1e9:,.1f} GB in the fullest process, and {n_sharing} share the "
        if n_sharing == 1:
            whose = f"{needed / 1e9:,.1f} GB, "
        remedy = "train.offload with parallel.zero, " if where.type == "cuda" else ""
        raise ConfigError(
            f"weights, gradients and optimizer of {plan.n_parameters:,} parameters take {whose}"
            f"{where.type} {'with' if n_sharing > 1 else 'has'} {there / 1e9:,.1f} GB; choose a "
            "smaller model (--model.n-layers, --model.d-model), more processes with parallel.zero, "
            f"tensor or pipeline, {remedy}or look at it with --dry-run"
        )
