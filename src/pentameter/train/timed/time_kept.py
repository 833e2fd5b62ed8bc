"""The hook that holds a run of `train --time` to its time. It prints how long the run took, and
once moves the run's end, as its learning rate would begin to fall, if the machine's speed has
changed.

Until a `wsd` schedule cools down, no step depends on the run's length. So the run is stopped there
and resumed with another `train.steps`, as `--resume auto` allows: the result is still a function of
the configuration in the run folder.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from pentameter.evaluate.sampled_split import SampledSplit
from pentameter.formatting import duration
from pentameter.optim.schedule import cooldown_start
from pentameter.record.events import EvalMetrics, RunEnd, StepMetrics
from pentameter.train.evaluations import SAMPLE
from pentameter.train.run import TrainingRun
from pentameter.train.timed.time_budget import TimeBudget

TOLERANCE = 0.06
"""Fraction of the time by which a run may miss it before its end is moved."""
LEAST_COOL_DOWN = 20
"""The cool-down, however late it begins, lasts at least 1 step in this many of those made."""
WINDOW_STEPS = 50
"""Number of latest steps whose median time predicts the next ones."""


@dataclass(frozen=True)
class MovedEnd:
    """A new length for a run that would miss its time: `steps` in all, with the learning rate
    falling over the last `cooldown_steps`."""

    steps: int
    cooldown_steps: int


class TimeKept:
    """The hook that compares a run with its time budget. It may stop the run once to change its
    length; `moved` is then the length to resume with, else None. It does not if `is_moved` says
    that the end was moved before, or if an earlier command made steps of the budget's time, which
    is unknown: the first of these steps follows `begins_at`."""

    def __init__(self, budget: TimeBudget, *, is_moved: bool = False, begins_at: int = 0) -> None:
        self._budget, self._is_moved, self._begins_at = budget, is_moved, begins_at
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._made_at = time.perf_counter()
        self._starting_seconds = 0.0
        self._evaluation_seconds = self._last_evaluation_seconds = 0.0
        self._n_steps = 0
        self._began_before = False
        self.moved: MovedEnd | None = None

    def on_start(self, run: TrainingRun) -> None:
        """Record the time that the start took, and whether an earlier command began the run."""
        self._starting_seconds = time.perf_counter() - self._made_at
        self._began_before = run.state.step > self._begins_at and not self._is_moved

    def on_eval(self, run: TrainingRun, metrics: EvalMetrics) -> None:
        """Record an evaluation's time."""
        self._evaluation_seconds = self._last_evaluation_seconds = metrics.seconds
        if isinstance(sample := run.evaluations.get(SAMPLE), SampledSplit):
            whole = sample.split.assistant or sample.split  # evaluated at the end
            self._last_evaluation_seconds *= 1 + whole.n_tokens / sample.n_targets

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Set `moved` and stop the run if it is predicted to miss its time by more than TOLERANCE.
        This is checked under a `wsd` schedule only, after its warm-up and until its learning rate
        begins to fall."""
        self._n_steps += 1
        if self._n_steps == 1:
            return  # it may have compiled
        self._recent.append(step.step_seconds)
        if self._is_moved or self._began_before or run.config.schedule.name != "wsd":
            return
        self.moved = self._moved_end(run, step.step)
        if self.moved is not None:
            fewer = self.moved.steps < run.plan.steps
            run.stop(
                f"the machine is {'slower' if fewer else 'faster'} than measured, so the run is to "
                f"have {self.moved.steps:,} steps instead of {run.plan.steps:,}"
            )

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Print the time that was asked for and the time taken, unless the run is to resume."""
        if self.moved is None:
            asked, took = duration(self._budget.asked), duration(self._budget.used)
            what = "this command alone took" if self._began_before else "took"
            if self._budget.before and not self._began_before:
                what = f"of which {duration(self._budget.seconds)} were left; took"
            run.console.say(f"asked {asked}, {what} {took}")

    def _moved_end(self, run: TrainingRun, step: int) -> MovedEnd | None:
        schedule, budget = run.config.schedule, self._budget
        assert schedule.decay_steps is not None
        assert schedule.cooldown_steps is not None
        cools_at = cooldown_start(schedule)
        assert cools_at is not None
        if self.moved is not None or not schedule.warmup_steps <= step <= cools_at:
            return None
        if len(self._recent) < min(10, cools_at - self._begins_at - 1):
            return None
        interval = run.config.train.eval_interval
        pace = median(self._recent)
        if isinstance(interval, int):
            pace += self._evaluation_seconds / interval
        closing = self._budget.closing_seconds + self._last_evaluation_seconds
        # Seconds beyond the budget if the rate fell from here on.
        late = schedule.cooldown_steps * pace + closing - budget.left
        overrun = late + (cools_at - step) * pace
        tolerated = TOLERANCE * budget.seconds
        is_late = late >= 0 and overrun > tolerated
        is_early = step == cools_at and -late > tolerated
        if not (is_late or is_early):
            return None
        left = budget.left - closing - self._starting_seconds
        # A model whose rate never fell is much worse than one that is a little late.
        n_left = max(1, step // LEAST_COOL_DOWN, round(left / pace))
        return MovedEnd(step + n_left, min(n_left, schedule.cooldown_steps))
