"""A run's results (losses, speed, memory), and its outcome in a word and a sentence."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import dataclass

from pentameter import formatting
from pentameter.config.data_schema import RESERVED_SPLITS
from pentameter.config.urls import last_part
from pentameter.record.events import NAN, ChoiceMetrics, EndKind, EvalMetrics, number
from pentameter.record.expert_loads import imbalance, mean_z, n_idle, total_exchanged
from pentameter.record.reading import RecordedRun, as_table

RANDOM_WEIGHTS = "random weights"
STILL_FALLING = 0.002
"""Relative change of the validation loss between evaluations that counts as falling or rising."""


@dataclass(frozen=True)
class Results:
    """A run's results so far; NaN, None or "" if unknown. A frozen record. `steps` of
    `planned_steps` were made; they saw `tokens`, of which `loss_tokens` counted in the loss.
    `peak_memory_bytes` is rank 0's peak."""

    best_loss: float
    """Lowest validation loss, nats per token."""
    best_step: int | None
    final_loss: float
    """Validation loss at the last evaluation, nats per token."""
    perplexity: float
    """Validation perplexity at the best step."""
    bits_per_byte: float
    """Validation bits per byte at the best step."""
    began: str
    """The weights that the run began with, in the words of `beginning`."""
    further: dict[str, float]
    """Results of `[[data.evaluations]]` at the best step (without validation, at the last): `NAME
    accuracy` for questions, `NAME loss` for text; and of the whole validation split in a run that
    was evaluated on a sample of it."""
    train_loss: float
    """Mean training loss over the last twentieth of the logged steps, nats per token."""
    steps: int
    planned_steps: int | None
    tokens: int
    loss_tokens: int
    training_seconds: float
    tokens_per_second: float
    """Tokens seen per second, the median over the logged steps."""
    mfu: float
    """Median over the logged steps, a fraction."""
    peak_memory_bytes: float
    expert_imbalance: float
    """The busiest expert's tokens ÷ the mean over its layer, averaged over layers and over the last
    twentieth of the recorded steps."""
    idle_experts: int | None
    """Experts, over all layers, that had no token in these steps; None for a model without
    experts."""
    router_z: float
    """Mean squared log-sum-exp of the routers' logits, averaged over layers, at the last recorded
    step."""
    exchanged_bytes: float
    """Bytes that ranks sent one another for experts in the last recorded step."""
    parameters: int | None
    layout: str
    """The layout; if a resume changed it, all layouts in turn, as "a → b". The same holds for
    precision and device."""
    precision: str
    device: str


def _further(record: RecordedRun, best: EvalMetrics | None) -> dict[str, float]:
    named = [each for each in record.evaluations if each.split not in RESERVED_SPLITS]
    step = max((each.step for each in named), default=0) if best is None else best.step
    found = {}
    if (whole := record.whole_validation) is not None:
        found["loss of the whole validation split"] = whole.loss
    for each in named:
        if each.step != step:
            continue
        if isinstance(each, ChoiceMetrics) and math.isfinite(each.accuracy):
            found[f"{each.split} accuracy"] = each.accuracy
        else:
            found[f"{each.split} loss"] = each.loss
    return found


