"""The profiler for a window of steps.

    Trainer(config, hooks=[Profile(10, 13)]).fit()

Each rank then writes a trace, `profile/rank-00000.json.gz`, into the run folder, for
https://ui.perfetto.dev and chrome://tracing. On a GPU it also writes `rank-00000-memory.pickle`, a
snapshot for https://pytorch.org/memory_viz. The log lists the longest operations. The profiler only
reads clocks and sizes; it changes no number in training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pentameter.errors import ConfigError, StorageError
from pentameter.record.events import RunEnd, SkippedStep, StepMetrics
from pentameter.train.run import TrainingRun

_RULE = "the numbers of two steps, counted from 1 as the log counts them"
N_LONGEST = 10
LEAST_TRACE_BYTES = 100  # an empty trace has 27, gzipped
MEMORY_EVENTS = 100_000
"""Allocations and frees that the snapshot can hold, some KB each; older ones are dropped."""


class Profile:
    """A hook that profiles steps `first` to `last`, both inclusive, counted from 1 as in the log.

    In the trace, each step is a span "step N". A span begins when the previous step ends, so it
    includes an evaluation, a sample or a save between the two. Raises ConfigError unless 1 ≤ first
    ≤ last; `on_start` raises it for a window beyond the run's last step.
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
        """Raise ConfigError if a run with `n_steps` steps ends before the window does."""
        if self.last > n_steps:
            raise ConfigError(
                f"cannot profile steps {self.first} to {self.last}: the run has train.steps="
                f"{n_steps}; take an earlier window"
            )

    def on_start(self, run: TrainingRun) -> None:
        """Start recording if the window begins with the next step, or if a run resumes within it;
        print a line if the window is already past."""
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

    def on_step(self, run: TrainingRun, step: StepMetrics | SkippedStep) -> None:
        """End the trace's span of this step and begin the next; start or finish recording at the
        window's ends."""
        done = step.step
        if self._recording is None:
            if done + 1 == self.first:
                self._start(run, self.first)
        elif done == self.last:
            self._finish(run, done)
        else:
            self._begin_span(done + 1)

    on_skip = on_step  # a step without its update

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Write the steps recorded so far if the run ended within the window; print a line if it
        ended before the window."""
        if self._recording is not None:
            self._finish(run, end.step)
        elif end.step < self.first:
            run.console.say(f"profile: nothing recorded, the run ended before step {self.first}")

    def on_error(self, run: TrainingRun, error: Exception) -> None:
        """Stop recording, and write nothing, as the run failed."""
        if self._recording is not None:
            self._stop()
            _forget_memory(run)

    def _start(self, run: TrainingRun, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if _is_on_gpu(run):
            activities.append(ProfilerActivity.CUDA)
            _record_allocations(stacks="python", max_entries=MEMORY_EVENTS)
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
        """Stop the profiler and return it; the recording of allocations goes on."""
        self._end_span()
        recording, self._recording = self._recording, None
        assert recording is not None
        recording.stop()
        return recording

    def _finish(self, run: TrainingRun, last: int) -> None:
        """Stop recording, write the trace and on a GPU the memory snapshot, and print the longest
        operations. A failed write is only warned about. `last` is the last recorded step."""
        if _is_on_gpu(run):
            torch.cuda.synchronize()  # else the last step's kernels would be missing
        recording = self._stop()
        rank = f"rank-{run.world.rank:05d}"
        path = run.run_dir / "profile" / f"{rank}.json.gz"
        try:
            run.folder.check_ours()
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)  # do not follow a symlink
            if _is_on_gpu(run):
                memory = path.with_name(f"{rank}-memory.pickle")
                memory.unlink(missing_ok=True)
                torch.cuda.memory._dump_snapshot(str(memory))
            recording.export_chrome_trace(str(path))
            if path.stat().st_size < LEAST_TRACE_BYTES:  # a full disk is not reported otherwise
                raise OSError(f"{path} is empty; is the disk full?")
        except (OSError, RuntimeError, StorageError) as error:
            run.console.say(f"warning: the profile is not written: {error}")
            return
        finally:
            _forget_memory(run)
        run.console.say(
            f"profile of steps {self._begun} to {last}: {path}, for https://ui.perfetto.dev"
        )
        for line in longest_operations(recording.key_averages(), on_gpu=_is_on_gpu(run)):
            run.console.say(line)


def parse_window(text: str, n_steps: int | None = None) -> Profile:
    """Return the Profile for `--profile FIRST:LAST`. Raises ConfigError if `text` has another form,
    or names steps that a run of `n_steps`, if known, does not make."""
    window = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if window is None:
        raise ConfigError(f"--profile {text} must be FIRST:LAST, {_RULE}; e.g. --profile 10:13")
    hook = Profile(int(window[1]), int(window[2]))
    if n_steps is not None:
        hook.check(n_steps)
    return hook


def longest_operations(averages: Iterable[Any], *, on_gpu: bool) -> list[str]:
    """Return a printed line for each of the N_LONGEST operations by self time (without the
    operations that each calls). `averages` are `profile.key_averages()`; `on_gpu` ranks by device
    time."""
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


def _record_allocations(**options: Any) -> None:
    """Record a GPU's allocations with PyTorch's `options` (of
    `torch.cuda.memory._record_memory_history`)."""
    torch.cuda.memory._record_memory_history(**options)


def _forget_memory(run: TrainingRun) -> None:
    """Stop recording GPU allocations; does nothing on a CPU."""
    if _is_on_gpu(run):
        _record_allocations(enabled=None)


def _is_on_gpu(run: TrainingRun) -> bool:
    return run.compute.device.type == "cuda"
