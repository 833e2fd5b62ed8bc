"""The hook that records a run's events, in metrics.jsonl and trackers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pentameter.data.corpora.grammar import grammar_entropy_rate
from pentameter.evaluate.split import EvalMetrics
from pentameter.train.hooks import (
    CheckpointMetrics,
    EpochMetrics,
    RunEnd,
    SampledText,
    SkippedStep,
    StepMetrics,
    TrainingRun,
    is_logged,
)
from pentameter.train.log_files import LogFile, checkpoint_event, event_line
from pentameter.train.trackers import open_trackers


class Recorder:
    """The hook that turns what happens into events of metrics.jsonl and of trackers; in other
    processes than the main one it records nothing."""

    def __init__(self, run: TrainingRun) -> None:
        self._is_main = run.world.is_main
        self._log = LogFile(run.folder.metrics_path, run.console.say, run.folder.check_there)
        self._trackers = open_trackers(run)

    def write(self, event: str, **values: Any) -> None:
        """Record one event, in the log and in every tracker."""
        if self._is_main:
            self._log.append(event_line(event, values))
            self._trackers.write(event, **values)

    def sync(self) -> dict[str, Any]:
        """Sync metrics.jsonl, and return a checkpoint's record of it, for `rewind_metrics`:
        `metrics_bytes` of whole lines, and `metrics_unwritten`, lines that wait for the disk."""
        n_bytes = self._log.sync()
        unwritten = [line.decode().rstrip("\n") for line in self._log.unwritten]
        return {"metrics_bytes": n_bytes, "metrics_unwritten": unwritten}

    def close(self) -> None:
        """Close metrics.jsonl."""
        self._log.close()

    def on_start(self, run: TrainingRun) -> None:
        """Record `start` for a new run, `resume` for one that continues."""
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

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Record `train`, for a step that is to be logged."""
        if is_logged(step.step, run.config):
            self.write("train", **asdict(step))

    def on_skip(self, run: TrainingRun, skip: SkippedStep) -> None:
        """Record `skip`."""
        self.write("skip", **asdict(skip))

    def on_epoch(self, run: TrainingRun, metrics: EpochMetrics) -> None:
        """Record `epoch`."""
        self.write("epoch", **asdict(metrics))

    def on_eval(self, run: TrainingRun, metrics: EvalMetrics) -> None:
        """Record `eval`."""
        self.write("eval", **asdict(metrics))

    def on_checkpoint(self, run: TrainingRun, metrics: CheckpointMetrics) -> None:
        """Record `checkpoint`, once for a step."""
        if metrics.again:
            return
        self.write(
            "checkpoint",
            **checkpoint_event(metrics.step, metrics.path, metrics.bytes, metrics.seconds),
        )

    def on_sample(self, run: TrainingRun, sample: SampledText) -> None:
        """Show the text in the trackers alone: the run folder has files of its own for samples."""
        self._trackers.text("sample", sample.text, sample.step)

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Record `end`, and finish the trackers."""
        self.write("end", **asdict(end))
        self._trackers.finish(failed=False)

    def on_error(self, run: TrainingRun, error: Exception) -> None:
        """Record `end` with what went wrong, and finish the trackers as failed."""
        self.write("end", step=run.state.step, reason=f"error: {error}", seconds=None)
        self._trackers.finish(failed=True)
