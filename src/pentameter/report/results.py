"""The results of a run, in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pentameter.report.outcome import planned_steps
from pentameter.report.reading import NAN, RunRecord, Series


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
    precision: str
    device: str


def results(record: RunRecord) -> Results:
    """The figures of a run, under way or ended."""
    best, validation = record.best(), record.split_losses("val")
    loss = record.train.get("loss", Series()).values
    memory = record.train.get("peak_memory_bytes", Series()).values
    parameters = record.start.get("parameters") or table(record.plan.get("model")).get("parameters")
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
        layout=str(record.start.get("layout") or ""),
        precision=str(record.start.get("precision") or ""),
        device=str(record.start.get("device") or ""),
    )


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as strict JSON has them: NaN and infinity are null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def table(value: object) -> dict[str, Any]:
    """The value if it is a table, else an empty one: files may be damaged."""
    return value if isinstance(value, dict) else {}


def _median(record: RunRecord, key: str) -> float:
    values = record.train.get(key, Series()).values
    return statistics.median(values) if values else NAN
