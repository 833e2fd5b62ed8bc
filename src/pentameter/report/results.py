"""The results of a run: its figures, and its outcome in one word and one sentence."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import dataclass

from pentameter import wording
from pentameter.report.curves import Series
from pentameter.report.reading import NAN, RecordedRun, as_table

STILL_FALLING = 0.002
"""An evaluation this much below the one before, relatively, still falls."""


@dataclass(frozen=True)
class Results:
    """The figures of a run; NaN, None or "" for what is unknown."""

    best_loss: float
    """Loss on the validation split, in nats per token."""
    best_step: int | None
    final_loss: float
    """The last validation's."""
    perplexity: float
    """At the best step."""
    bits_per_byte: float
    """At the best step."""
    train_loss: float
    """Mean over the last twentieth of the logged steps."""
    steps: int
    planned_steps: int | None
    tokens: int
    training_seconds: float
    tokens_per_second: float
    """The median."""
    mfu: float
    """The median."""
    peak_memory_bytes: float
    parameters: int | None
    layout: str
    """Of each start in turn, where a resume changed it; so for the next two."""
    precision: str
    device: str


def results(record: RecordedRun) -> Results:
    """The figures of a run, under way or ended."""
    best, validation = record.best(), record.split_losses("val")
    loss = record.train.get("loss", Series()).values
    memory = record.train.get("peak_memory_bytes", Series()).values
    planned_model = as_table(record.plan.get("model"))
    parameters = record.start.get("parameters") or planned_model.get("parameters")
    return Results(
        best_loss=NAN if best is None else best.loss,
        best_step=None if best is None else best.step,
        final_loss=validation.values[-1] if len(validation) else NAN,
        perplexity=NAN if best is None else best.perplexity,
        bits_per_byte=NAN if best is None else best.bits_per_byte,
        train_loss=statistics.fmean(loss[-max(1, len(loss) // 20) :]) if loss else NAN,
        steps=record.last_step,
        planned_steps=planned_steps(record),
        tokens=record.tokens,
        training_seconds=record.training_seconds,
        tokens_per_second=_median(record, "tokens_per_second"),
        mfu=_median(record, "mfu"),
        peak_memory_bytes=max(memory, default=NAN),
        parameters=parameters if isinstance(parameters, int) else None,
        layout=_in_turn(record, "layout"),
        precision=_in_turn(record, "precision"),
        device=_in_turn(record, "device"),
    )


def _in_turn(record: RecordedRun, key: str) -> str:
    """A value of each start of a run, which a resume may have changed: "data=2,zero=3 → data=1"."""
    values = [str(start[key]) for start in record.starts if start.get(key)]
    return " → ".join(value for value, _ in itertools.groupby(values))


def planned_steps(record: RecordedRun) -> int | None:
    """The steps that the run was to make."""
    planned = record.start.get("steps") or record.plan.get("steps")
    return planned if isinstance(planned, int) else None


def progress(record: RecordedRun) -> str:
    """The steps made, of those planned where that is known: "200 of 400"."""
    planned = planned_steps(record)
    return f"{record.last_step:,}" + (f" of {planned:,}" if planned else "")


def _median(record: RecordedRun, key: str) -> float:
    values = record.train.get(key, Series()).values
    return statistics.median(values) if values else NAN


@dataclass(frozen=True)
class RunOutcome:
    """A word for a badge, its class in the style sheet (good, bad, live), and a sentence."""

    label: str
    kind: str
    sentence: str


def outcome(record: RecordedRun) -> RunOutcome:
    """The outcome of a run, so far as its folder tells."""
    made = progress(record)
    at = f"step {made}"
    if record.end is None:
        return _unfinished(record, at)
    reason = " ".join(str(record.end.get("reason") or "completed").split())
    best = _best(record)
    also = f"; {best}" if best else ""
    if reason == "completed":
        took = wording.duration(record.training_seconds)
        done = f"Completed {made} steps"
        done += f" in {took}" if math.isfinite(record.training_seconds) else ""
        return RunOutcome("finished", "good", f"{done}{also}.")
    if reason.startswith("error"):
        why = re.sub(r"^error:\s*(step \d+:\s*)?", "", reason).rstrip(".")
        return RunOutcome("failed", "bad", f"Gave up at {at}: {why}.")
    if reason.startswith("SIG"):
        sentence = f"Stopped by {reason} after {at}{also}. The same command continues."
        return RunOutcome("stopped", "bad", sentence)
    if reason.startswith("no better"):  # patience
        return RunOutcome("stopped early", "good", f"Stopped early after {at}: {reason}{also}.")
    return RunOutcome("stopped", "bad", f"Ended after {at}: {reason}{also}.")  # a hook's word


def _unfinished(record: RecordedRun, at: str) -> RunOutcome:
    best = _best(record)
    also = f"; {best}" if best else ""
    if record.locked:
        if not record.last_step:
            return RunOutcome("running", "live", "Running; no step has been logged yet.")
        left = record.train["eta_seconds"].values[-1:] if "eta_seconds" in record.train else ()
        to_go = f", about {wording.duration(left[0])} to go" if left else ""
        return RunOutcome("running", "live", f"Running: {at}{to_go}{also}.")
    if not record.last_step:
        return RunOutcome("not started", "", "No step has been logged yet.")
    kept = [checkpoint["step"] for checkpoint in record.checkpoints if checkpoint["kept"]]
    then = f"continues from step {max(kept):,}" if kept else "starts it again"
    return RunOutcome(
        "interrupted",
        "bad",
        f"Broke off after {at} without a word: killed, or the machine went down{also}. "
        f"The same command {then}.",
    )


def _best(record: RecordedRun) -> str:
    """The best validation, and where the loss went after it."""
    best, losses = record.best(), record.split_losses("val")
    if best is None or (best.step == 0 and len(losses) == 1):  # not trained yet
        return ""
    said = f"the best validation loss is {best.loss:.4f} at step {best.step:,}"
    if len(losses) < 3:
        return said
    previous, last = losses.values[-2:]
    if best.step == losses.steps[-1]:
        falls = previous - last > STILL_FALLING * abs(previous)
        return said + (", and still falling" if falls else ", and hardly falling any more")
    if last - best.loss > STILL_FALLING * abs(best.loss):
        return f"{said}; it has risen to {last:.4f} since"
    return f"{said}, and has not improved since"
