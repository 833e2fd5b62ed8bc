"""A run's report, report.html, one file that needs no network."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pentameter import formatting
from pentameter.config.urls import last_part
from pentameter.record.curves import evenly, spikes
from pentameter.record.events import NAN
from pentameter.record.reading import RecordedRun, as_table, check_run_folder, read_run
from pentameter.record.results import RANDOM_WEIGHTS, beginning, outcome, results
from pentameter.record.sessions import MOST_SESSIONS, pauses
from pentameter.report.figures.expert_map import EDGES, FEW_LAYERS, expert_maps
from pentameter.report.figures.markup import render, write_page
from pentameter.report.figures.plots import (
    NARROW_INCHES,
    PAGE,
    WIDE_INCHES,
    entropy_rate,
    loss_figure,
    page_svg,
    small_figures,
)
from pentameter.report.figures.sessions_figure import STRIP_INCHES, sessions_figure
from pentameter.report.pages.settings import choices, flatten, settings

MAX_SAMPLES = 8


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the run folder's content and return its path.

    Raises:
        StorageError: the folder does not exist, or cannot be read or written.
        ConfigError: it holds no run, so nothing is written into it.
    """
    record = read_run(run_dir)
    check_run_folder(run_dir)
    return write_page(run_dir / "report.html", render_page(record))


def render_page(record: RecordedRun, live: str = "", version: str = "") -> str:
    """Render a run's report as HTML. live: address that the page polls for changes, "" for a page
    in a file; version: the version that this page shows, as the address returns it until there is a
    newer one."""
    found, validation = settings(record.config), record.validation_losses()
    rows_per_epoch = record.plan.get("rows_per_epoch")
    flops = as_table(record.plan.get("model")).get("flops_convention")
    latest = {key: v for key, v in record.environment.items() if key != "earlier_starts"}
    shown = record.sessions[-MOST_SESSIONS:]
    return render(
        "run.html",
        live=live,
        live_version=version,
        record=record,
        best=record.best(),
        outcome=outcome(record),
        subtitle=_subtitle(record),
        facts=list(_facts(record)),
        losses=list(_losses(record)),
        loss_note=_loss_note(record),
        spikes=[
            (spike, _data_command(record, spike.step)) for spike in spikes(record.train["loss"])
        ],
        plots=[
            (title, page_svg(figure, key.replace("_", "-"), f"{title} over steps"))
            for key, title, figure in small_figures(record, PAGE)
        ],
        expert_maps=expert_maps(record.expert_loads),
        has_few_layers=len(record.expert_loads) <= FEW_LAYERS,
        load_edges=[formatting.scalar(edge) for edge in EDGES],
        flops_note=f"Utilisation counts {flops}." if record.train["mfu"] and flops else "",
        strip=_strip(record),
        sessions=shown,
        pauses=[math.nan, *pauses(shown)],
        samples=[record.samples[at] for at in evenly(len(record.samples), MAX_SAMPLES)],
        losses_by_step=dict(zip(validation.steps, validation.values, strict=True)),
        settings=found,
        chosen=choices(found, rows_per_epoch if isinstance(rows_per_epoch, int) else None),
        all_settings=list(_groups(record.config, "run")),
        environment=list(_groups(latest, "machine")),
    )


def _subtitle(record: RecordedRun) -> str:
    """Return a line with model size, data, device, precision, and the weights that the run began
    with unless these were random. What is unknown is left out."""
    found = settings(record.config)
    words = ["GPT"]
    if {"model.n_layers", "model.d_model", "model.attention.n_heads"} <= found.keys():
        words.append(f"{found['model.n_layers']} layers of width {found['model.d_model']}")
        words.append(f"{found['model.attention.n_heads']} heads")
    if "model.context_length" in found:
        words.append(f"context {found['model.context_length']}")
    if found.get("data.corpus") or found.get("data.path"):
        words.append(str(found.get("data.corpus") or last_part(str(found["data.path"]))))
    elif n_sources := sum(key.startswith("data.sources.") and "weight" in key for key in found):
        words.append(f"a blend of {n_sources}")
    words += filter(None, (record.start.device, record.start.precision))
    if (began := beginning(record)) not in ("", RANDOM_WEIGHTS):
        words.append(f"began with {began}")
    return " · ".join(words)


