"""A run as one HTML page that asks nothing of the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pentameter.report import wording
from pentameter.report.markup import document, dotted, section, tabs, text
from pentameter.report.plots import (
    NARROW_INCHES,
    PAGE,
    loss_figure,
    page_svg,
    small_figures,
)
from pentameter.report.reading import NAN, RunRecord, Sample, Series, number
from pentameter.report.settings import choices, settings
from pentameter.report.summary import header

MAX_SAMPLES = 8
MAX_CHECKPOINTS = 40
MAX_MARKS = 20


def render_page(record: RunRecord) -> str:
    """The whole page as HTML."""
    return document(
        f"{record.name} – pentameter report",
        (
            header(record),
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


def _loss(record: RunRecord) -> str:
    views = [
        (label, drawn)
        for settled, label in ((True, "after the start"), (False, "whole run"))
        if (drawn := _loss_views(record, settled=settled))
    ]
    if not views:
        return section("Loss", '<div class="card muted">No step has been logged yet.</div>')
    notes = []
    losses = record.train.get("loss", Series())
    n_bad = losses.n_non_finite + record.split_losses("val").n_non_finite
    if n_bad:
        notes.append(f"{n_bad:,} loss values are not finite and not drawn.")
    if record.unreadable_lines:
        s = "s" if record.unreadable_lines > 1 else ""
        notes.append(f"{record.unreadable_lines:,} unreadable line{s} of metrics.jsonl skipped.")
    return section(
        "Loss",
        f'<figure class="card plot">{tabs("loss", views)}</figure>'
        + (f'<p class="note">{text(" ".join(notes))}</p>' if notes else ""),
    )


def _loss_views(record: RunRecord, *, settled: bool) -> str:
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


def _small_plots(record: RunRecord) -> str:
    figures = small_figures(record, PAGE)
    if not figures:
        return ""
    body = "".join(
        f'<figure class="card plot"><h3>{text(title)}</h3>'
        f"{page_svg(figure, key.replace('_', '-'), f'{title} over steps')}</figure>"
        for key, title, figure in figures
    )
    note = ""
    model = record.plan.get("model")
    if "mfu" in record.train and isinstance(model, dict) and model.get("flops_convention"):
        words = f"Utilisation counts {model['flops_convention']}."
        note = f'<p class="note">{text(words)}</p>'
    return section("Optimisation and speed", f'<div class="pair">{body}</div>{note}')


def _samples(record: RunRecord) -> str:
    if not record.samples:
        return ""
    shown = _spread(record.samples, MAX_SAMPLES)
    losses = {e.step: e.loss for e in record.evaluations if e.split == "val"}
    cards = []
    for sample in shown:
        loss = losses.get(sample.step, NAN)
        detail = f"<span>validation {loss:.3f}</span>" if math.isfinite(loss) else ""
        cut = (
            f'<p class="note">… {sample.omitted_characters:,} more characters</p>'
            if sample.omitted_characters
            else ""
        )
        cards.append(
            f'<article class="card sample"><h3>Step {sample.step:,}{detail}</h3>'
            f"<pre>{text(sample.text)}</pre>{cut}</article>"
        )
    note = ""
    if len(shown) < len(record.samples):
        note = f'<p class="note">{len(shown)} of {len(record.samples)} samples.</p>'
    return section("Samples over time", f'<div class="pair">{"".join(cards)}</div>{note}')


def _spread(samples: tuple[Sample, ...], limit: int) -> list[Sample]:
    """At most `limit` of them, evenly chosen, the first and the last among them."""
    if len(samples) <= limit:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / (limit - 1))] for i in range(limit)]


def _checkpoints(record: RunRecord) -> str:
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
    header = (
        '<thead><tr><th scope="col">folder</th><th scope="col" class="number">size</th>'
        '<th scope="col" class="number">written in</th>'
        "</tr></thead>"
    )
    n_all = len(record.checkpoints)
    note = f"{n_all:,} written, {len(kept):,} kept."
    if len(shown) < len(kept):
        note += f" The last {len(shown)} are listed."
    return section(
        "Checkpoints",
        f'<div class="card scroll"><table class="rows">{header}<tbody>{"".join(rows)}</tbody>'
        f'</table></div><p class="note">{note}</p>',
    )


def _interruptions(record: RunRecord) -> str:
    if not record.marks:
        return ""
    rows = "".join(
        f'<tr><th scope="row" class="number">{step:,}</th><td>{text(kind)}</td>'
        f'<td class="text">{text(reason)}</td></tr>'
        for step, kind, reason in record.marks[-MAX_MARKS:]
    )
    note = ""
    if len(record.marks) > MAX_MARKS:
        note = f'<p class="note">The last {MAX_MARKS} of {len(record.marks):,}.</p>'
    header = (
        '<thead><tr><th scope="col" class="number">step</th><th scope="col">event</th>'
        '<th scope="col">reason</th></tr></thead>'
    )
    return section(
        "Interruptions",
        f'<div class="card scroll"><table class="rows">{header}<tbody>{rows}</tbody></table>'
        f"</div>{note}",
    )


def _settings(record: RunRecord) -> str:
    """The chosen settings first, then all settings, folded away."""
    found = settings(record.config)
    if not found:
        return ""
    rows_per_epoch = record.plan.get("rows_per_epoch")
    chosen = choices(found, rows_per_epoch if isinstance(rows_per_epoch, int) else None)
    first = ""
    if chosen is not None and chosen.before:
        rows = "".join(
            f'<tr><th scope="row">{dotted(path)}</th><td>{text(wording.scalar(found[path]))}</td>'
            f"<td>{text(wording.scalar(before))}</td></tr>"
            for path, before in chosen.before.items()
        )
        first = (
            '<div class="card scroll"><table class="rows settings"><thead><tr>'
            f'<th scope="col">setting</th><th scope="col">this run</th>'
            f'<th scope="col">preset {text(chosen.preset)}</th></tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    if chosen is not None:
        n = len(chosen.before)
        said = f"{n} of {len(found)} settings differ" if n else "No setting differs"
        first += (
            f'<p class="note">{said} from the preset {text(chosen.preset)}, '
            "the nearest to this run.</p>"
        )
    everything = _cards(record.config, "run")
    return section(
        "Settings",
        f"{first}<details><summary>All {len(found)} settings</summary>{everything}</details>",
    )


def _environment(record: RunRecord) -> str:
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


def _log(record: RunRecord) -> str:
    if not record.log_tail.strip():
        return ""
    return (
        '<section class="log"><h2>Log</h2><details class="card"><summary>The last lines of '
        f"log.txt</summary><pre>{text(record.log_tail)}</pre></details></section>"
    )
