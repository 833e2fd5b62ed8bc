"""The time that steps take: a stopwatch for every step, a profiler for a window of them.

    Trainer(config, hooks=[Profile(10, 13)]).fit()

Each process then writes `profile/rank-00000.json.gz` into the run folder, a trace that
https://ui.perfetto.dev and chrome://tracing open, and on a GPU `rank-00000-memory.pickle`, a
snapshot for https://pytorch.org/memory_viz. The longest operations stand in the log. Recording
reads clocks and sizes and changes no number of the training.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pentameter.errors import ConfigError
from pentameter.machine.this_cluster import this_cluster
from pentameter.parallel.compute import Compute
from pentameter.planning.estimate import Estimate
from pentameter.planning.plan import Plan
from pentameter.planning.step_time import StepTime
from pentameter.train.hooks import RunEnd, SkippedStep, StepMetrics, TrainingRun

WINDOW_STEPS = 20
"""Latest steps whose median tells how long the remaining ones will take."""

MOST_MEASUREMENTS = 3
"""Times that the ceiling is measured again in a run; each takes 0.3 s."""

SLOW = 1.3
"""Times the planned step from which on one is said to be slow."""
SETTLING_STEPS, COMPARED_STEPS = 5, 20

_RULE = "the numbers of two steps, counted from 1 as the log counts them"
N_LONGEST = 10
LEAST_TRACE_BYTES = 100  # a gzipped trace of nothing has 27
MEMORY_EVENTS = 100_000
"""Allocations and frees that the snapshot can hold, of some KB each; older ones are dropped."""


class Stopwatch:
    """Times steps: `with stopwatch: step()`; by the monotonic clock, so no rate is negative."""

    def __init__(self, plan: Plan, compute: Compute) -> None:
        self._tokens_per_step = plan.tokens_per_step
        self._flops_per_token = plan.flops_per_token
        self._ceiling_flops = compute.ceiling_flops * plan.layout.world_size
        self._world_size = plan.layout.world_size
        self._measure_again = compute.measure_again
        self._n_measured = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._n_steps = 0
        self._start = 0.0
        self.step_seconds = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.step_seconds = time.perf_counter() - self._start
        self._raise_ceiling()
        self._n_steps += 1
        if self._n_steps == 2:
            self._recent.clear()  # the first step compiled, and says nothing about the rest
        self._recent.append(self.step_seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the latest step: its FLOPs per second, padding included, ÷ the
        ceiling of all devices; None if that is unknown."""
        if self._flops_per_token is None or not self._ceiling_flops:
            return None
        return self._achieved_flops() / self._ceiling_flops

    def _achieved_flops(self) -> float:
        return self._tokens_per_step * (self._flops_per_token or 0) / self.step_seconds

    def _raise_ceiling(self) -> None:
        """Measure the ceiling again where the latest step was faster: the machine was busy when it
        was measured. It is at least the step's speed then."""
        if self._measure_again is None or self._achieved_flops() <= self._ceiling_flops:
            return
        if self._n_measured < MOST_MEASUREMENTS:
            self._n_measured += 1
            self._ceiling_flops = self._measure_again().flops * self._world_size
        self._ceiling_flops = max(self._ceiling_flops, self._achieved_flops())

    def eta_seconds(self, steps_left: int) -> float:
        """Seconds that `steps_left` steps will take at the median pace of the latest ones."""
        return steps_left * median(self._recent)


