"""Several runs side by side, as data and as a page: their results, and the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pentameter.config.fields import leaves
from pentameter.config.fingerprint import NOT_THE_TRAINING
from pentameter.errors import ConfigError
from pentameter.report import wording
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
)
from pentameter.report.plots import (
    AXES,
    LOSSES,
    RUN_COLOURS,
    is_cut,
    overlay_figure,
    page_svg,
    useful_axes,
)
from pentameter.report.reading import RecordedRun, read_run
from pentameter.report.results import Results, outcome, results, strict
from pentameter.report.settings import Settings, settings

SAME_TEXT = ("data.tokenizer", "data.order", "data.packing")
"""Keys of [data] that leave open which text is held out."""
RUN_FILES = ("config.toml", "metrics.jsonl")


@dataclass(frozen=True)
class Run:
    """One of the runs, under the name that it has on the page."""

    label: str
    record: RecordedRun
    results: Results
    settings: Settings


@dataclass(frozen=True)
class Row:
    """A line of the table of results: a cell for each run, and which of them are the best."""

    title: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """Runs in the order they were named in."""

    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    differing: dict[str, tuple[Any, ...]]
    """Setting → its value in each run; those that change the training first."""
    verdict: str
    """The sentence that names the best run; "" where none can be named."""

    def to_json(self) -> dict[str, Any]:
        """The shape of `compare --json`."""
        return {
            "runs": [
                {
                    "run": str(run.record.folder),
                    "label": run.label,
                    "outcome": outcome(run.record).label,
                    **strict(asdict(run.results)),
                }
                for run in self.runs
            ],
            "settings": {path: list(values) for path, values in self.differing.items()},
            "verdict": self.verdict,
        }


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """The comparison of two runs or more, under way or ended.

    Raises:
        ConfigError: fewer than two, one named twice, or a folder that holds no run.
        StorageError: a folder cannot be read.
    """
    if len(folders) < 2:
        raise ConfigError(
            "compare takes two runs or more, e.g. runs/a runs/b; report RUN_DIR shows one"
        )
    places = [_checked(folder).resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{folder} is named twice; name each run once")
    records = [read_run(folder) for folder in folders]
    names = [record.name for record in records]
    labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    runs = tuple(
        Run(label, record, results(record), settings(record.config))
        for label, record in zip(labels, records, strict=True)
    )
    differing = _differing(runs)
    return Comparison(runs, tuple(_rows(runs)), differing, _verdict(runs, differing))


def _checked(folder: Path) -> Path:
    """The folder, if it holds a run."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; a run is a folder runs/NAME")
    if any((folder / name).is_file() for name in RUN_FILES):
        return folder
    inside = sorted(
        str(child)
        for child in folder.iterdir()
        if child.is_dir() and any((child / name).is_file() for name in RUN_FILES)
    )
    hint = f"; the runs in it: {', '.join(inside[:10])}" if inside else ""
    raise ConfigError(f"{folder} holds no run: it has neither {' nor '.join(RUN_FILES)}{hint}")


