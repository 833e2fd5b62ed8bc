"""The learning rate as a pure function of the step: there is nothing to save or to restore."""

from __future__ import annotations

import math

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """Return the learning rate for optimizer step `step` (0-based, counted over the whole run)
    under a schedule that the plan resolved (no None left).

    The formulas below count steps from `schedule.start_step`. Earlier steps were made under another
    schedule, unknown to this one, and get the first step's rate.

    Warm-up is linear, `learning_rate · (step + 1) / warmup_steps`, so that step 0 already learns
    and the peak is reached at step `warmup_steps - 1`. Then:

    - `constant` stays;
    - `cosine` falls along half a cosine to `min_learning_rate`, reached at `decay_steps`
      (Loshchilov & Hutter 2017, one cycle), and stays there;
    - `linear` falls in a straight line to the same end;
    - `wsd` (warm-up, stable, decay: Hu et al. 2024, "MiniCPM", section 4) stays, then falls in a
      straight line over the last `cooldown_steps` of `decay_steps`;
    - `step` multiplies by `gamma` every `decay_interval` steps, warm-up steps included.
    """
    peak, low = optimizer.learning_rate, schedule.min_learning_rate
    step = max(0, step - schedule.start_step)
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    match schedule.name:
        case "constant":
            return peak
        case "step":
            assert schedule.decay_interval is not None  # the plan resolved it
            return peak * schedule.gamma ** (step // schedule.decay_interval)
        case "cosine":
            return low + 0.5 * (1 + math.cos(math.pi * _decayed_fraction(step, schedule))) * (
                peak - low
            )
        case "linear":
            progress = _decayed_fraction(step, schedule)
        case "wsd":
            assert schedule.cooldown_steps is not None  # the plan resolved it
            progress = _decayed_fraction(step, schedule, longest=schedule.cooldown_steps)
        case unknown:
            refuse_unknown(unknown, "schedule.name", "the learning rate")
    return (1 - progress) * peak + progress * low  # both ends exactly


def cooldown_start(schedule: ScheduleConfig) -> int | None:
    """Return the number of steps after which the rate of a `wsd` schedule that the plan resolved
    begins to fall: no step before depends on the run's length. None for other schedules."""
    if schedule.name != "wsd":
        return None
    assert schedule.decay_steps is not None
    assert schedule.cooldown_steps is not None
    first = max(schedule.warmup_steps, schedule.decay_steps - schedule.cooldown_steps)
    return schedule.start_step + first


def _decayed_fraction(step: int, schedule: ScheduleConfig, longest: int | None = None) -> float:
    """Return the completed fraction of the decay at `step`, counted from `schedule.start_step`: 0
    until the decay begins, 1 from `decay_steps` on. The decay begins after the warm-up. With
    `longest`, it begins at most `longest` steps before its end."""
    assert schedule.decay_steps is not None  # the plan resolved it
    first = schedule.warmup_steps
    if longest is not None:
        first = max(first, schedule.decay_steps - longest)
    span = max(1, schedule.decay_steps - first)
    return min(1.0, max(0, step - first) / span)
