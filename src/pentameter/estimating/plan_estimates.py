"""A Plan's memory, communication and idle time, and the record that `plan.json` holds.

Activations, messages and a pipeline's idle time are unknown for a custom model, because its
operations are not listed; its weights, gradients and optimizer state are known.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pentameter.errors import ConfigError
from pentameter.estimating.communication import (
    StepCommunication,
    busiest,
    by_dimension,
    step_communication,
)
from pentameter.estimating.costs import Step
from pentameter.estimating.memory import Memory, StateBytes, state_bytes, step_memory
from pentameter.estimating.timeline import planned_bubble
from pentameter.formatting import size, whole
from pentameter.planning.plan import Plan


def step_of(plan: Plan, precision: str | None = None, *, fused_dropout: bool = False) -> Step:
    """Return a Plan's Step. `precision` is the run's, if the configuration leaves it open. With
    `fused_dropout` a GPU's kernels apply dropout to the attention weights, which are otherwise
    written out."""
    return Step(plan.config, plan.layout, plan.stages, precision, fused_dropout)


def plan_state_bytes(plan: Plan) -> StateBytes:
    """Return the fullest rank's bytes for weights, gradients and optimizer state. For the built-in
    GPT this is a `Memory`, in the configuration's precision, with dropped attention weights written
    out."""
    if plan.built_by is None:
        return step_memory(step_of(plan))
    tables = [[spec for spec in plan.table if spec.name in names] for names in plan.stage_names]
    return state_bytes(step_of(plan), tables)


def plan_memory(plan: Plan, precision: str | None = None, *, fused_dropout: bool = False) -> Memory:
    """Return the bytes that the fullest rank holds in a step; the arguments are `step_of`'s. Raises
    ConfigError for a custom model."""
    if plan.built_by is not None:
        raise ConfigError(f"the activations of the module of {plan.built_by} are not known")
    return step_memory(step_of(plan, precision, fused_dropout=fused_dropout))


def plan_communication(
    plan: Plan, rank: int = 0, precision: str | None = None
) -> StepCommunication:
    """Return the calls and bytes that a rank sends and receives in a step, by (dimension, kind).
    Raises ConfigError for a custom model."""
    if plan.built_by is not None:
        raise ConfigError(f"the messages of the module of {plan.built_by} are not known")
    return step_communication(step_of(plan, precision), rank)


def plan_bubble(plan: Plan) -> float | None:
    """Return the pipeline ranks' idle time ÷ their compute time: 0 without a pipeline, None for a
    custom model with one."""
    if plan.layout.pipeline == 1:
        return 0.0
    if plan.built_by is not None:
        return None
    return planned_bubble(step_of(plan))


def describe_plan(plan: Plan) -> str:
    """Return the model and its layout, the memory and the run's length, one line each."""
    steps, memory = plan.steps if plan.has_known_length else None, ""
    if plan.built_by is None:
        memory = f"memory  {size(plan_memory(plan).total_bytes)} in the fullest process\n"
    return (
        f"{plan.config.name}: {plan.n_parameters:,} parameters, {plan.layout}, micro-batch "
        f"{plan.micro_batch_size} × {plan.n_micro_batches}\n{memory}"
        f"run     {whole(steps)} steps × {whole(plan.tokens_per_step)} tokens"
    )


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return the Plan as `train --dry-run` prints it and a run folder's plan.json holds it; null
    for a custom model's unknown figures."""
    sent, held = None, plan_state_bytes(plan)
    if plan.built_by is None:
        sent = by_dimension(busiest(step_of(plan)))
    return {
        **plan.to_json(),
        "memory": {**asdict(held), "snapshot_bytes": held.snapshot_bytes},
        "communication": sent,
        "time": {"bubble_fraction": plan_bubble(plan)},
    }
