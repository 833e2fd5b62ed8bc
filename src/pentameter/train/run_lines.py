"""The console lines that report a run: steps, epochs, evaluations, saves, its end."""

from __future__ import annotations

import socket
from dataclasses import replace

from pentameter.evaluate.split import EvalMetrics, perplexity
from pentameter.formatting import duration, rough_duration, size
from pentameter.train.evaluations import TRAIN, VALIDATION, begins_with_evaluation
from pentameter.train.hooks import (
    CheckpointMetrics,
    EpochMetrics,
    RunEnd,
    SkippedStep,
    StepMetrics,
    TrainingRun,
    is_logged,
)

SLOW_STEP_SECONDS = 0.5
"""Step time in seconds above which a line shows it next to the tokens per second."""


class RunLines:
    """The hook that prints the run."""

    def __init__(self) -> None:
        self._n_steps = 0
        self._validation: EvalMetrics | None = None

    def on_start(self, run: TrainingRun) -> None:
        """Print which rank this is; rank 0 has already introduced the run. Until the first step has
        a line, the live line shows what the run is waiting for."""
        world = run.world
        self._await(run, evaluates=begins_with_evaluation(run))
        if not world.is_main:
            first = world.rank - world.local_rank
            run.console.say(
                f"{run.config.name} · {run.run_dir} · rank {world.rank} of {world.size}; "
                f"ranks {first}-{first + world.local_size - 1} are on {socket.gethostname()} · "
                f"{run.compute.device_name} · from step {run.state.step}",
                of_machine=True,
            )

    def _await(self, run: TrainingRun, *, evaluates: bool) -> None:
        """Show the first action in this start; it may compile for a minute."""
        what = "the first evaluation" if evaluates else f"step {run.state.step + 1}"
        run.console.show(f"{what} compiles" if run.compute.compiled else what)

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Print a line for a step that is to be logged; update the live line for every step."""
        self._n_steps += 1
        line = _step_line(
            step,
            run.plan.steps,
            is_first=self._n_steps == 1,
            with_perplexity=run.config.log.perplexity,
        )
        if is_logged(step.step, run.config):
            run.console.say(line, of_machine=True)
        run.console.status(line)

    def on_skip(self, run: TrainingRun, skip: SkippedStep) -> None:
        """Print a line for every skipped update."""
        run.console.say(f"step {skip.step:>6} skipped: {skip.reason}")

    def on_epoch(self, run: TrainingRun, metrics: EpochMetrics) -> None:
        """Print the epoch's mean loss and the time per step.

        Epochs shorter than `log.interval` are left out, or with a small text they would drown
        everything else; metrics.jsonl has them all.
        """
        if metrics.steps < run.config.log.interval:
            return
        run.console.say(
            f"epoch {metrics.epoch:>5} │ train loss {metrics.loss:.4f} │ perplexity "
            f"{metrics.perplexity:.4g} │ {1000 * metrics.seconds / metrics.steps:,.1f} ms/step"
        )

    def on_eval(self, run: TrainingRun, metrics: EvalMetrics) -> None:
        """Print a split's metrics, and whether they are the best yet. The training split's loss is
        in the same line as the validation loss, so that one line shows whether the model overfits.
        """
        if self._n_steps == 0:
            self._await(run, evaluates=False)
        if metrics.split == VALIDATION and TRAIN in run.evaluations:
            self._validation = metrics  # the training split's metrics come next
            return
        beside = ""
        if metrics.split == TRAIN and self._validation is not None:
            beside = f"train loss {metrics.loss:.4f} │ "
            metrics = replace(self._validation, seconds=self._validation.seconds + metrics.seconds)
            self._validation = None
        best = "  ← best" if metrics.best else ""
        run.console.say(
            f"eval {metrics.step:>6} │ {metrics.split} loss {metrics.loss:.4f} │ perplexity "
            f"{metrics.perplexity:.4g} │ {metrics.bits_per_byte:.4f} bits/byte │ {beside}"
            f"{metrics.seconds:.1f} s{best}"
        )

    def on_checkpoint(self, run: TrainingRun, metrics: CheckpointMetrics) -> None:
        """Show the save on the live line only: it is routine."""
        run.console.status(
            f"saved {metrics.path.name}, {size(metrics.bytes)}, {metrics.seconds:.2f} s"
        )

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Print why the run ended, and how long it trained."""
        run.console.say(
            f"ended at step {end.step}: {end.reason}, {duration(end.seconds)} of training"
        )


def _step_line(
    step: StepMetrics, total_steps: int, *, is_first: bool, with_perplexity: bool
) -> str:
    """Return the line for a step. The first step of a start (`is_first`) may have compiled, so it
    cannot predict the time left."""
    loss = f"loss {step.loss:.4f}"
    if with_perplexity:
        loss += f" │ perplexity {perplexity(step.loss):.4g}"
    took = f" · {_step_seconds(step.step_seconds)}" if step.step_seconds > SLOW_STEP_SECONDS else ""
    mfu = "" if step.mfu is None else f" │ mfu {100 * step.mfu:.0f}%"
    left = "" if is_first else f" · {rough_duration(step.eta_seconds):>6} left"
    return (
        f"step {step.step:>{len(str(total_steps))}}/{total_steps} · "
        f"{100 * step.step // total_steps:>3}%{left} │ {loss} │ lr "
        f"{step.learning_rate:.2e} │ norm {step.grad_norm:.2f} │ "
        f"{step.tokens_per_second:,.0f} tok/s{took}{mfu} │ {size(step.peak_memory_bytes)}"
    )


def _step_seconds(seconds: float) -> str:
    """Format a step time: 1.73 s/step, 12.3 s/step, 1,234 s/step."""
    n_decimals = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:,.{n_decimals}f} s/step"
