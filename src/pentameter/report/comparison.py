"""Several runs compared, as data and as a page: one ranked row per run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pentameter import formatting
from pentameter.config.fields import leaves
from pentameter.config.fingerprint import NOT_THE_TRAINING
from pentameter.errors import ConfigError
from pentameter.report.markup import render
from pentameter.report.plots import (
    AXES,
    LOSSES,
    RUN_STYLES,
    hides_start,
    overlay_figure,
    page_svg,
    useful_axes,
)
from pentameter.report.ranking import Ranking, Run, compared_run, rank
from pentameter.report.reading import RecordedRun, check_run_folder, read_run
from pentameter.report.results import progress
from pentameter.train.log_files import strict


@dataclass(frozen=True)
class Column:
    """A table column: for each run a cell, and the key by which rows are sorted."""

    title: str
    cells: tuple[str, ...]
    keys: tuple[float | str, ...]
    """Number, or text for what is none; NaN for an unknown number."""
    path: str = ""
    """Setting's dotted path; "" for a result."""

    @property
    def is_number(self) -> bool:
        """Whether the cells are numbers, which stand at the right."""
        return all(isinstance(key, float) for key in self.keys)


@dataclass(frozen=True)
class Comparison:
    """Compared runs, the best first."""

    ranking: Ranking
    columns: tuple[Column, ...]
    """The ranked loss, the state, the settings that differ, and the other results that do."""
    alike: tuple[tuple[str, str], ...]
    """Title and value of results that are the same for all runs."""
    differing: dict[str, tuple[Any, ...]]
    """Setting → its value in each run; those that change the training first."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Compared runs, the best first."""
        return self.ranking.runs

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
            "settings": {path: list(values) for path, values in self.differing.items()},
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
    """Compare two runs or more, under way or ended.

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
    """Compare runs that were read."""
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = [str(record.folder) for record in records]
    given = list(map(compared_run, names, records))
    ranking = rank(given, list(differing_settings(given)))
    differing = differing_settings(ranking.runs)
    figures = list(_figures(ranking))
    alike = [
        figure for figure in figures if figure.title in OFTEN_ALIKE and len(set(figure.cells)) == 1
    ]
    first = figures[0].cells if figures else ()
    repeated = [
        figure for figure in figures[1:] if figure.title in LOSSES_TOLD and figure.cells == first
    ]
    shown = [figure for figure in figures if figure not in alike and figure not in repeated]
    found = [
        Column(path, tuple(map(formatting.scalar, values)), tuple(map(_key, values)), path)
        for path, values in differing.items()
    ]
    return Comparison(
        ranking,
        (*shown[:2], *found, *shown[2:]),
        tuple((figure.title, figure.cells[0]) for figure in alike),
        differing,
    )


def differing_settings(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Return settings that differ between runs with a readable config.toml; a key that an earlier
    version's run lacks has its default."""
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


FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("state", "outcome.label", str),
    ("best validation loss", "results.best_loss", formatting.fixed),
    ("at step", "results.best_step", formatting.whole),
    ("final validation loss", "results.final_loss", formatting.fixed),
    ("perplexity", "results.perplexity", lambda value: formatting.fixed(value, 3)),
    ("bits per byte", "results.bits_per_byte", formatting.fixed),
    ("train loss", "results.train_loss", formatting.fixed),
    ("steps", "record", progress),
    ("tokens", "results.tokens", formatting.count),
    ("time", "results.training_seconds", formatting.duration),
    ("tokens per second", "results.tokens_per_second", formatting.count),
    ("MFU", "results.mfu", formatting.percent),
    ("peak memory", "results.peak_memory_bytes", formatting.size),
    ("parameters", "results.parameters", formatting.whole),
    ("layout", "results.layout", lambda name: name or "–"),
    ("precision", "results.precision", lambda name: name or "–"),
    ("device", "results.device", lambda name: name or "–"),
)
"""Each result: title, attribute path in a `Run`, and formatter."""
OFTEN_ALIKE = ("at step", "steps", "tokens", "parameters", "layout", "precision", "device")
"""Results that need no column where all runs have the same."""
LOSSES_TOLD = ("best validation loss", "final validation loss")
"""Results that need no column where each run's equals the one that runs are ranked by."""


def _figures(ranking: Ranking) -> Iterator[Column]:
    """Yield results with a value for any run, the ranked one first."""
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
    """Return a cell's sort key: a number, NaN if unknown, else text."""
    if value is None or value == "":
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return formatting.scalar(value)
    return float(value)


# The page


def render_comparison(comparison: Comparison, live: str = "", version: str = "") -> str:
    """Render the whole page as HTML. live: address that a live page asks for its version."""
    return render(
        "comparison.html",
        scripts=("hover.js", "sort.js", *(("live.js",) if live else ())),
        live=live,
        live_version=version,
        comparison=comparison,
        ranking=comparison.ranking,
        losses=list(_losses([(run.label, run.record) for run in comparison.runs])),
        styles=RUN_STYLES,
        not_the_training=NOT_THE_TRAINING,
    )


def _losses(runs: Sequence[tuple[str, RecordedRun]]) -> Iterable[dict[str, Any]]:
    """Yield loss plots over each axis that tells the runs apart, and over the whole runs."""
    labels = {"step": "by step", "tokens": "by tokens", "elapsed_seconds": "by time"}
    asked = [(labels[axis], axis, True) for axis in useful_axes(runs)]
    if hides_start(runs):
        asked.append(("whole run", "step", False))
    for label, axis, settled in asked:
        plots = []
        for loss in LOSSES:
            figure = overlay_figure(loss, runs, axis=axis, settled=settled)
            if figure is None:
                continue
            name = "-".join((loss.split()[0], axis.replace("_", "-"), str(settled))).lower()
            svg = page_svg(figure, name, f"{loss} of {len(runs)} runs over {AXES[axis]}")
            plots.append((loss, svg))
        if plots:
            yield {"label": label, "plots": plots}