def _facts(record: RecordedRun) -> list[tuple[str, str, str]]:
    """Return (name, value, detail), all text, for each known result in the report's summary."""
    found, floor = results(record), entropy_rate(record) or NAN
    step = f"at step {formatting.whole(found.best_step)}"
    sample = "" if record.sample is None else f", on a sample of {record.sample.tokens:,} tokens"
    planned = f"of {found.planned_steps:,}" if found.planned_steps else ""
    tokens, ceiling = record.start.tokens_per_step, record.start.ceiling_flops
    per_step = "" if tokens is None else f"{tokens:,} per step"
    of_peak = "" if ceiling is None else f" of {formatting.flops(ceiling)}"
    is_masked = 0 < found.loss_tokens < 0.99 * found.tokens
    share = f"{formatting.percent(found.loss_tokens / max(1, found.tokens))} of those seen"
    above_floor = formatting.fixed(found.best_loss - floor)
    parameters = NAN if found.parameters is None else found.parameters
    idle = formatting.whole(found.idle_experts)
    facts = [
        ("Best validation loss", formatting.fixed(found.best_loss), step + sample),
        ("Perplexity", formatting.fixed(found.perplexity, 3), "at the best step"),
        ("Bits per byte", formatting.fixed(found.bits_per_byte), "at the best step"),
        ("Above entropy rate", above_floor, f"the floor is {formatting.fixed(floor)}"),
        *(
            (title, formatting.fixed(value), "" if found.best_step is None else step)
            for title, value in found.further.items()
        ),
        ("Train loss", formatting.fixed(found.train_loss), "recent mean"),
        ("Steps", f"{found.steps:,}", planned),
        ("Tokens seen", formatting.count(found.tokens or NAN), per_step),
        ("Loss tokens", formatting.count(found.loss_tokens if is_masked else NAN), share),
        ("Parameters", formatting.count(parameters), formatting.whole(found.parameters)),
        ("Time", formatting.duration(found.training_seconds), ""),
        ("Pauses", *_pauses(record)),
        ("Tokens per second", formatting.count(found.tokens_per_second), "median"),
        ("MFU", formatting.percent(found.mfu), f"median{of_peak}"),
        ("Peak memory", formatting.size(found.peak_memory_bytes), ""),
        ("Slowest rank", *_slowest_rank(record)),
        ("Busiest expert", formatting.fixed(found.expert_imbalance, 2), f"× the mean; {idle} idle"),
    ]
    return [fact for fact in facts if fact[1] != "–"]


def _pauses(record: RecordedRun) -> tuple[str, str]:
    """Return two texts for the run's summary: the time between its sessions, in which nothing was
    trained, and the numbers of pauses and of steps that were made again. The first is "–" for a run
    that was never interrupted."""
    found = [pause for pause in pauses(record.sessions) if math.isfinite(pause)]
    lost = sum(each.lost_steps for each in record.sessions)
    if not found:
        return "–", ""
    detail = f"{len(found):,} of them; {lost:,} steps made again"
    return formatting.duration(sum(found)), detail


def _slowest_rank(record: RecordedRun) -> tuple[str, str]:
    """Return two texts: the median fraction of a step for which ranks waited for the slowest one,
    and the rank that was this most often. The first is – if nothing of it is recorded."""
    waited = [value for value in record.train["waited"].values if math.isfinite(value)]
    if not waited or not record.slowest_ranks:
        return "–", ""
    ((rank, host), times), *_ = Counter(record.slowest_ranks).most_common(1)
    share = formatting.percent(times / len(record.slowest_ranks))
    return formatting.percent(median(waited)), f"of a step; {share} of it rank {rank} on {host}"


def _losses(record: RecordedRun) -> Iterable[dict[str, str]]:
    """Yield two views of the loss plot, one without the run's start and one of the whole run:
    {label, wide, narrow}, the latter two as SVG for wide and narrow windows."""
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


def _strip(record: RecordedRun) -> dict[str, str]:
    """Return the figure of a run's sessions as SVG, as {"wide": …, "narrow": …} for wide and narrow
    windows; an empty dict for a run that was never resumed."""
    figures = {name: sessions_figure(record, inches, PAGE) for name, inches in STRIP_INCHES.items()}
    shown = record.sessions[-20:]
    on = ", ".join(f"{each.n_nodes} from step {each.first_step:,}" for each in shown)
    return {
        name: page_svg(figure, f"sessions-{name}", f"The last sessions over time, by nodes: {on}")
        for name, figure in figures.items()
        if figure is not None
    }


def _loss_note(record: RecordedRun) -> str:
    """Return a note about losses that are not finite and lines that could not be read; "" if
    none."""
    notes = []
    n_bad = record.train["loss"].n_non_finite + record.validation_losses().n_non_finite
    if n_bad:
        notes.append(f"{n_bad:,} loss values are not finite and not drawn.")
    if record.unreadable_lines:
        s = "s" if record.unreadable_lines > 1 else ""
        notes.append(f"{record.unreadable_lines:,} unreadable line{s} of metrics.jsonl skipped.")
    return " ".join(notes)


def _data_command(record: RecordedRun, step: int) -> str:
    """Return the command that prints a step's batch; "" if batches came from the user's
    function."""
    if as_table(record.plan.get("data")).get("batches") is not None:
        return ""
    return f"pentameter data {shlex.quote(str(record.folder))} --step {step}"


def _groups(values: Mapping[str, Any], general: str) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """Yield (section, [(key, value as text), …]) for a nested table; top-level values under the
    title `general`."""
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    for title, content in ({general: top} | sections).items():
        if rows := [_as_text(key, value) for key, value in flatten(content)]:
            yield title, rows


def _as_text(key: str, value: object) -> tuple[str, str]:
    """Return key and value as text; the units _bytes and _flops move from the key to the value."""
    if key.endswith("_bytes") and isinstance(value, int):
        return key.removesuffix("_bytes"), formatting.size(value)
    if key.endswith("_flops") and isinstance(value, int | float):
        return key.removesuffix("_flops"), formatting.flops(value)
    return key, formatting.scalar(value)