class PlannedPace:
    """The hook that warns once where steps take longer than the Plan says for these devices, and
    which part of a step does; silent where the devices are not known or measured."""

    def __init__(self, input_seconds: Callable[[], float]) -> None:
        self._input_seconds = input_seconds
        """Seconds that the latest step waited for its batch."""
        self._planned: StepTime | None = None
        self._steps: list[float] = []
        self._inputs: list[float] = []

    def on_start(self, run: TrainingRun) -> None:
        """Plan a step on the devices that are here, in the process that speaks."""
        if not run.world.is_main:
            return
        cluster, is_known = this_cluster(run.world.size, run.world.local_size)
        is_known = is_known and run.plan.built_by is None  # else operations are not known
        products = run.compute.precision, run.plan.config.train.matmul_precision
        is_known = is_known and cluster.device.peak_flops(*products) is not None
        if is_known and run.compute.device.type == ("cpu" if cluster.device.shared else "cuda"):
            self._planned = Estimate(run.plan, cluster, run.compute.precision).time

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Compare the median of some steps after the first ones, which compile and settle."""
        planned = self._planned
        if planned is None:
            return
        self._steps.append(step.step_seconds)
        self._inputs.append(self._input_seconds())
        if len(self._steps) < SETTLING_STEPS + COMPARED_STEPS:
            return
        self._planned = None  # said once, or not at all
        took = median(self._steps[SETTLING_STEPS:])
        waited = median(self._inputs[SETTLING_STEPS:])
        if took > SLOW * planned.seconds:
            run.console.say(f"warning: {slow_step(planned, took, waited)}")


def slow_step(planned: StepTime, took: float, waited_for_input: float) -> str:
    """What to say of steps that take longer than planned: by how much, and which part it is."""
    late = took - planned.seconds
    waiting = sum(planned.exposed.values())
    said = (
        f"a step takes {took:.3g} s, {took / planned.seconds - 1:.0%} more than the "
        f"{planned.seconds:.3g} s planned ({planned.compute:.3g} s compute, "
        f"{waiting:.3g} s communication"
    )
    if planned.bubble:
        said += f", {planned.bubble:.3g} s of the pipeline's bubble"
    if waited_for_input > late / 2:
        return f"{said}): {waited_for_input:.3g} s of it go to reading the batch"
    part = "compute or communication" if waiting else "compute"
    return f"{said}); the batch is not the reason, {part} is: --profile FIRST:LAST says which"


class Profile:
    """Records steps `first` to `last`, both included, counted from 1 as the log counts them.

    In the trace each step is a span "step N". It begins where the step before it ended, so an
    evaluation, a sample or a save between the two is inside it. Raises ConfigError for a window
    that cannot be; `on_start` does for one beyond the run's last step.
    """

    def __init__(self, first: int, last: int) -> None:
        if not 1 <= first <= last:
            raise ConfigError(
                f"cannot profile steps {first} to {last}: {_RULE}, the first not after the last"
            )
        self.first, self.last = first, last
        self._recording: profile | None = None
        self._span: Any = None
        self._begun = 0

    def check(self, n_steps: int) -> None:
        """Raise ConfigError where a run of `n_steps` steps does not come to the window's end."""
        if self.last > n_steps:
            raise ConfigError(
                f"cannot profile steps {self.first} to {self.last}: the run has train.steps="
                f"{n_steps}; take an earlier window"
            )

    def on_start(self, run: TrainingRun) -> None:
        """Begin to record where the window begins with the next step, or a run continues in it."""
        self.check(run.plan.steps)
        done = run.state.step
        if done >= self.last:
            run.console.say(
                f"profile: nothing to record, steps {self.first} to {self.last} are done and the "
                f"run continues after step {done}; take a later window"
            )
            return
        if done >= self.first:
            run.console.say(
                f"profile: recording from step {done + 1} only, the run continues after step {done}"
            )
        if done + 1 >= self.first:
            self._start(run, done + 1)

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """End the span of the step, and begin that of the next."""
        self._turn(run, step.step)

    def on_skip(self, run: TrainingRun, skip: SkippedStep) -> None:
        """As `on_step`: a step without an update is one too."""
        self._turn(run, skip.step)

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Write what was recorded of a window in which the run ended."""
        if self._recording is not None:
            self._finish(run, end.step)
        elif end.step < self.first:
            run.console.say(f"profile: nothing recorded, the run ended before step {self.first}")

    def on_error(self, run: TrainingRun, error: Exception) -> None:
        """Stop recording, and write nothing of a run that failed."""
        if self._recording is not None:
            self._stop()
            _forget_memory(run)

    def _turn(self, run: TrainingRun, done: int) -> None:
        if self._recording is None:
            if done + 1 == self.first:
                self._start(run, self.first)
        elif done == self.last:
            self._finish(run, done)
        else:
            self._begin_span(done + 1)

    def _start(self, run: TrainingRun, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if _is_on_gpu(run):
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MEMORY_EVENTS)
        self._begun = step
        self._recording = profile(activities=activities)
        self._recording.start()
        self._begin_span(step)

    def _begin_span(self, step: int) -> None:
        self._end_span()
        self._span = record_function(f"step {step}")
        self._span.__enter__()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _stop(self) -> profile:
        """End the recording and return it; the memory's history goes on."""
        self._end_span()
        recording, self._recording = self._recording, None
        assert recording is not None
        recording.stop()
        return recording

    def _finish(self, run: TrainingRun, last: int) -> None:
        """Write the trace, the snapshot and the table; a disk that refuses them ends no run."""
        if _is_on_gpu(run):
            torch.cuda.synchronize()  # kernels of the last step would be missing
        recording = self._stop()
        rank = f"rank-{run.world.rank:05d}"
        path = run.run_dir / "profile" / f"{rank}.json.gz"
        try:
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)  # a link there is not followed
            if _is_on_gpu(run):
                memory = path.with_name(f"{rank}-memory.pickle")
                memory.unlink(missing_ok=True)
                torch.cuda.memory._dump_snapshot(str(memory))
            recording.export_chrome_trace(str(path))
            if path.stat().st_size < LEAST_TRACE_BYTES:  # a full disk is not told otherwise
                raise OSError(f"{path} is empty; is the disk full?")
        except (OSError, RuntimeError) as error:
            run.console.say(f"warning: the profile is not written: {error}")
            return
        finally:
            _forget_memory(run)
        run.console.say(
            f"profile of steps {self._begun} to {last}: {path}, for https://ui.perfetto.dev"
        )
        for line in longest_operations(recording.key_averages(), on_gpu=_is_on_gpu(run)):
            run.console.say(line)


def parse_window(text: str) -> Profile:
    """The Profile that `--profile FIRST:LAST` asks for; ConfigError where it asks for none."""
    window = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if window is None:
        raise ConfigError(f"--profile {text} must be FIRST:LAST, {_RULE}; e.g. --profile 10:13")
    return Profile(int(window[1]), int(window[2]))


def longest_operations(averages: Iterable[Any], *, on_gpu: bool) -> list[str]:
    """Lines for the N_LONGEST operations by total time, without the time of what they called."""
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [
        (getattr(row, key), row.count, row.key)
        for row in averages
        if not re.fullmatch(r"step \d+", row.key)
    ]
    total = sum(microseconds for microseconds, _, _ in rows) or 1.0
    return [
        f"  {microseconds / 1000:>10,.1f} ms {100 * microseconds / total:>3.0f}% "
        f"{count:>7,} × {name}"
        for microseconds, count, name in sorted(rows, reverse=True)[:N_LONGEST]
    ]


def _forget_memory(run: TrainingRun) -> None:
    """Stop recording allocations."""
    if _is_on_gpu(run):
        torch.cuda.memory._record_memory_history(enabled=None)


def _is_on_gpu(run: TrainingRun) -> bool:
    return run.compute.device.type == "cuda"
