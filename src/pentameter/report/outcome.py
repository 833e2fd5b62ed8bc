"""How a run went, in one sentence and in one word."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pentameter.report import wording
from pentameter.report.reading import RunRecord

STILL_FALLING = 0.002
"""An evaluation this much below the one before, relatively, still falls."""


@dataclass(frozen=True)
class Outcome:
    """A word for a badge, its class in the style sheet (good, bad, live), and a sentence."""

    label: str
    kind: str
    sentence: str


def outcome(record: RunRecord) -> Outcome:
    """The outcome of a run, so far as its folder tells."""
    planned = planned_steps(record)
    of = f" of {planned:,}" if planned else ""
    at = f"step {record.last_step:,}{of}"
    if record.end is None:
        return _unfinished(record, at)
    reason = " ".join(str(record.end.get("reason") or "completed").split())
    best = _best(record)
    also = f"; {best}" if best else ""
    if reason == "completed":
        took = wording.duration(record.training_seconds)
        done = f"Completed {record.last_step:,}{of} steps"
        done += f" in {took}" if math.isfinite(record.training_seconds) else ""
        return Outcome("finished", "good", f"{done}{also}.")
    if reason.startswith("error"):
        why = re.sub(r"^error:\s*(step \d+:\s*)?", "", reason).rstrip(".")
        return Outcome("failed", "bad", f"Gave up at {at}: {why}.")
    if reason.startswith("SIG"):
        sentence = f"Stopped by {reason} after {at}{also}. The same command continues."
        return Outcome("stopped", "bad", sentence)
    if reason.startswith("no better"):  # patience
        return Outcome("stopped early", "good", f"Stopped early after {at}: {reason}{also}.")
    return Outcome("stopped", "bad", f"Ended after {at}: {reason}{also}.")  # a hook's word


def planned_steps(record: RunRecord) -> int | None:
    """The steps that the run was to make."""
    planned = record.start.get("steps") or record.plan.get("steps")
    return planned if isinstance(planned, int) else None


def _unfinished(record: RunRecord, at: str) -> Outcome:
    best = _best(record)
    also = f"; {best}" if best else ""
    if record.locked:
        if not record.last_step:
            return Outcome("running", "live", "Running; no step has been logged yet.")
        left = record.train["eta_seconds"].values[-1:] if "eta_seconds" in record.train else ()
        to_go = f", about {wording.duration(left[0])} to go" if left else ""
        return Outcome("running", "live", f"Running: {at}{to_go}{also}.")
    if not record.last_step:
        return Outcome("not started", "", "No step has been logged yet.")
    kept = [checkpoint["step"] for checkpoint in record.checkpoints if checkpoint["kept"]]
    then = f"continues from step {max(kept):,}" if kept else "starts it again"
    return Outcome(
        "interrupted",
        "bad",
        f"Broke off after {at} without a word: killed, or the machine went down{also}. "
        f"The same command {then}.",
    )


def _best(record: RunRecord) -> str:
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
