"""The check that a planned run fits the memory of its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pentameter.errors import ConfigError
from pentameter.estimating.cluster import CONTEXT_BYTES
from pentameter.estimating.plan_estimates import plan_memory, plan_state_bytes
from pentameter.estimating.search import settings_that_fit
from pentameter.machine.capabilities import memory_bytes
from pentameter.planning.plan import Plan
from pentameter.train.compute import Compute


def check_device_memory(plan: Plan, compute: Compute, local_size: int) -> None:
    """Raise ConfigError, with the nearest settings that fit, if the Plan's peak exceeds the
    device's memory, or its offloaded tensors exceed the machine's memory."""
    is_gpt, offload, device = plan.built_by is None, plan.config.train.offload, compute.device
    precision, fused_dropout = compute.precision, compute.fused_dropout
    state = plan_state_bytes(plan).state_bytes
    # Only the state of a custom model is known.
    total = state
    if is_gpt:
        total = plan_memory(plan, precision, fused_dropout=fused_dropout).total_bytes
    needs = [(device, total)]
    if offload:
        needs = [(torch.device("cpu"), state), (device, max(0, total - state))]
    for where, needed in needs:
        there = memory_bytes(where)
        if there is None:
            continue
        n_sharing = 1 if where.type == "cuda" else local_size
        if where.type == "cuda":
            there -= int(CONTEXT_BYTES)
        if needed * n_sharing > there:
            fitting = []
            if is_gpt and not offload:
                usable = there / n_sharing
                fitting = settings_that_fit(plan, usable, precision, fused_dropout=fused_dropout)
            raise ConfigError(_too_large(plan, where, needed, there, n_sharing, fitting))


def _too_large(
    plan: Plan,
    where: torch.device,
    needed: int,
    there: int,
    n_sharing: int,
    fitting: Sequence[str],
) -> str:
    """Return the error message for a run that needs more memory than there is, with remedies."""
    whose = f"{needed / 1e9:,.1f} GB in the fullest process, and {n_sharing} share the "
    if n_sharing == 1:
        whose = f"{needed / 1e9:,.1f} GB, "
    remedy = f"{fitting[0] if fitting else ''} fits"
    if where.type == "cuda":
        remedy += ", and train.offload with parallel.zero takes less"
    if not fitting:
        offload = "train.offload with parallel.zero, " if where.type == "cuda" else ""
        remedy = (
            "choose a smaller model (--model.n-layers, --model.d-model), more processes with "
            f"parallel.zero, tensor or pipeline, {offload}or look at it with --dry-run"
        )
    return (
        f"a step of {plan.n_parameters:,} parameters, {plan.micro_batch_size} sequences at a time, "
        f"is planned to take {whose}{where.type} {'with' if n_sharing > 1 else 'has'} "
        f"{max(0, there) / 1e9:,.1f} GB; {remedy}. --force tries it all the same"
    )
