"""The run as a person sees it: a scrolling log, a live line on a terminal, the same in log.txt.

Of several processes the main one speaks. Of every other machine one process prints its step lines
too, and any process a warning that the main one has not; both stand behind the rank. What a process
does not print is in its own log.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import Self
from unicodedata import category

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from pentameter.data.progress import (
    AWAITING,
    AWAITING_A_RANK,
    ProgressLines,
    pass_in_words,
)
from pentameter.evaluate.split import EvalMetrics, perplexity
from pentameter.processes.failure import EXPECTED
from pentameter.processes.world import World
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
from pentameter.train.log_files import LogFile, any_folder
from pentameter.wording import duration, size

REFRESH_SECONDS = 0.1
SLOW_STEP_SECONDS = 0.5
"""Steps that take longer say how long, beside the tokens per second."""


class Console:
    """The hook that prints the run; all that the trainer prints goes through it."""

    def __init__(self, world: World | None = None, *, quiet: bool = False) -> None:
        self._world = world or World()
        self._rich = RichConsole(
            file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet, markup=False
        )
        self._live: Live | None = None
        self._last_refresh = 0.0
        self._n_steps = 0
        self._log: LogFile | None = None
        self._pending: list[str] = []
        self._validation: EvalMetrics | None = None
        self._progress_lines = ProgressLines(self.say)

    def __enter__(self) -> Self:
        if self._rich.is_terminal and not self._rich.quiet and self._world.is_main:
            self._live = Live(console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._live is not None:
            self._live.stop()
        if error is not None and not self._world.is_main:  # the main one's is told, see `failure`
            lines = [str(error)] if isinstance(error, EXPECTED) else format_exception(error)
            self._to_log("".join(lines).rstrip("\n"))
        if self._log is not None:
            self._log.close()

    def open_log(self, path: Path, check_folder: Callable[[], None] = any_folder) -> None:
        """Write all that has been said, and all that will be, into the file `path`, which is put
        back unless `check_folder` raises StorageError."""
        with suppress(OSError):  # LogFile says so, once
            path.parent.mkdir(exist_ok=True)
        self._log = LogFile(path, self.say, check_folder)
        for line in self._pending:
            self._to_log(line)
        self._pending.clear()

    def say(self, text: str, *, of_machine: bool = False) -> None:
        """Print a line and log it; a sample's control characters must not reach a terminal.

        The main process prints it; one process of every other machine does too `of_machine`.
        """
        if self._world.is_main or (of_machine and self._world.local_rank == 0):
            self._print(text)
        self._to_log(text)

    def warn(self, warnings: Sequence[str]) -> None:
        """Say each of `warnings`; every process but the main one prints only those that the main
        one does not have. Collective."""
        told = self._world.broadcast(list(warnings))
        for warning in warnings:
            self.say(f"warning: {warning}")
            if warning not in told:
                self._print(f"warning: {warning}")

    def _print(self, text: str) -> None:
        rank = "" if self._world.is_main else f"rank {self._world.rank}: "
        self._rich.print(Text(rank + _shown(text)))

    def sync(self) -> int:
        """Bytes of log.txt so far, all of them on disk where that is possible."""
        return 0 if self._log is None else self._log.sync()

    def status(self, text: str) -> None:
        """Replace the live line, where there is a terminal."""
        now = time.monotonic()
        if now - self._last_refresh >= REFRESH_SECONDS:
            self._show(text, now)

    def _show(self, text: str, now: float) -> None:
        self._last_refresh = now
        if self._live is not None:
            self._live.update(Text(text, style="bold"), refresh=True)

    def clear(self) -> None:
        """Empty the live line: what it said is over, and what follows may take long."""
        self._show("", 0.0)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far the preparation of data is: pass, bytes done, bytes in all; on the live
        line, or without a terminal in a line now and then."""
        if what == AWAITING and self._world.size > 1:
            what = AWAITING_A_RANK  # every rank prepares the data, and one of them comes first
        if self._live is None:
            self._progress_lines(what, done, total)
            return
        share = f" · {100 * done / total:.0f}%" if total else ""
        self.status(f"{pass_in_words(what)} · {size(done)} of {size(total)}{share}")

    def on_start(self, run: TrainingRun) -> None:
        """Say which process this is; the main one has introduced the run. The live line says what
        is waited for until the first step has one."""
        world = self._world
        if self._live is not None:
            self._await(run, evaluates=begins_with_evaluation(run))
        if not world.is_main:
            first = world.rank - world.local_rank
            self.say(
                f"{run.config.name} · {run.run_dir} · rank {world.rank} of {world.size}; "
                f"ranks {first}-{first + world.local_size - 1} are on {socket.gethostname()} · "
                f"{run.compute.device_name} · from step {run.state.step}",
                of_machine=True,
            )

    def _await(self, run: TrainingRun, *, evaluates: bool) -> None:
        """Show what comes first in this start, and may compile for a minute."""
        what = "the first evaluation" if evaluates else f"step {run.state.step + 1}"
        self._show(f"{what} compiles" if run.compute.compiled else what, 0.0)

    def on_step(self, run: TrainingRun, step: StepMetrics) -> None:
        """Print a line for a step that is to be logged, and the live line for every step."""
        self._n_steps += 1
        line = _step_line(
            step,
            run.plan.steps,
            is_first=self._n_steps == 1,
            with_perplexity=run.config.log.perplexity,
        )
        if is_logged(step.step, run.config):
            self.say(line, of_machine=True)
        self.status(line)

    def on_skip(self, run: TrainingRun, skip: SkippedStep) -> None:
        """Print a line for every skipped update."""
        self.say(f"step {skip.step:>6} skipped: {skip.reason}")

    def on_epoch(self, run: TrainingRun, metrics: EpochMetrics) -> None:
        """Print the epoch's mean loss and the time of a step.

        Epochs shorter than `log.interval` are left out, or a small text would leave nothing else
        to see; metrics.jsonl has them all.
        """
        if metrics.steps < run.config.log.interval:
            return
        self.say(
            f"epoch {metrics.epoch:>5} │ train loss {metrics.loss:.4f} │ perplexity "
            f"{metrics.perplexity:.4g} │ {1000 * metrics.seconds / metrics.steps:,.1f} ms/step"
        )

    def on_eval(self, run: TrainingRun, metrics: EvalMetrics) -> None:
        """Print a split's figures, and whether they are the best yet. The loss of the training
        split stands beside validation's: one line tells whether the model overfits."""
        if self._n_steps == 0 and self._live is not None:
            self._await(run, evaluates=False)
        if metrics.split == VALIDATION and TRAIN in run.evaluations:
            self._validation = metrics  # the training split's come next
            return
        beside = ""
        if metrics.split == TRAIN and self._validation is not None:
            beside = f"train loss {metrics.loss:.4f} │ "
            metrics = replace(self._validation, seconds=self._validation.seconds + metrics.seconds)
            self._validation = None
        best = "  ← best" if metrics.best else ""
        self.say(
            f"eval {metrics.step:>6} │ {metrics.split} loss {metrics.loss:.4f} │ perplexity "
            f"{metrics.perplexity:.4g} │ {metrics.bits_per_byte:.4f} bits/byte │ {beside}"
            f"{metrics.seconds:.1f} s{best}"
        )

    def on_checkpoint(self, run: TrainingRun, metrics: CheckpointMetrics) -> None:
        """Show the save on the live line alone: it is routine."""
        self.status(f"saved {metrics.path.name}, {size(metrics.bytes)}, {metrics.seconds:.2f} s")

    def on_end(self, run: TrainingRun, end: RunEnd) -> None:
        """Print why the run ended, and how long it trained."""
        self.say(f"ended at step {end.step}: {end.reason}, {duration(end.seconds)} of training")

    def _to_log(self, text: str) -> None:
        text = _shown(text)
        if self._log is None:
            self._pending.append(text)
        else:
            self._log.append(text)