def results(record: RecordedRun) -> Results:
    """Compute a run's Results (losses, speed, memory) so far, from its folder's content."""
    best, validation = record.best(), record.validation_losses()
    loss = record.train["loss"].values
    memory = record.train["peak_memory_bytes"].values
    planned_model = as_table(record.plan.get("model"))
    parameters = record.start.parameters or planned_model.get("parameters")
    return Results(
        best_loss=NAN if best is None else best.loss,
        best_step=None if best is None else best.step,
        final_loss=validation.values[-1] if len(validation) else NAN,
        perplexity=NAN if best is None else best.perplexity,
        bits_per_byte=NAN if best is None else best.bits_per_byte,
        began=beginning(record),
        further=_further(record, best),
        train_loss=statistics.fmean(loss[-max(1, len(loss) // 20) :]) if loss else NAN,
        steps=record.last_step,
        planned_steps=planned_steps(record),
        tokens=record.tokens,
        loss_tokens=record.loss_tokens,
        training_seconds=record.training_seconds,
        tokens_per_second=_median(record, "tokens_per_second"),
        mfu=_median(record, "mfu"),
        peak_memory_bytes=max(memory, default=NAN),
        expert_imbalance=imbalance(record.expert_loads),
        idle_experts=n_idle(record.expert_loads),
        router_z=mean_z(record.expert_loads),
        exchanged_bytes=total_exchanged(record.expert_loads) or NAN,  # 0 on one rank
        parameters=parameters if isinstance(parameters, int) else None,
        layout=_history(record, "layout"),
        precision=_history(record, "precision"),
        device=_history(record, "device"),
    )


def beginning(record: RecordedRun) -> str:
    """Return in words the weights that a run began with: "random weights", "the weights of NAME
    (step 500, 1.2M loss tokens)", or "step 500 of run 1a2b3c4d" for a run that branched off. "" if
    it is not recorded, or if a user's function built the model."""
    origin, parent = (as_table(record.plan.get(key)) for key in ("init_from", "parent"))
    if parent:
        return f"step {formatting.scalar(parent.get('step'))} of run {parent.get('run_id')!s:.8}"
    if origin:
        path, base = str(origin.get("path")), origin.get("base_model")
        run, _, checkpoint = path.partition("/checkpoints/")
        named = " ".join(filter(None, (last_part(run), checkpoint)))
        of_base = f", from {last_part(str(base))}" if base and last_part(str(base)) != named else ""
        step, tokens = (number(origin.get(key)) for key in ("step", "tokens"))
        trained = [
            f"step {step:,.0f}" if step > 0 else "",
            f"{formatting.count(tokens)} loss tokens" if tokens > 0 else "",
        ]
        known = ", ".join(filter(None, trained))
        return f"the weights of {named}{of_base}" + (f" ({known})" if known else "")
    is_own = as_table(record.plan.get("model")).get("built_by") is not None
    return "" if is_own or "init_from" not in record.plan else RANDOM_WEIGHTS


def _history(record: RecordedRun, key: str) -> str:
    """Return the values at `key` in a run's start and resume events, one after another where they
    change: "data=2,zero=3 → data=1"."""
    values = [str(value) for start in record.starts if (value := getattr(start, key))]
    return " → ".join(value for value, _ in itertools.groupby(values))


def planned_steps(record: RecordedRun) -> int | None:
    """Return the step count that the run is to reach, None if unknown."""
    planned = record.start.steps or record.plan.get("steps")
    return planned if isinstance(planned, int) else None


def progress(record: RecordedRun) -> str:
    """Return the steps made and, if known, the planned count: "200 of 400"."""
    planned = planned_steps(record)
    return f"{record.last_step:,}" + (f" of {planned:,}" if planned else "")


def _median(record: RecordedRun, key: str) -> float:
    values = record.train[key].values
    return statistics.median(values) if values else NAN


@dataclass(frozen=True)
class RunOutcome:
    """A run's state as a label, the label's CSS class (good, bad, live or ""), and a sentence."""

    label: str
    kind: str
    sentence: str


def outcome(record: RecordedRun) -> RunOutcome:
    """Return a run's outcome: finished, failed, stopped, stopped early, running, interrupted or not
    started."""
    made = progress(record)
    at = f"step {made}"
    if record.end is None:
        return _unfinished(record, at)
    reason, kind = " ".join(record.end.reason.split()), record.end.kind
    also = _best(record)
    if kind == EndKind.COMPLETED:
        took = formatting.duration(record.training_seconds)
        done = f"Completed {made} steps"
        done += f" in {took}" if math.isfinite(record.training_seconds) else ""
        return RunOutcome("finished", "good", f"{done}{also}.")
    if kind == EndKind.ERROR:
        why = re.sub(r"^error:\s*(step \d+:\s*)?", "", reason).rstrip(".")
        return RunOutcome("failed", "bad", f"Gave up at {at}: {why}.")
    if kind == EndKind.SIGNAL:
        sentence = f"Stopped by {reason} after {at}{also}. The same command continues."
        return RunOutcome("stopped", "bad", sentence)
    if kind == EndKind.PATIENCE:
        return RunOutcome("stopped early", "good", f"Stopped early after {at}: {reason}{also}.")
    return RunOutcome("stopped", "bad", f"Ended after {at}: {reason}{also}.")


def _unfinished(record: RecordedRun, at: str) -> RunOutcome:
    also = _best(record)
    if record.locked:
        if not record.last_step:
            return RunOutcome("running", "live", "Running; no step has been logged yet.")
        left = record.train["eta_seconds"].values[-1:]
        to_go = f", about {formatting.duration(left[0])} to go" if left else ""
        return RunOutcome("running", "live", f"Running: {at}{to_go}{also}.")
    if not record.last_step:
        return RunOutcome("not started", "", "No step has been logged yet.")
    kept = record.kept_checkpoints
    then = f"continues from step {max(kept):,}" if kept else "starts it again"
    return RunOutcome(
        "interrupted",
        "bad",
        f"Broke off after {at} without a word: killed, or the machine went down{also}. "
        f"The same command {then}.",
    )


def _best(record: RecordedRun) -> str:
    """Return a clause to append, "; the best validation loss is …", which also says whether the
    loss still falls or has risen since; "" for a run that was not evaluated after training
    began."""
    best, losses = record.best(), record.validation_losses()
    if best is None or (best.step == 0 and len(losses) == 1):  # not trained yet
        return ""
    said = f"; the best validation loss is {best.loss:.4f} at step {best.step:,}"
    if len(losses) < 3:
        return said
    previous, last = losses.values[-2:]
    if best.step == losses.steps[-1]:
        falls = previous - last > STILL_FALLING * abs(previous)
        return said + (", and still falling" if falls else ", and hardly falling any more")
    if last - best.loss > STILL_FALLING * abs(best.loss):
        return f"{said}; it has risen to {last:.4f} since"
    return f"{said}, and has not improved since"
