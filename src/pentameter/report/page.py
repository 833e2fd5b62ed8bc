"""The page of one run, report.html, which asks nothing of the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pentameter import wording
from pentameter.report.curves import Series
from pentameter.report.markup import render, write_page
from pentameter.report.plots import (
    NARROW_INCHES,
    PAGE,
    WIDE_INCHES,
    entropy_rate,
    loss_figure,
    page_svg,
    small_figures,
)
from pentameter.report.reading import (
    RecordedRun,
    Sample,
    as_table,
    check_run_folder,
    read_run,
)
from pentameter.report.results import outcome, results
from pentameter.report.settings import choices, flat, settings

MAX_SAMPLES = 8


def write_report(run_dir: Path) -> Path:
    """The path of `run_dir/report.html`, written anew from what the run folder holds.

    Raises:
        StorageError: the folder is not there, or cannot be read or written.
        ConfigError: it holds no run, so nothing is written into it.
    """
    record = read_run(run_dir)
    check_run_folder(run_dir)
    return write_page(run_dir / "report.html", render_page(record))


def render_page(record: RecordedRun) -> str:
    """The whole page as HTML."""
    found, validation = settings(record.config), record.split_losses("val")
    rows_per_epoch = record.plan.get("rows_per_epoch")
    flops = as_table(record.plan.get("model")).get("flops_convention")
    latest = {key: v for key, v in record.environment.items() if key != "earlier_starts"}
    return render(
        "run.html",
        record=record,
        best=record.best(),
        outcome=outcome(record),
        subtitle=_subtitle(record),
        facts=list(_facts(record)),
        losses=list(_losses(record)),
        loss_note=_loss_note(record),
        plots=[
            (title, page_svg(figure, key.replace("_", "-"), f"{title} over steps"))
            for key, title, figure in small_figures(record, PAGE)
        ],
        flops_note=f"Utilisation counts {flops}." if "mfu" in record.train and flops else "",
        samples=_spread(record.samples, MAX_SAMPLES),
        losses_by_step=dict(zip(validation.steps, validation.values, strict=True)),
        settings=found,
        chosen=choices(found, rows_per_epoch if isinstance(rows_per_epoch, int) else None),
        all_settings=list(_groups(record.config, "run")),
        environment=list(_groups(latest, "machine")),
    )


def _subtitle(record: RecordedRun) -> str:
    """The model, the data and the device, in a line."""
    model, data = as_table(record.config.get("model")), settings(record.config)
    words = [str(record.start.get("model") or "GPT")]
    if {"n_layers", "d_model", "n_heads"} <= model.keys():
        words.append(f"{model['n_layers']} layers of width {model['d_model']}")
        words.append(f"{model['n_heads']} heads")
    if "context_length" in model:
        words.append(f"context {model['context_length']}")
    if data.get("data.corpus") or data.get("data.path"):
        words.append(str(data.get("data.corpus") or Path(str(data["data.path"])).name))
    elif n_sources := sum(key.startswith("data.sources.") and "weight" in key for key in data):
        words.append(f"a blend of {n_sources}")
    words += [str(record.start[key]) for key in ("device", "precision") if record.start.get(key)]
    return " · ".join(words)


def _facts(record: RecordedRun) -> Iterable[tuple[str, str, str]]:
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


def _losses(record: RecordedRun) -> Iterable[dict[str, str]]:
    """The loss in two views, each drawn for wide and for narrow windows."""
    best = record.best()
    description = "Training and validation loss over steps"
    if best is not None:
        description += f"; best validation loss {best.loss:.4f} at step {best.step}"
    for label, name, settled in (
        ("after the start", "loss-settled", True),
        ("whole run", "loss", False),
    ):
        view = {"label": label}
        for width, inches in (("wide", WIDE_INCHES), ("narrow", NARROW_INCHES)):
            figure = loss_figure(record, palette=PAGE, size_inches=inches, settled=settled)
            if figure is not None:
                view[width] = page_svg(figure, f"{name}-{width}", description)
        if len(view) > 1:
            yield view


def _loss_note(record: RecordedRun) -> str:
    """The losses that could not be drawn, and the lines that could not be read."""
    notes = []
    losses = record.train.get("loss", Series())
    n_bad = losses.n_non_finite + record.split_losses("val").n_non_finite
    if n_bad:
        notes.append(f"{n_bad:,} loss values are not finite and not drawn.")
    if record.unreadable_lines:
        s = "s" if record.unreadable_lines > 1 else ""
        notes.append(f"{record.unreadable_lines:,} unreadable line{s} of metrics.jsonl skipped.")
    return " ".join(notes)


def _spread(samples: tuple[Sample, ...], limit: int) -> list[Sample]:
    """At most `limit` of them, evenly chosen, the first and the last among them."""
    if len(samples) <= limit:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / (limit - 1))] for i in range(limit)]


def _groups(values: Mapping[str, Any], general: str) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """The values at the top under the title `general`, and those of each section under its own."""
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    for title, content in ({general: top} | sections).items():
        if rows := [_as_text(key, value) for key, value in flat(content)]:
            yield title, rows


def _as_text(key: str, value: object) -> tuple[str, str]:
    """A key and its value in words; its unit goes from the key to the value."""
    if key.endswith("_bytes") and isinstance(value, int):
        return key.removesuffix("_bytes"), wording.size(value)
    if key.endswith("_flops") and isinstance(value, int | float):
        return key.removesuffix("_flops"), wording.flops(value)
    return key, wording.scalar(value)
