"""Several runs compared, as data and as a page: one ranked row per run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pentameter import formatting
from pentameter.config.fingerprint import not_the_training
from pentameter.errors import ConfigError
from pentameter.record.events import strict
from pentameter.record.reading import RecordedRun, check_run_folder, read_run
from pentameter.record.results import progress
from pentameter.report.figures.markup import render, write_page
from pentameter.report.figures.plots import (
    AXES,
    BITS,
    LOSSES,
    NATS,
    RUN_STYLES,
    hides_start,
    loss_curve,
    overlay_figure,
    page_svg,
    useful_axes,
)
from pentameter.report.pages.settings import default_of
from pentameter.report.watch.ranking import Ranking, Run, compared_run, rank


@dataclass(frozen=True)
class Column:
    """A table column: for each run, in the table's order, a cell's text and a sort key."""

    title: str
    cells: tuple[str, ...]
    keys: tuple[float | str, ...]
    """Sort keys: numbers (NaN if unknown), or strings."""
    path: str = ""
    """The setting's dotted path; "" for a column of results."""

    @property
    def is_number(self) -> bool:
        """True if all cells are numbers, which are aligned right."""
        return all(isinstance(key, float) for key in self.keys)


@dataclass(frozen=True)
class Comparison:
    """Several runs compared, the best first: ranking, table columns and differing settings. A
    frozen record."""

    ranking: Ranking
    columns: tuple[Column, ...]
    """Table columns: the ranked loss, the state, what runs began with, differing settings, then
    other results."""
    alike: tuple[tuple[str, str], ...]
    """(Title, value) of results that are the same for all runs and so have no column."""
    differing: dict[str, tuple[Any, ...]]
    """Dotted path → the setting's value in each run; those that change the training first."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Compared runs, the best first."""
        return self.ranking.runs

    @property
    def unread(self) -> list[str]:
        """Sentences about files of the runs that could not be read."""
        return [words for run in self.runs for words in run.record.unread]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `compare --json` prints."""
        return {
            "ranked_by": self.ranking.key if self.ranking.is_ranked else None,
            "runs": [
                {
                    "run": str(run.record.folder),
                    "label": run.label,
                    "outcome": run.outcome.label,
                    "leads": run.label in self.ranking.leaders,
                    **strict(asdict(run.results)),
                }
                for run in self.runs
            ],
            "settings": {
                path: list(map(_for_json, values)) for path, values in self.differing.items()
            },
            "repeats": [
                {
                    "runs": [run.label for run in group.runs],
                    "mean": group.mean,
                    "standard_deviation": group.deviation,
                }
                for group in self.ranking.repeats
            ],
            "verdict": self.ranking.verdict,
            "noise": self.ranking.noise,
        }


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Compare the runs in two or more run folders, whether running or ended.

    Raises:
        ConfigError: fewer than two, one named twice, or a folder without a run.
        StorageError: a folder cannot be read.
    """
    if len(folders) < 2:
        raise ConfigError(
            "compare takes two runs or more, e.g. runs/a runs/b; report RUN_DIR shows one"
        )
    for folder in folders:
        check_run_folder(folder)
    resolved = [folder.resolve() for folder in folders]
    for path, folder in zip(resolved, folders, strict=True):
        if resolved.count(path) > 1:
            raise ConfigError(f"{folder} is named twice; name each run once")
    with ThreadPoolExecutor() as pool:  # a lock held on another machine is watched for seconds
        return compare_records(list(pool.map(read_run, folders)))


def compare_records(records: Sequence[RecordedRun]) -> Comparison:
    """Compare runs that were already read. Their labels are their names or, if two runs have the
    same name, their folders for all."""
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = [str(record.folder) for record in records]
    given = list(map(compared_run, names, records))
    ranking = rank(given, list(differing_settings(given)))
    differing = differing_settings(ranking.runs)
    figures = list(_figures(ranking))
    first = figures[0].cells if figures else ()
    seen = next((figure.cells for figure in figures if figure.title == "tokens seen"), ())
    told = dict.fromkeys(LOSSES_TOLD, first) | {"loss tokens": seen}
    repeated = [figure for figure in figures[1:] if told.get(figure.title) == figure.cells]
    new = [figure for figure in figures if figure not in repeated]
    alike = [
        figure for figure in new if figure.title in OFTEN_ALIKE and len(set(figure.cells)) == 1
    ]
    shown = [figure for figure in new if figure not in alike]
    n_first = 2 + any(figure.title == "began with" for figure in shown)
    found = [
        Column(path, tuple(map(formatting.scalar, values)), tuple(map(_key, values)), path)
        for path, values in differing.items()
    ]
    return Comparison(
        ranking,
        (*shown[:n_first], *found, *shown[n_first:]),
        tuple((figure.title, figure.cells[0]) for figure in alike),
        differing,
    )


