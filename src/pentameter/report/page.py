"""The page of one run, report.html, which asks nothing of the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pentameter.report import wording
from pentameter.report.curves import Series
from pentameter.report.markup import (
    badge,
    document,
    dotted,
    head,
    note,
    nothing,
    pair,
    plot_card,
    section,
    table,
    tabs,
    text,
    write_page,
)
from pentameter.report.plots import (
    NARROW_INCHES,
    PAGE,
    entropy_rate,
    loss_figure,
    page_svg,
    small_figures,
)
from pentameter.report.reading import NAN, RecordedRun, Sample, as_table, number, read_run
from pentameter.report.results import outcome, results
from pentameter.report.settings import choices, settings

MAX_SAMPLES = 8
MAX_CHECKPOINTS = 40
MAX_MARKS = 20


def write_report(run_dir: Path) -> Path:
    """The path of `run_dir/report.html`, written anew from what the run folder holds.

    Raises:
        StorageError: the folder is not there, or cannot be read or written.
    """
    return write_page(run_dir / "report.html", render_page(read_run(run_dir)))


def render_page(record: RecordedRun) -> str:
    """The whole page as HTML."""
    return document(
        f"{record.name} – pentameter report",
        (
            _header(record),
            _loss(record),
            _small_plots(record),
            _samples(record),
            _checkpoints(record),
            _interruptions(record),
            _settings(record),
            _environment(record),
            _log(record),
        ),
        f"{record.name}: metrics.jsonl, config.toml, plan.json, environment.json, samples",
    )


def _header(record: RecordedRun) -> str:
    """The head of the page: model, data, outcome, and the figures of the run."""
    ended = outcome(record)
    model = as_table(record.config.get("model"))
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
        f"{badge(ended.kind, ended.label)}</div>"
        f'<p class="outcome">{text(ended.sentence)}</p>'
        f'<p class="muted">{text(" · ".join(words))}</p>'
        f'<dl class="facts">{facts}</dl></header>'
    )


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


def _loss(record: RecordedRun) -> str:
    views = [
        (label, drawn)
        for settled, label in ((True, "after the start"), (False, "whole run"))
        if (drawn := _loss_views(record, settled=settled))
    ]
    if not views:
        return section("Loss", nothing("No step has been logged yet."))
    notes = []
    losses = record.train.get("loss", Series())
    n_bad = losses.n_non_finite + record.split_losses("val").n_non_finite
    if n_bad:
        notes.append(f"{n_bad:,} loss values are not finite and not drawn.")
    if record.unreadable_lines:
        s = "s" if record.unreadable_lines > 1 else ""
        notes.append(f"{record.unreadable_lines:,} unreadable line{s} of metrics.jsonl skipped.")
    figure = f'<figure class="card plot">{tabs("loss", views)}</figure>'
    return section("Loss", figure + note(" ".join(notes)))


def _loss_views(record: RecordedRun, *, settled: bool) -> str:
    """The loss figure for wide and for narrow windows; "" where there is nothing to draw."""
    wide = loss_figure(record, palette=PAGE, settled=settled)
    narrow = loss_figure(record, palette=PAGE, size_inches=NARROW_INCHES, settled=settled)
    if wide is None or narrow is None:
        return ""
    best = record.best()
    description = "Training and validation loss over steps"
    if best is not None:
        description += f"; best validation loss {best.loss:.4f} at step {best.step}"
    name = "loss-settled" if settled else "loss"
    return (
        f'<div class="wide">{page_svg(wide, f"{name}-wide", description)}</div>'
        f'<div class="narrow">{page_svg(narrow, f"{name}-narrow", description)}</div>'
    )


def _small_plots(record: RecordedRun) -> str:
    figures = small_figures(record, PAGE)
    if not figures:
        return ""
    plots = pair(
        plot_card(title, page_svg(figure, key.replace("_", "-"), f"{title} over steps"))
        for key, title, figure in figures
    )
    counted = as_table(record.plan.get("model")).get("flops_convention")
    said = f"Utilisation counts {counted}." if "mfu" in record.train and counted else ""
    return section("Optimisation and speed", plots + note(said))


def _samples(record: RecordedRun) -> str:
    if not record.samples:
        return ""
    shown = _spread(record.samples, MAX_SAMPLES)
    losses = {e.step: e.loss for e in record.evaluations if e.split == "val"}
    cards = []
    for sample in shown:
        loss = losses.get(sample.step, NAN)
        detail = f"<span>validation {loss:.3f}</span>" if math.isfinite(loss) else ""
        omitted = sample.omitted_characters
        cards.append(
            f'<article class="card sample"><h3>Step {sample.step:,}{detail}</h3>'
            f"<pre>{text(sample.text)}</pre>"
            f"{note(f'… {omitted:,} more characters' if omitted else '')}</article>"
        )
    some = len(shown) < len(record.samples)
    said = f"{len(shown)} of {len(record.samples)} samples." if some else ""
    return section("Samples over time", pair(cards) + note(said))


def _spread(samples: tuple[Sample, ...], limit: int) -> list[Sample]:
    """At most `limit` of them, evenly chosen, the first and the last among them."""
    if len(samples) <= limit:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / (limit - 1))] for i in range(limit)]


def _checkpoints(record: RecordedRun) -> str:
    if not record.checkpoints:
        return ""
    kept = [c for c in record.checkpoints if c["kept"]]
    shown = (kept or list(record.checkpoints))[-MAX_CHECKPOINTS:]
    best = record.best()
    rows = []
    for checkpoint in shown:
        size, seconds = number(checkpoint.get("bytes")), number(checkpoint.get("seconds"))
        is_best = best is not None and best.step == checkpoint["step"]
        tag = '<span class="tag">best</span>' if is_best else ""
        rows.append(
            f'<tr><th scope="row">{text(checkpoint["name"])}{tag}</th>'
            f'<td class="number">{wording.size(size)}</td>'
            f'<td class="number">{wording.duration(seconds)}</td></tr>'
        )
    heads = (head("folder"), head("size", "number"), head("written in", "number"))
    said = f"{len(record.checkpoints):,} written, {len(kept):,} kept."
    if len(shown) < len(kept):
        said += f" The last {len(shown)} are listed."
    return section("Checkpoints", table(heads, rows) + note(said))


def _interruptions(record: RecordedRun) -> str:
    if not record.marks:
        return ""
    heads = (head("step", "number"), head("event"), head("reason"))
    rows = (
        f'<tr><th scope="row" class="number">{step:,}</th><td>{text(kind)}</td>'
        f'<td class="text">{text(reason)}</td></tr>'
        for step, kind, reason in record.marks[-MAX_MARKS:]
    )
    n_marks = len(record.marks)
    said = f"The last {MAX_MARKS} of {n_marks:,}." if n_marks > MAX_MARKS else ""
    return section("Interruptions", table(heads, rows) + note(said))


def _settings(record: RecordedRun) -> str:
    """The chosen settings first, then all settings, folded away."""
    found = settings(record.config)
    if not found:
        return ""
    rows_per_epoch = record.plan.get("rows_per_epoch")
    chosen = choices(found, rows_per_epoch if isinstance(rows_per_epoch, int) else None)
    first = ""
    if chosen is not None and chosen.before:
        heads = (head("setting"), head("this run"), head(f"preset {text(chosen.preset)}"))
        rows = (
            f'<tr><th scope="row">{dotted(path)}</th><td>{text(wording.scalar(found[path]))}</td>'
            f"<td>{text(wording.scalar(before))}</td></tr>"
            for path, before in chosen.before.items()
        )
        first = table(heads, rows, "rows settings")
    if chosen is not None:
        n = len(chosen.before)
        said = f"{n} of {len(found)} settings differ" if n else "No setting differs"
        first += note(f"{said} from the preset {chosen.preset}, the nearest to this run.")
    everything = _cards(record.config, "run")
    return section(
        "Settings",
        f"{first}<details><summary>All {len(found)} settings</summary>{everything}</details>",
    )


def _environment(record: RecordedRun) -> str:
    latest = {key: v for key, v in record.environment.items() if key != "earlier_starts"}
    cards = _cards(latest, "machine")
    return section("Environment", cards) if cards else ""


def _cards(values: Mapping[str, Any], general: str) -> str:
    """A card for the values at the top and one for each section, in columns."""
    cards = []
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    for name, content in ({general: top} | sections).items():
        rows = "".join(
            f'<tr><th scope="row">{text(key)}</th><td>{text(value)}</td></tr>'
            for key, value in _flattened(content)
        )
        if rows:
            cards.append(
                f'<div class="card"><h3>{text(name)}</h3><table class="keys">{rows}</table></div>'
            )
    return f'<div class="columns">{"".join(cards)}</div>' if cards else ""


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted key → text of every leaf."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from _flattened(item, f"{prefix}{key}.{index}.")
        elif key.endswith("_bytes") and isinstance(value, int):
            yield prefix + key.removesuffix("_bytes"), wording.size(value)
        elif key.endswith("_flops") and isinstance(value, int | float):
            yield prefix + key.removesuffix("_flops"), wording.flops(value)
        else:
            yield prefix + str(key), wording.scalar(value)


def _log(record: RecordedRun) -> str:
    if not record.log_tail.strip():
        return ""
    return (
        '<section class="log"><h2>Log</h2><details class="card"><summary>The last lines of '
        f"log.txt</summary><pre>{text(record.log_tail)}</pre></details></section>"
    )