def _shown(text: str) -> str:
    """`text` with control characters, which a sample may hold, shown as U+FFFD."""
    if text.isprintable():
        return text
    # Category Z is spaces of all kinds, which are no danger; Cf marks the direction of writing.
    return "".join(
        c if c.isprintable() or c in "\t\n" or category(c) == "Zs" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def _step_line(
    step: StepMetrics, total_steps: int, *, is_first: bool, with_perplexity: bool
) -> str:
    """The line of a step. The first step of a start (`is_first`) may have compiled: it says nothing
    about the time left."""
    loss = f"loss {step.loss:.4f}"
    if with_perplexity:
        loss += f" │ perplexity {perplexity(step.loss):.4g}"
    took = f" · {_step_seconds(step.step_seconds)}" if step.step_seconds > SLOW_STEP_SECONDS else ""
    mfu = "" if step.mfu is None else f" │ mfu {100 * step.mfu:.0f}%"
    left = "" if is_first else f" · {_rough_duration(step.eta_seconds):>6} left"
    return (
        f"step {step.step:>{len(str(total_steps))}}/{total_steps} · "
        f"{100 * step.step // total_steps:>3}%{left} │ {loss} │ lr "
        f"{step.learning_rate:.2e} │ norm {step.grad_norm:.2f} │ "
        f"{step.tokens_per_second:,.0f} tok/s{took}{mfu} │ {size(step.peak_memory_bytes)}"
    )


def _step_seconds(seconds: float) -> str:
    """The time of a step: 1.73 s/step, 12.3 s/step, 1,234 s/step."""
    n_decimals = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:,.{n_decimals}f} s/step"


def _rough_duration(seconds: float) -> str:
    """`seconds` in words, in one unit: 42 s, 3 min, 2.1 h."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 59.5 * 60 else f"{seconds / 3600:.1f} h"
