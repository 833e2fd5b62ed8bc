"""What a person sees: a scrolling log, a live line on a terminal, and the same text in log.txt."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from pentameter.checkpoint.files import storage_errors
from pentameter.data.progress import ProgressLines, pass_in_words
from pentameter.train.hooks import (
    CheckpointMetrics,
    EpochMetrics,
    EvalMetrics,
    RunEnd,
    SkippedStep,
    StepMetrics,
    is_logged,
)

if TYPE_CHECKING:
    from pentameter.train.trainer import Trainer

REFRESH_SECONDS = 0.1
_CONTROLS = {*range(32), 127} - {*b"\t\n"}
_NO_CONTROLS = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")


class Console:
    """A hook that prints the run; also the only way anything of the trainer reaches the screen."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._rich = RichConsole(
            file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet, markup=False
        )
        self._live: Live | None = None
        self._last_refresh = 0.0
        self._log: TextIO | None = None
        self._pending: list[str] = []
        self._progress_lines = ProgressLines(self.say)

    def __enter__(self) -> Self:
        if self._rich.is_terminal and not self._rich.quiet:
            self._live = Live(console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._log is not None:
            self._log.close()

    def open_log(self, path: Path) -> None:
        """Copy everything said from now on, and so far, into `path`."""
        with storage_errors(path, "write"):
            self._log = path.open("a", encoding="utf-8")
        for line in self._pending:
            self._to_log(line)
        self._pending.clear()

    def say(self, text: str) -> None:
        """Print a line and log it; a sample's control characters must not reach a terminal."""
        text = text.translate(_NO_CONTROLS)
        self._rich.print(Text(text))
        self._to_log(text)

    def sync(self) -> int:
        """Bytes of log.txt so far, all of them on disk."""
        if self._log is None:
            return 0
        with storage_errors(Path(self._log.name), "write"):
            self._log.flush()
            os.fsync(self._log.fileno())
            return os.fstat(self._log.fileno()).st_size

    def status(self, text: str) -> None:
        """Replace the live line, on a terminal."""
        now = time.monotonic()
        if self._live is not None and now - self._last_refresh >= REFRESH_SECONDS:
            self._last_refresh = now
            self._live.update(Text(text, style="bold"), refresh=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """The live line of preparing data: pass, bytes done, bytes in all; without a terminal a
        line now and then."""
        if self._live is None:
            self._progress_lines(what, done, total)
            return
        share = f" · {100 * done / total:.0f}%" if total else ""
        self.status(f"{pass_in_words(what)} · {size(done)} of {size(total)}{share}")

    def on_step(self, trainer: Trainer, step: StepMetrics) -> None:
        """A line where the step is one to log, the live line at every step."""
        line = _step_line(step, trainer.plan.steps)
        if is_logged(step.step, trainer.config):
            self.say(line)
        self.status(f"{line} · eta {duration(step.eta_seconds)}")

    def on_skip(self, trainer: Trainer, skip: SkippedStep) -> None:
        """A skipped update is always worth a line."""
        self.say(f"step {skip.step:>6} skipped: {skip.reason}")

    def on_epoch(self, trainer: Trainer, metrics: EpochMetrics) -> None:
        """The epoch's mean loss, and what a step cost."""
        self.say(
            f"epoch {metrics.epoch:>5} │ train loss {metrics.loss:.4f} │ perplexity "
            f"{metrics.perplexity:.4g} │ {1000 * metrics.seconds / metrics.steps:,.1f} ms/step"
        )

    def on_eval(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """The validation figures, and whether they are the best yet."""
        best = "  ← best" if metrics.best else ""
        self.say(
            f"eval {metrics.step:>6} │ {metrics.split} loss {metrics.loss:.4f} │ perplexity "
            f"{metrics.perplexity:.4g} │ {metrics.bits_per_byte:.4f} bits/byte │ "
            f"{metrics.seconds:.1f} s{best}"
        )

    def on_checkpoint(self, trainer: Trainer, metrics: CheckpointMetrics) -> None:
        """Saving is routine: it only passes over the live line."""
        self.status(f"saved {metrics.path.name}, {size(metrics.bytes)}, {metrics.seconds:.2f} s")

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """How it ended."""
        self.say(f"ended at step {end.step}: {end.reason}, {duration(end.seconds)} of training")

    def _to_log(self, text: str) -> None:
        if self._log is None:
            self._pending.append(text)
            return
        with storage_errors(Path(self._log.name), "write"):
            self._log.write(text + "\n")
            self._log.flush()


def _step_line(step: StepMetrics, total_steps: int) -> str:
    mfu = "" if step.mfu is None else f" │ mfu {100 * step.mfu:.0f}%"
    return (
        f"step {step.step:>{len(str(total_steps))}}/{total_steps} │ loss {step.loss:.4f} │ lr "
        f"{step.learning_rate:.2e} │ norm {step.grad_norm:.2f} │ "
        f"{step.tokens_per_second:,.0f} tok/s{mfu} │ {size(step.peak_memory_bytes)}"
    )


def duration(seconds: float) -> str:
    """`seconds` as people say it: 42 s, 3 min 20 s, 2 h 05 min."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def size(n_bytes: float) -> str:
    """`n_bytes` in the largest unit that keeps it above one."""
    for unit in ("B", "KB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} GB"
