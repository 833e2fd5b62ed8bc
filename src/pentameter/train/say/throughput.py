"""The speed of a run's steps: tokens per second, MFU and the time left, and a warning if steps are
slower than planned."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Self

from pentameter.machine.load.other_programs import BusyTime
from pentameter.machine.this_cluster import SlowStepWarning, slow_step_warning
from pentameter.planning.mfu import model_flops
from pentameter.planning.plan import Plan
from pentameter.record.events import StepMetrics
from pentameter.train.compute import Compute
from pentameter.train.faults.pace import OwnTime
from pentameter.train.run import TrainingRun

WINDOW_STEPS = 20
"""Number of latest steps whose median time predicts the remaining ones."""
SMOOTHING_SHARE, SMOOTHING_SECONDS = 0.05, 10.0
"""Time constant for smoothing the predicted end: this fraction of the time left, or these seconds
if longer (near the end half the time left)."""

MOST_MEASUREMENTS = 3
"""Largest number of new measurements of the matmul rate in a run; each takes 0.3 s."""

SETTLING_STEPS, COMPARED_STEPS = 5, 20


class Throughput:
    """Context manager that times steps: run each step within `with throughput:`, then call
    `end_steps`. Its clock is monotonic, so no rate is negative. A host may launch several steps
    before it waits for its device: one `end_steps` then ends them all, and each counts with their
    mean time."""

    def __init__(self, plan: Plan, compute: Compute) -> None:
        self._tokens_per_step = plan.tokens_per_step
        self._flops_per_token = plan.flops_per_token
        self._ceiling_flops = compute.ceiling_flops * plan.layout.world_size
        self._world_size = plan.layout.world_size
        self._measure_again = compute.measure_again
        self._n_measured = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._n_steps = 0
        self._countdown = _Countdown()
        self._start = self._seconds = self._reading_seconds = 0.0
        self.step_seconds = 0.0
        """Seconds that the latest step took."""
        self.input_seconds = 0.0
        """Seconds that the latest step waited for its batch."""
        is_measured = plan.layout.world_size > 1 and compute.device.type == "cpu"
        self._busy = BusyTime() if is_measured else None
        self._busy_start = self._own_seconds = self._all_seconds = 0.0
        self._n_untold = 0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        if self._busy is not None:
            self._busy_start = self._busy.seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds += time.perf_counter() - self._start
        if self._busy is not None:
            self._own_seconds += self._busy.seconds() - self._busy_start

    @contextmanager
    def reading_batch(self) -> Iterator[None]:
        """Context manager, used inside `with throughput:`, around reading a batch: its time also
        counts as `input_seconds`."""
        start = time.perf_counter()
        yield
        self._reading_seconds += time.perf_counter() - start
        if self._busy is not None:  # a disk that is waited for is this rank's own, too
            self._own_seconds += time.perf_counter() - start
            self._busy_start = self._busy.seconds()

    def end_steps(self, n_steps: int) -> None:
        """End `n_steps` steps: each took an equal part of the time measured since the last call."""
        self.step_seconds = self._seconds / n_steps
        self.input_seconds = self._reading_seconds / n_steps
        self._all_seconds += self._seconds
        self._n_untold += n_steps
        self._seconds = self._reading_seconds = 0.0
        self._raise_ceiling()
        if self._n_steps == 1:
            self._recent.clear()  # the first step compiled, and predicts nothing about the rest
        self._n_steps += n_steps
        self._recent.extend([self.step_seconds] * n_steps)

    def take_own_time(self) -> OwnTime | None:
        """Return the mean time per step that this rank itself worked, without its waits for other
        ranks, over the steps since the last call. Return None if there were no such steps, in a run
        of a single process, and on a GPU, where a wait for other ranks cannot be told from work."""
        n, own, whole = self._n_untold, self._own_seconds, self._all_seconds
        self._n_untold, self._own_seconds, self._all_seconds = 0, 0.0, 0.0
        return OwnTime(own / n, whole / n, n) if n and self._busy is not None else None

    def close(self) -> None:
        """Stop measuring this rank's own time."""
        if self._busy is not None:
            self._busy.close()

    @property
    def tokens_per_second(self) -> float:
        """Tokens seen per second in the latest step, on all ranks, padding included."""
        return self._tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization in the latest step, a fraction: FLOPs per second, padding
        included, ÷ the peak of all devices. None if either is unknown."""
        if self._flops_per_token is None or not self._ceiling_flops:
            return None
        return self._achieved_flops / self._ceiling_flops

    @property
    def _achieved_flops(self) -> float:
        return model_flops(self._flops_per_token or 0, self.tokens_per_second)

    def _raise_ceiling(self) -> None:
        """If the latest step was faster than the measured peak rate of matmuls, the machine was
        busy when that was measured: measure it again, at most MOST_MEASUREMENTS times in all.
        Afterwards the peak is at least the step's own FLOPs per second, so that MFU never exceeds
        1."""
        if self._measure_again is None or self._achieved_flops <= self._ceiling_flops:
            return
        if self._n_measured < MOST_MEASUREMENTS:
            self._n_measured += 1
            self._ceiling_flops = self._measure_again().flops * self._world_size
        self._ceiling_flops = max(self._ceiling_flops, self._achieved_flops)

    def eta_seconds(self, steps_left: int) -> float:
        """Return the predicted seconds until the run ends, `steps_left` steps from now."""
        return self._countdown.seconds(self._n_steps, steps_left, median(self._recent))


class _Countdown:
    """Predicts the time left. The prediction is smoothed, since a busy moment of the machine would
    move it by hours. Each step is expected to take the latest median; evaluations, samples and
    saves as much per step as they took so far in this process."""

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._asked_step = 0
        self._asked_at = self._end = 0.0  # seconds on the monotonic clock
        self._other_seconds = 0.0

    def seconds(self, step: int, steps_left: int, pace: float) -> float:
        """Return the predicted seconds left: `step` steps are made in this process, `steps_left`
        are to be made, each of `pace` seconds. Call it at each step; it updates the smoothing."""
        now = time.perf_counter()
        if self._first_step is None:
            self._first_step = step
        else:
            in_steps = (step - self._asked_step) * pace
            self._other_seconds += max(0.0, now - self._asked_at - in_steps)
        n_steps = max(1, step - self._first_step)
        left = steps_left * (pace + self._other_seconds / n_steps)
        if n_steps <= WINDOW_STEPS or not steps_left:
            self._end = now + left
        else:
            within = max(SMOOTHING_SHARE * left, min(SMOOTHING_SECONDS, left / 2))
            weight = -math.expm1(-(now - self._asked_at) / within)
            self._end += weight * (now + left - self._end)
        self._asked_step, self._asked_at = step, now
        return max(0.0, self._end - now)


class PlannedPace:
    """The hook that warns once if steps take longer than predicted for these devices, and prints
    which part is slow. It prints nothing if the devices' speed is neither known nor measured.
    `throughput` is the run's step timer."""

    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput
        self._warning: SlowStepWarning | None = None
        self._steps: list[float] = []
        self._inputs: list[float] = []

    def on_start(self, run: TrainingRun) -> None:
        """On rank 0, predict a step's time on this cluster's devices, if their speed is known."""
        if not run.world.is_main:
            return
        compute = run.compute
        self._warning = slow_step_warning(
            run.plan,
            compute.precision,
            compute.device.type,
            run.world.local_size,
            compiled=compute.compiled,
        )

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Leave out the first SETTLING_STEPS, which compile and settle, and take the median time
        over the COMPARED_STEPS after them. Print the warning, once, if it exceeds the predicted
        time by far."""
        warning = self._warning
        if warning is None:
            return
        self._steps.append(step.step_seconds)
        self._inputs.append(self._throughput.input_seconds)
        if len(self._steps) < SETTLING_STEPS + COMPARED_STEPS:
            return
        self._warning = None  # warn once, or not at all
        took = median(self._steps[SETTLING_STEPS:])
        waited = median(self._inputs[SETTLING_STEPS:])
        if words := warning(took, waited):
            run.console.say(f"warning: {words}")
