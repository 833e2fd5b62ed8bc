"""A Plan's memory, communication and idle time without a cluster, and the record in `plan.json`.

A Plan is a resolved configuration (sharding, batch, steps). Activations, messages and a pipeline's
idle time are unknown for a custom model, because its operations are not listed; its weights,
gradients and optimizer state are known.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pentameter.errors import ConfigError
from pentameter.estimating.bytes.communication import busiest, by_dimension
from pentameter.estimating.bytes.costs import Step
from pentameter.estimating.bytes.memory import Memory, StateBytes, state_bytes, step_memory
from pentameter.estimating.seconds.timeline import planned_bubble
from pentameter.formatting import size, whole
from pentameter.planning.plan import Plan


def step_of(
    plan: Plan,
    precision: str | None = None,
    *,
    drops_by_blocks: bool = False,
    imbalance: float = 1.0,
) -> Step:
    """Return the Step (one optimizer step in a layout) that a Plan's estimates are computed from.
    `precision` is the run's matmul precision; None takes `train.precision`, with fp32 for `auto`.
    With `drops_by_blocks`, GPU kernels apply dropout to the attention weights, which are otherwise
    written out. `imbalance` is the most rows that a rank's experts get ÷ the mean over ranks."""
    return Step(plan.config, plan.layout, plan.stages, precision, drops_by_blocks, imbalance)


def plan_state_bytes(plan: Plan) -> StateBytes:
    """Return the fullest rank's estimated bytes for weights, gradients and optimizer state. For the
    built-in GPT this is a `Memory`, which adds activations, in the configuration's precision, with
    attention dropout writing out its weights."""
    if plan.built_by is None:
        return step_memory(step_of(plan))
    tables = [[spec for spec in plan.table if spec.name in names] for names in plan.stage_names]
    return state_bytes(step_of(plan), tables)


def plan_memory(
    plan: Plan,
    precision: str | None = None,
    *,
    drops_by_blocks: bool = False,
    imbalance: float = 1.0,
) -> Memory:
    """Return the estimated bytes that the fullest rank holds in a step. `precision` is the run's
    matmul precision; None takes `train.precision`, with fp32 for `auto`. With `drops_by_blocks`,
    kernels do not write out dropped attention weights; `imbalance` is the most rows that a rank's
    experts get ÷ the mean over ranks. Raises ConfigError for a custom model, whose activations are
    not known."""
    if plan.built_by is not None:
        raise ConfigError(f"the activations of the module of {plan.built_by} are not known")
    step = step_of(plan, precision, drops_by_blocks=drops_by_blocks, imbalance=imbalance)
    return step_memory(step)


def plan_bubble(plan: Plan) -> float | None:
    """Return the pipeline ranks' idle time ÷ their compute time, simulated with passes that take
    time in proportion to their multiplications: 0 without a pipeline, None for a custom model with
    one."""
    if plan.layout.pipeline == 1:
        return 0.0
    if plan.built_by is not None:
        return None
    return planned_bubble(step_of(plan))


def describe_plan(plan: Plan) -> str:
    """Return lines of text with the model and its layout, the fullest rank's memory (unless the
    model is custom) and the run's length."""
    steps, memory = plan.steps if plan.has_known_length else None, ""
    if plan.built_by is None:
        memory = f"memory  {size(plan_memory(plan).total_bytes)} in the fullest process\n"
    return (
        f"{plan.config.name}: {plan.n_parameters:,} parameters, {plan.layout}, micro-batch "
        f"{plan.micro_batch_size} × {plan.n_micro_batches}\n{memory}"
        f"run     {whole(steps)} steps × {whole(plan.tokens_per_step)} tokens"
    )


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return the JSON object that `train --dry-run` prints and a run folder's plan.json holds: the
    Plan's figures, and the estimates "memory" (bytes on the fullest rank), "communication" (per
    step, of the rank with the most) and "time" (the bubble). Figures that are unknown for a custom
    model are None."""
    sent, held = None, plan_state_bytes(plan)
    if plan.built_by is None:
        sent = by_dimension(busiest(step_of(plan)))
    return {
        **plan.to_json(),
        "memory": {**asdict(held), "snapshot_bytes": held.snapshot_bytes},
        "communication": sent,
        "time": {"bubble_fraction": plan_bubble(plan)},
    }
