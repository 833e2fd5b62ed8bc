"""The hook of the main process that records a run's events, in metrics.jsonl and trackers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pentameter.data.corpora.grammar import grammar_entropy_rate
from pentameter.evaluate.split import EvalMetrics
from pentameter.train.hooks import (
    CheckpointMetrics,
    EpochMetrics,
    Run,
    RunEnd,
    SampledText,
    SkippedStep,
    StepMetrics,
    is_logged,
)
from pentameter.train.log_files import MetricsLog, checkpoint_event
from pentameter.train.trackers import Trackers


class Recorder:
    """Turns what the hooks report into events: lines of metrics.jsonl, and what trackers show."""

    def __init__(self, log: MetricsLog, trackers: Trackers) -> None:
        self._log, self._trackers = log, trackers

    def write(self, event: str, **values: Any) -> None:
        """Record one event everywhere."""
        self._log.write(event, **values)
        self._trackers.write(event, **values)

    def on_start(self, run: Run) -> None:
        """`start` for a new run, `resume` for one that continues."""
        plan, compute, data = run.plan, run.compute, run.config.data
        # The lowest loss that any model can reach, known of one corpus alone.
        entropy_rate = grammar_entropy_rate(data.grammar) if data.corpus == "grammar" else None
        self.write(
            "start" if run.state.step == 0 else "resume",
            step=run.state.step,
            run_id=run.folder.run_id,
            name=run.config.name,
            parameters=plan.n_parameters,
            tokens_per_step=plan.tokens_per_step,
            steps=plan.steps,
            flops_per_token=plan.flops_per_token,
            device=compute.device_name,
            precision=compute.precision,
            layout=str(plan.layout),
            world_size=plan.layout.world_size,
            compiled=compute.compiled,
            ceiling_flops=compute.ceiling_flops,
            entropy_rate=entropy_rate,
        )

    def on_step(self, run: Run, step: StepMetrics) -> None:
        """A `train` line, where the step is one to log."""
        if is_logged(step.step, run.config):
            self.write("train", **asdict(step))

    def on_skip(self, run: Run, skip: SkippedStep) -> None:
        """A `skip` line."""
        self.write("skip", **asdict(skip))

    def on_epoch(self, run: Run, metrics: EpochMetrics) -> None:
        """An `epoch` line."""
        self.write("epoch", **asdict(metrics))

    def on_eval(self, run: Run, metrics: EvalMetrics) -> None:
        """An `eval` line."""
        self.write("eval", **asdict(metrics))

    def on_checkpoint(self, run: Run, metrics: CheckpointMetrics) -> None:
        """A `checkpoint` line, one for a step."""
        if metrics.again:
            return
        self.write(
            "checkpoint",
            **checkpoint_event(metrics.step, metrics.path, metrics.bytes, metrics.seconds),
        )

    def on_sample(self, run: Run, sample: SampledText) -> None:
        """For the trackers alone: the run folder has samples in files of their own."""
        self._trackers.text("sample", sample.text, sample.step)

    def on_end(self, run: Run, end: RunEnd) -> None:
        """An `end` line."""
        self.write("end", **asdict(end))
        self._trackers.finish(failed=False)

    def on_error(self, run: Run, error: Exception) -> None:
        """An `end` line that says what went wrong."""
        self.write("end", step=run.state.step, reason=f"error: {error}", seconds=None)
        self._trackers.finish(failed=True)
