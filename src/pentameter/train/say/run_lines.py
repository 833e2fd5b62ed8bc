"""The console lines that report a run: steps, epochs, evaluations, saves, its end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean

from pentameter.errors import few
from pentameter.evaluate.split import perplexity
from pentameter.formatting import duration, rough_duration, size, sparkline
from pentameter.record.events import (
    CheckpointMetrics,
    ChoiceMetrics,
    CopyMetrics,
    EpochMetrics,
    EvalMetrics,
    ExpertMetrics,
    RankMetrics,
    Rollback,
    RunEnd,
    SkippedStep,
    StepMetrics,
)
from pentameter.train.evaluations import SAMPLE, TRAIN, VALIDATION, begins_with_evaluation
from pentameter.train.faults.pace import SlowRank
from pentameter.train.run import TrainingRun, is_logged

SLOW_STEP_SECONDS = 0.5
"""Seconds per step above which a step's line shows them, next to the tokens per second."""

LONG_IDLE_STEPS, LONG_IDLE_RECORDS = 100, 5
"""An expert is reported as idle if no token chose it for so many steps, and in so many recorded
steps in a row."""

SPARKLINE_POINTS = 48
"""Largest number of bars in the live line's curve."""


class RunLines:
    """The hook that prints a run's lines, and updates the live line on a terminal. `take_word`
    returns a further line to print after a step, or None."""

    def __init__(self, take_word: Callable[[], str | None] = lambda: None) -> None:
        self._take_word = take_word
        self._n_steps = 0
        self._losses = _Curve()
        self._validation: EvalMetrics | None = None
        self._idle = _IdleExperts()
        self._slow = SlowRank()

    def on_start(self, run: TrainingRun) -> None:
        """Print, on one rank of each further machine, its rank, machine and device; rank 0 has
        printed the introduction. Show on the live line which action comes first."""
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
        """Show on the live line what the run does next: its first evaluation if `evaluates`, else a
        step; if the run is compiled, also that it compiles."""
        what = "the first evaluation" if evaluates else f"step {run.state.step + 1}"
        run.console.show(f"{what} compiles" if run.compute.compiled else what)

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Update the live line; every `log.interval` steps also print a line."""
        self._n_steps += 1
        self._losses.add(step.loss)
        columns = _step_columns(
            step,
            run.plan.steps,
            is_first=self._n_steps == 1,
            with_perplexity=run.config.log.perplexity,
        )
        if is_logged(step.step, run.config):
            run.console.say_columns(columns, of_machine=True)
        if (word := self._take_word()) is not None:
            run.console.say(word, of_machine=True)
        run.console.status(columns, self._losses.line())

    def on_experts(self, run: TrainingRun, metrics: ExpertMetrics) -> None:
        """Print a warning, once in a run, if experts of a layer have been idle for long. Otherwise
        print nothing."""
        if idle := self._idle.first_found(metrics):
            run.console.say(
                f"warning: {_idle_words(metrics, idle, run.config.model.router.balance)}"
            )

    def on_ranks(self, run: TrainingRun, metrics: RankMetrics) -> None:
        """Print a warning if a rank has been slower than the others for long. Otherwise print
        nothing."""
        if (warning := self._slow.warning(metrics)) is not None:
            run.console.say(f"warning: {warning}")

    def on_skip(self, run: TrainingRun, skip: SkippedStep) -> None:
        """Print a line for every skipped update."""
        run.console.say(f"step {skip.step:>6} skipped: {skip.reason}")

    def on_rollback(self, run: TrainingRun, rollback: Rollback) -> None:
        """Print which steps were undone, and why."""
        run.console.say(
            f"step {rollback.step:>6} rolled back to {rollback.to_step}: {rollback.reason}; steps "
            f"{rollback.to_step + 1} to {rollback.step} are undone, and their batches skipped"
        )

    def on_epoch(self, run: TrainingRun, metrics: EpochMetrics) -> None:
        """Print the epoch's mean loss, perplexity and time per step.

        Epochs shorter than `log.interval` steps are not printed: with a small text they would drown
        everything else; metrics.jsonl has them all.
        """
        if metrics.steps < run.config.log.interval:
            return
        run.console.say_columns(
            [
                f"epoch {metrics.epoch:>5}",
                f"train loss {metrics.loss:.4f}",
                f"perplexity {metrics.perplexity:.4g}",
                f"{1000 * metrics.seconds / metrics.steps:,.1f} ms/step",
            ]
        )

    def on_eval(self, run: TrainingRun, metrics: EvalMetrics) -> None:
        """Print an evaluation's metrics, and whether the loss is the best yet. If the training
        split is evaluated, too, the validation line is held back until then, so that one line has
        both losses."""
        if self._n_steps == 0:
            self._await(run, evaluates=False)
        is_last = metrics.split == VALIDATION and SAMPLE in run.evaluations  # the whole, at the end
        holds_back = metrics.split in (VALIDATION, SAMPLE) and not is_last
        if holds_back and TRAIN in run.evaluations:
            self._validation = metrics  # the training split's metrics come next
            return
        train = []
        if metrics.split == TRAIN and self._validation is not None:
            train = [f"train loss {metrics.loss:.4f}"]
            metrics = replace(self._validation, seconds=self._validation.seconds + metrics.seconds)
            self._validation = None
        if isinstance(metrics, ChoiceMetrics):
            run.console.say_columns(_choice_columns(metrics))
            return
        best = " ← best" if metrics.best else ""
        run.console.say_columns(
            [
                f"eval {metrics.step:>6}",
                f"{metrics.split} loss {metrics.loss:.4f}{best}",
                *(["whole split"] if is_last else []),
                *train,
                f"perplexity {metrics.perplexity:.4g}",
                f"{metrics.bits_per_byte:.4f} bits/byte",
                f"{metrics.seconds:.1f} s",
            ]
        )

    def on_checkpoint(self, run: TrainingRun, metrics: CheckpointMetrics) -> None:
        """Show name, size and time of the save on the live line only: it is routine."""
        run.console.status(
            [f"saved {metrics.path.name}, {size(metrics.bytes)}, {metrics.seconds:.2f} s"]
        )

    def on_copy(self, run: TrainingRun, metrics: CopyMetrics) -> None:
        """Show step, size and time of a copy on the live line; print a warning if it failed."""
        if metrics.error is not None:
            run.console.say(f"warning: {metrics.error}. The next copy makes up for it")
            return
        run.console.status(
            [f"copied step {metrics.step}, {size(metrics.bytes)}, {metrics.seconds:.1f} s"]
        )

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Print why the run ended, and how long it trained."""
        run.console.say(
            f"ended at step {end.step}: {end.reason}, {duration(end.seconds)} of training"
        )