def _differing(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """The settings that differ between runs whose config.toml can be read.

    A key that a run of an earlier version lacks has its default.
    """
    known = [run.settings for run in runs if run.settings]
    paths = dict.fromkeys(path for found in known for path in found if path != "name")
    differing = {}
    for path in paths:
        default = leaves()[path].default if path in leaves() else None
        values = [found.get(path, default) for found in known]
        if any(value != values[0] for value in values):
            differing[path] = tuple(
                run.settings.get(path, default) if run.settings else None for run in runs
            )
    return dict(sorted(differing.items(), key=lambda item: item[0] in NOT_THE_TRAINING))


def _rows(runs: Sequence[Run]) -> list[Row]:
    """The lines of the table that hold something for any run."""
    fixed = wording.fixed
    lowest, highest = min, max
    rows = [
        _row(runs, "best validation loss", lambda r: fixed(r.best_loss), lambda r: r.best_loss,
             lowest),
        _row(runs, "at step", lambda r: "–" if r.best_step is None else f"{r.best_step:,}"),
        _row(runs, "final validation loss", lambda r: fixed(r.final_loss), lambda r: r.final_loss,
             lowest),
        _row(runs, "perplexity", lambda r: fixed(r.perplexity, 3), lambda r: r.perplexity, lowest),
        _row(runs, "bits per byte", lambda r: fixed(r.bits_per_byte), lambda r: r.bits_per_byte,
             lowest),
        _row(runs, "train loss", lambda r: fixed(r.train_loss), lambda r: r.train_loss, lowest),
        _row(runs, "steps", lambda r: f"{r.steps:,}" + _of(r)),
        _row(runs, "tokens", lambda r: wording.count(r.tokens)),
        _row(runs, "time", lambda r: wording.duration(r.training_seconds)),
        _row(runs, "tokens per second", lambda r: wording.count(r.tokens_per_second),
             lambda r: r.tokens_per_second, highest),
        _row(runs, "MFU", lambda r: wording.percent(r.mfu)),
        _row(runs, "peak memory", lambda r: wording.size(r.peak_memory_bytes)),
        _row(runs, "parameters", lambda r: f"{r.parameters:,}" if r.parameters else "–"),
        _row(runs, "layout", lambda r: r.layout or "–"),
        _row(runs, "precision", lambda r: r.precision or "–"),
        _row(runs, "device", lambda r: r.device or "–"),
    ]  # fmt: skip
    ended = Row("outcome", tuple(outcome(run.record).label for run in runs))
    return [ended, *(row for row in rows if set(row.cells) != {"–"})]


def _row(
    runs: Sequence[Run],
    title: str,
    shown: Callable[[Results], str],
    value: Callable[[Results], float] | None = None,
    choose: Callable[[list[float]], float] = min,
) -> Row:
    """A line; where it has a `value` the best of them are marked, unless all are the same."""
    best: frozenset[int] = frozenset()
    if value is not None:
        values = [value(run.results) for run in runs]
        finite = [v for v in values if math.isfinite(v)]
        if len(set(finite)) > 1:
            best = frozenset(i for i, v in enumerate(values) if v == choose(finite))
    return Row(title, tuple(shown(run.results) for run in runs), best)


def _of(found: Results) -> str:
    return f" of {found.planned_steps:,}" if found.planned_steps else ""


def _verdict(runs: Sequence[Run], differing: dict[str, Any]) -> str:
    """A sentence: the run of the lowest validation loss, and by how much; or why none is.

    Losses per token compare where the tokens are the same, bits per byte where the text is.
    """
    texts = [path for path in differing if path.startswith("data.") and path not in SAME_TEXT]
    if texts:
        return (
            f"The runs are evaluated on different text ({', '.join(texts)}): losses do not compare."
        )
    other_tokens = {"data.tokenizer", "model.vocab_size"} & differing.keys()
    what = "bits per byte" if other_tokens else "validation loss"
    ranked = sorted(
        (value, run.label)
        for run in runs
        if math.isfinite(
            value := run.results.bits_per_byte if other_tokens else run.results.best_loss
        )
    )
    if len(ranked) < 2:
        return ""
    (first, best), (second, next_best) = ranked[:2]
    why = ", which compare where tokens differ" if other_tokens else ""
    if first == second:
        return f"{best} and {next_best} are equal in {what}{why}: {first:.4f}."
    return (
        f"{best} has the lowest {what}{why}: {first:.4f}, {second - first:.4f} below {next_best}."
    )


# The page


def render_comparison(comparison: Comparison) -> str:
    """The whole page as HTML."""
    labels = [run.label for run in comparison.runs]
    return document(
        f"{', '.join(labels)} – pentameter compare",
        (
            _header(comparison),
            _losses(comparison),
            section("Results", _table(comparison, "", _result_rows(comparison))),
            _settings(comparison),
        ),
        ", ".join(str(run.record.folder) for run in comparison.runs),
    )


def _header(comparison: Comparison) -> str:
    runs = "".join(
        f"<li>{_key(index)}<b>{text(run.label)}</b> {badge(ended.kind, ended.label)} "
        f"<span>{text(ended.sentence)}</span></li>"
        for index, run in enumerate(comparison.runs)
        if (ended := outcome(run.record))
    )
    verdict = f'<p class="outcome">{text(comparison.verdict)}</p>' if comparison.verdict else ""
    return (
        f"<header><h1>{len(comparison.runs)} runs compared</h1>{verdict}"
        f'<ul class="runs">{runs}</ul></header>'
    )


def _losses(comparison: Comparison) -> str:
    runs = [(run.label, run.record) for run in comparison.runs]
    labels = {"step": "by step", "tokens": "by tokens", "elapsed_seconds": "by time"}
    asked = [(labels[axis], axis, True) for axis in useful_axes(runs)]
    if is_cut(runs):
        asked.append(("whole run", "step", False))
    views = []
    for label, axis, settled in asked:
        figures = []
        for loss in LOSSES:
            figure = overlay_figure(loss, runs, axis=axis, settled=settled)
            if figure is None:
                continue
            name = "-".join((loss.split()[0], axis.replace("_", "-"), str(settled))).lower()
            svg = page_svg(figure, name, f"{loss} of {len(runs)} runs over {AXES[axis]}")
            figures.append(plot_card(loss, svg))
        if figures:
            views.append((label, pair(figures)))
    if not views:
        return section("Loss", nothing("No step has been logged yet."))
    return section("Loss", tabs("axis", views))


def _result_rows(comparison: Comparison) -> Iterable[str]:
    for row in comparison.rows:
        cells = "".join(
            f"<td{' class=best' if index in row.best else ''}>{text(cell)}</td>"
            for index, cell in enumerate(row.cells)
        )
        yield f'<tr><th scope="row">{text(row.title)}</th>{cells}</tr>'


def _settings(comparison: Comparison) -> str:
    if not comparison.differing:
        return section("Settings that differ", nothing("The runs have the same settings."))
    rows = []
    for path, values in comparison.differing.items():
        cells = "".join(f"<td>{text(wording.scalar(value))}</td>" for value in values)
        aside = " class=muted" if path in NOT_THE_TRAINING else ""
        rows.append(f'<tr{aside}><th scope="row">{dotted(path)}</th>{cells}</tr>')
    some_pale = comparison.differing.keys() & NOT_THE_TRAINING.keys()
    said = "Pale: changes no weight of a step." if some_pale else ""
    return section("Settings that differ", _table(comparison, "setting", rows) + note(said))


def _table(comparison: Comparison, corner: str, rows: Iterable[str]) -> str:
    """A table with a column for each run."""
    runs = [head(_key(i) + text(run.label)) for i, run in enumerate(comparison.runs)]
    return table([head(text(corner)), *runs], rows, "rows settings")


def _key(index: int) -> str:
    return f'<i class="key run-{index % len(RUN_COLOURS) + 1}"></i>'