def differing_settings(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Return dotted path → value in each run (in the given order) for every setting that differs
    between them, except the name. A run without a readable config.toml has None; a key that an
    earlier version's run lacks has its default."""
    known = [run.settings for run in runs if run.settings]
    paths = dict.fromkeys(path for found in known for path in found if path != "name")
    differing = {}
    for path in paths:
        default = default_of(path)
        values = [found.get(path, default) for found in known]
        if any(value != values[0] for value in values):
            differing[path] = tuple(
                run.settings.get(path, default) if run.settings else None for run in runs
            )
    return dict(sorted(differing.items(), key=lambda item: item[0] in not_the_training()))


FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("state", "outcome.label", str),
    ("began with", "results.began", lambda words: words or "–"),
    ("best validation loss", "results.best_loss", formatting.fixed),
    ("at step", "results.best_step", formatting.whole),
    ("final validation loss", "results.final_loss", formatting.fixed),
    ("perplexity", "results.perplexity", lambda value: formatting.fixed(value, 3)),
    ("bits per byte", "results.bits_per_byte", formatting.fixed),
    ("train loss", "results.train_loss", formatting.fixed),
    ("steps", "record", progress),
    ("tokens seen", "results.tokens", formatting.count),
    ("loss tokens", "results.loss_tokens", formatting.count),
    ("time", "results.training_seconds", formatting.duration),
    ("tokens per second", "results.tokens_per_second", formatting.count),
    ("MFU", "results.mfu", formatting.percent),
    ("peak memory", "results.peak_memory_bytes", formatting.size),
    ("busiest expert ÷ mean", "results.expert_imbalance", lambda value: formatting.fixed(value, 2)),
    ("idle experts", "results.idle_experts", formatting.whole),
    ("router z", "results.router_z", lambda value: formatting.fixed(value, 2)),
    ("bytes exchanged a step", "results.exchanged_bytes", formatting.size),
    ("parameters", "results.parameters", formatting.whole),
    ("layout", "results.layout", lambda name: name or "–"),
    ("precision", "results.precision", lambda name: name or "–"),
    ("device", "results.device", lambda name: name or "–"),
)
"""Each result: title, attribute path in a `Run`, and formatter."""
OFTEN_ALIKE = (
    *("began with", "at step", "steps", "tokens seen", "loss tokens", "parameters"),
    *("layout", "precision", "device"),
)
"""Results that get no column if all runs have the same."""
LOSSES_TOLD = ("best validation loss", "final validation loss")
"""Results that get no column if each run's is equal to the loss that runs are ranked by."""


def _figures(ranking: Ranking) -> Iterator[Column]:
    """Yield the columns of results: one for each result that any of the runs has (those in FIGURES,
    then further evaluations), the loss by which runs are ranked first."""
    first = f"results.{ranking.key}"
    for title, attribute, shown in sorted(FIGURES, key=lambda figure: figure[1] != first):
        values = [attrgetter(attribute)(run) for run in ranking.runs]
        cells = tuple(map(shown, values))
        steps = [float(run.record.last_step) for run in ranking.runs]
        if set(cells) != {"–"}:
            keys = steps if attribute == "record" else [_key(value) for value in values]
            yield Column(title, cells, tuple(keys))
    for title in dict.fromkeys(title for run in ranking.runs for title in run.results.further):
        values = [run.results.further.get(title, math.nan) for run in ranking.runs]
        yield Column(title, tuple(map(formatting.fixed, values)), tuple(values))


def _key(value: Any) -> float | str:
    """Return a cell's sort key: a float, NaN if the value is None or empty, else text."""
    if value is None or value == "":
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return formatting.scalar(value)
    return float(value)


def _for_json(value: Any) -> Any:
    """Return a setting's value for strict JSON: NaN and infinity become null, in lists, too."""
    if isinstance(value, list):
        return [_for_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The page


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the comparison page into a file, and return its path. Raises StorageError."""
    return write_page(path, render_comparison(comparison))


def render_comparison(comparison: Comparison, live: str = "", version: str = "") -> str:
    """Render the comparison page as HTML. live: address that the page polls for changes, "" for a
    page in a file; version: the version that this page shows."""
    return render(
        "comparison.html",
        scripts=("hover.js", "sort.js"),
        live=live,
        live_version=version,
        comparison=comparison,
        ranking=comparison.ranking,
        losses=list(_losses(comparison)),
        styles=RUN_STYLES,
        not_the_training=not_the_training(),
    )


def _losses(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the page's views, {label, plots}. First come all runs' losses without the fall at the
    start, over steps, and over tokens and time where these differ; then the whole curves over
    steps. If nats per token do not compare, these are in bits per byte, as far as known, and views
    in nats follow."""
    labels = {"step": "by step", "tokens": "by tokens", "elapsed_seconds": "by time"}
    runs = [(run.label, run.record) for run in comparison.runs]
    has_bits = any(len(loss_curve(record, next(iter(LOSSES)), BITS)) for _, record in runs)
    drawn = BITS if has_bits and not comparison.ranking.nats_compare else NATS
    asked = [(labels[axis], axis, True, drawn) for axis in useful_axes(runs)]
    if hides_start(runs):
        asked.append(("whole run", "step", False, drawn))
    if drawn == BITS:
        asked.append((NATS, "step", True, NATS))
    for label, axis, settled, unit in asked:
        plots = []
        for loss in LOSSES:
            figure = overlay_figure(loss, runs, axis=axis, settled=settled, unit=unit)
            if figure is None:
                continue
            parts = (loss.split()[0], axis, str(settled), *(["nats"] if label == NATS else []))
            name = "-".join(parts).replace("_", "-").lower()
            svg = page_svg(figure, name, f"{loss} of {len(runs)} runs over {AXES[axis]}")
            plots.append((loss, svg))
        if plots:
            yield {"label": label, "plots": plots}