class _Curve:
    """The losses of a run so far, averaged to at most SPARKLINE_POINTS points, each the mean over
    equally many consecutive steps."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._steps_per_point = 1
        self._latest: list[float] = []

    def add(self, loss: float) -> None:
        """Add a step's loss. When the curve is full, each pair of points is averaged into one."""
        self._latest.append(loss)
        if len(self._latest) < self._steps_per_point:
            return
        self._points.append(fmean(self._latest))
        self._latest.clear()
        if len(self._points) == SPARKLINE_POINTS:
            self._points = [
                fmean(pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)
            ]
            self._steps_per_point *= 2

    def line(self) -> str:
        """Return the curve as a sparkline between its first and last points as numbers; empty if it
        has fewer than two points."""
        if len(self._points) < 2:
            return ""
        first, last = self._points[0], self._points[-1]
        return f"loss {first:.4f} {sparkline(self._points)} {last:.4f}"


class _IdleExperts:
    """Finds experts that no token has chosen for long: in LONG_IDLE_RECORDS recorded steps in a
    row, the first of them at least LONG_IDLE_STEPS steps ago."""

    def __init__(self) -> None:
        # (layer, expert) → first step, and number, of the records in a row without a token
        self._idle: dict[tuple[int, int], tuple[int, int]] = {}
        self._has_found = False

    def first_found(self, metrics: ExpertMetrics) -> dict[int, int]:
        """Return expert → the step since which it has been idle, for the idle experts of the layer
        that `metrics` describe. Only the first call that finds any returns them; after it the dict
        is empty."""
        found = {}
        for expert, load in enumerate(metrics.loads):
            key = metrics.layer, expert
            if load:
                self._idle.pop(key, None)
                continue
            since, n_records = self._idle.get(key, (metrics.step, 0))
            self._idle[key] = since, n_records + 1
            is_long = metrics.step - since >= LONG_IDLE_STEPS
            if is_long and n_records + 1 >= LONG_IDLE_RECORDS:
                found[expert] = since
        if not found or self._has_found:
            return {}
        self._has_found = True
        return found


def _idle_words(metrics: ExpertMetrics, idle: Mapping[int, int], balance: str) -> str:
    """Return a sentence about the `idle` experts (number → step since which it has been idle), and
    what `model.router.balance` can do about them. `balance` is its present value."""
    which = f"expert{'s' if len(idle) > 1 else ''} {few(idle, 8)}"
    remedy = (
        "a larger model.router.balance_rate"
        if balance == "bias"
        else "a larger model.router.balance_weight"
    )
    if balance == "none":
        remedy = "model.router.balance"
    return (
        f"step {metrics.step}: {which} of layer {metrics.layer} had no token in any step recorded "
        f"since step {min(idle.values())}, and learnt nothing; {remedy} spreads tokens over them"
    )


def _step_columns(
    step: StepMetrics, total_steps: int, *, is_first: bool, with_perplexity: bool
) -> list[str]:
    """Return the columns of the line about a step, the most important first, as a narrow terminal
    drops the last ones. `is_first` marks the first step of this process, which may have compiled:
    the time left is then not predicted from it."""
    left = "" if is_first else f" · {rough_duration(step.eta_seconds):>6} left"
    took = f" · {_step_seconds(step.step_seconds)}" if step.step_seconds > SLOW_STEP_SECONDS else ""
    return [
        f"step {step.step:>{len(str(total_steps))}}/{total_steps} · "
        f"{100 * step.step // total_steps:>3}%{left}",
        f"loss {step.loss:.4f}",
        *([f"perplexity {perplexity(step.loss):.4g}"] if with_perplexity else []),
        f"{step.tokens_per_second:,.0f} tok/s{took}",
        f"lr {step.learning_rate:.2e}",
        f"norm {step.grad_norm:.2f}",
        *([] if step.mfu is None else [f"mfu {100 * step.mfu:.0f}%"]),
        size(step.peak_memory_bytes),
    ]


def _choice_columns(metrics: ChoiceMetrics) -> list[str]:
    """Return the columns of a line about multiple-choice questions: accuracies, and the loss of the
    right answers."""
    return [
        f"eval {metrics.step:>6}",
        f"{metrics.split} accuracy {metrics.accuracy:.4f}",
        f"per token {metrics.accuracy_per_token:.4f}",
        f"per byte {metrics.accuracy_per_byte:.4f}",
        f"loss {metrics.loss:.4f}",
        f"{metrics.seconds:.1f} s",
    ]


def _step_seconds(seconds: float) -> str:
    """Format a step time: 1.73 s/step, 12.3 s/step, 1,234 s/step."""
    n_decimals = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:,.{n_decimals}f} s/step"
