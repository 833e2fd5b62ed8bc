"""The head of the page: what the run was, how it ended, and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from pentameter.report import wording
from pentameter.report.markup import text
from pentameter.report.outcome import outcome
from pentameter.report.plots import entropy_rate
from pentameter.report.reading import RunRecord
from pentameter.report.results import results, table
from pentameter.report.settings import settings


def header(record: RunRecord) -> str:
    """The page's header as HTML."""
    ended = outcome(record)
    model = table(record.config.get("model"))
    words = [str(record.start.get("model") or "GPT")]
    if {"n_layers", "d_model", "n_heads"} <= model.keys():
        words.append(f"{model['n_layers']} layers of width {model['d_model']}")
        words.append(f"{model['n_heads']} heads")
    if "context_length" in model:
        words.append(f"context {model['context_length']}")
    data = settings(record.config)
    if data.get("data.corpus") or data.get("data.path"):
        words.append(str(data.get("data.corpus") or Path(str(data["data.path"])).name))
    words += [str(record.start[key]) for key in ("device", "precision") if record.start.get(key)]
    facts = "".join(
        f"<div{' class=best' if index == 0 and record.best() else ''}><dt>{text(name)}</dt>"
        f"<dd>{text(value)}<small>{text(detail)}</small></dd></div>"
        for index, (name, value, detail) in enumerate(_facts(record))
    )
    return (
        f'<header><div class="title"><h1>{text(record.name)}</h1>'
        f'<span class="badge {ended.kind}">{text(ended.label)}</span></div>'
        f'<p class="outcome">{text(ended.sentence)}</p>'
        f'<p class="muted">{text(" · ".join(words))}</p>'
        f'<dl class="facts">{facts}</dl></header>'
    )


def _facts(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    """(name, value, detail) of each figure of the summary; what is unknown is left out."""
    best = record.best()
    if best is not None:
        yield "Best validation loss", wording.fixed(best.loss), f"at step {best.step:,}"
        if math.isfinite(best.perplexity):
            yield "Perplexity", wording.fixed(best.perplexity, 3), "at the best step"
        if math.isfinite(best.bits_per_byte):
            yield "Bits per byte", wording.fixed(best.bits_per_byte), "at the best step"
    floor = entropy_rate(record)
    if best is not None and floor is not None:
        yield "Above entropy rate", wording.fixed(best.loss - floor), f"the floor is {floor:.4f}"
    found = results(record)
    if math.isfinite(found.train_loss):
        yield "Train loss", wording.fixed(found.train_loss), "recent mean"
    yield "Steps", f"{found.steps:,}", f"of {found.planned_steps:,}" if found.planned_steps else ""
    if record.tokens:
        per_step = record.start.get("tokens_per_step")
        detail = f"{per_step:,} per step" if isinstance(per_step, int) else ""
        yield "Tokens seen", wording.count(record.tokens), detail
    if found.parameters is not None:
        yield "Parameters", wording.count(found.parameters), f"{found.parameters:,}"
    if math.isfinite(record.training_seconds):
        yield "Time", wording.duration(record.training_seconds), ""
    if math.isfinite(found.tokens_per_second):
        yield "Tokens per second", wording.count(found.tokens_per_second), "median"
    if math.isfinite(found.mfu):
        ceiling = record.start.get("ceiling_flops")
        of = f" of {wording.flops(ceiling)}" if isinstance(ceiling, int | float) else ""
        yield "MFU", wording.percent(found.mfu), f"median{of}"
    if math.isfinite(found.peak_memory_bytes):
        yield "Peak memory", wording.size(found.peak_memory_bytes), ""
