"""The hook that records a run's events, in metrics.jsonl and in trackers."""

from __future__ import annotations

import math

from pentameter.data.corpora.grammar import grammar_entropy_rate
from pentameter.record.events import (
    CheckpointMetrics,
    EndKind,
    Event,
    RunEnd,
    RunResume,
    RunStart,
    StepMetrics,
)
from pentameter.train.hooks import SampledText
from pentameter.train.run import TrainingRun, is_logged


class Recorder:
    """The hook that writes a run's events to metrics.jsonl and to trackers."""

    def on_start(self, run: TrainingRun) -> None:
        """Write the event `start` for a new run, `resume` for a resumed one: its id, sizes, device,
        layout, and the last step that an earlier start recorded. The number of nodes is the number
        of ranks with local rank 0. Collective."""
        plan, compute, data = run.plan, run.compute, run.config.data
        reached = run.folder.reached
        # The lowest loss that any model can reach, known for one corpus only.
        entropy_rate = grammar_entropy_rate(data.grammar) if data.corpus == "grammar" else None
        kind = RunStart if run.state.step == 0 else RunResume
        start = kind(
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
            n_nodes=run.world.all_gather(run.world.local_rank).count(0),
            reached_step=None if reached is None else reached.step,
            reached_time=None if reached is None else reached.time,
            compiled=compute.compiled,
            ceiling_flops=compute.ceiling_flops,
            entropy_rate=entropy_rate,
        )
        run.events.write(start)

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Write the event `train`, with all fields in `step`, every `log.interval` steps, for the
        first and for the last."""
        if is_logged(step.step, run.config):
            run.events.write(step)

    def on_ranks(self, run: TrainingRun, event: Event) -> None:
        """Write the event about the slowest rank to metrics.jsonl and to the trackers, with all its
        fields."""
        run.events.write(event)

    on_experts = on_skip = on_rollback = on_epoch = on_eval = on_copy = on_ranks

    def on_checkpoint(self, run: TrainingRun, metrics: CheckpointMetrics) -> None:
        """Write the event `checkpoint`, unless the step was saved before and so has one already."""
        if not metrics.again:
            run.events.write(metrics)

    def on_sample(self, run: TrainingRun, sample: SampledText) -> None:
        """Send the text to the trackers alone: the run folder has a separate file for each
        sample."""
        run.events.show_sample(sample.text, sample.step)

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Write the event `end` with step, reason, seconds and kind, and finish the trackers."""
        run.events.write(end)
        run.events.finish(failed=False)

    def on_error(self, run: TrainingRun, error: Exception) -> None:
        """Write the event `end` with the error as reason, and finish the trackers as failed."""
        reason = f"error: {error}"
        run.events.write(RunEnd(run.state.step, reason, seconds=math.nan, kind=EndKind.ERROR))
        run.events.finish(failed=True)
