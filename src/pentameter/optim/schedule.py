"""The learning rate as a pure function of the step: there is nothing to save or to restore."""

from __future__ import annotations

import math

from pentameter.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """The rate of optimizer step `step` (0-based) under a resolved schedule.

    Warm-up is linear, `learning_rate · (step + 1) / warmup_steps`, so that step 0 already learns
    and the peak is reached at step `warmup_steps - 1`. Then:

    - `constant` stays;
    - `cosine` falls along half a cosine to `min_learning_rate`, reached at `decay_steps`
      (Loshchilov & Hutter 2017, one cycle), and stays there;
    - `step` multiplies by `gamma` every `decay_interval` steps, counted from step 0.
    """
    peak = optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return peak * schedule.gamma ** (step // schedule.decay_interval)
    assert schedule.decay_steps is not None  # the plan resolved it
    span = max(1, schedule.decay_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    low = schedule.min_learning_rate
    return low + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - low)
