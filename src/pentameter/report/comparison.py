"""Comparison of several runs, as data and as a page: results, and settings that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pentameter import formatting
from pentameter.config.choices import PRECISIONS
from pentameter.config.fields import leaves
from pentameter.config.fingerprint import NOT_THE_TRAINING
from pentameter.errors import ConfigError
from pentameter.report.markup import render
from pentameter.report.plots import (
    AXES,
    LOSSES,
    RUN_COLOURS,
    hides_start,
    overlay_figure,
    page_svg,
    useful_axes,
)
from pentameter.report.reading import RecordedRun, check_run_folder, read_run
from pentameter.report.results import Results, RunOutcome, outcome, progress, results
from pentameter.report.settings import Settings, settings
from pentameter.train.log_files import strict

SAME_TEXT = ("data.tokenizer", "data.order", "data.packing")
"""Keys in [data] that do not change the held-out text."""


@dataclass(frozen=True)
class Run:
    """One compared run and its label on the page."""

    label: str
    record: RecordedRun
    results: Results
    outcome: RunOutcome
    settings: Settings


@dataclass(frozen=True)
class ResultRow:
    """A line in the results table: one cell per run, and the indices of the best."""

    title: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """Compared runs, in the order given."""

    runs: tuple[Run, ...]
    rows: tuple[ResultRow, ...]
    differing: dict[str, tuple[Any, ...]]
    """Setting → its value in each run; those that change the training first."""
    verdict: str
    """Sentence naming the best run; "" where none can be named."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `compare --json` prints."""
        return {
            "runs": [
                {
                    "run": str(run.record.folder),
                    "label": run.label,
                    "outcome": run.outcome.label,
                    **strict(asdict(run.results)),
                }
                for run in self.runs
            ],
            "settings": {path: list(values) for path, values in self.differing.items()},
            "verdict": self.verdict,
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
        records = list(pool.map(read_run, folders))
    names = [record.name for record in records]
    labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    runs = tuple(
        Run(label, record, results(record), outcome(record), settings(record.config))
        for label, record in zip(labels, records, strict=True)
    )
    differing = _differing(runs)
    return Comparison(runs, tuple(_rows(runs)), differing, _verdict(runs, differing))


def _differing(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
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


LOSS_FIGURES = ("best_loss", "final_loss", "perplexity", "bits_per_byte", "train_loss")

FIGURES: tuple[tuple[str, str, Callable[[Any], str], Callable[..., float] | None], ...] = (
    ("outcome", "outcome.label", str, None),
    ("best validation loss", "results.best_loss", formatting.fixed, min),
    ("at step", "results.best_step", formatting.whole, None),
    ("final validation loss", "results.final_loss", formatting.fixed, min),
    ("perplexity", "results.perplexity", lambda value: formatting.fixed(value, 3), min),
    ("bits per byte", "results.bits_per_byte", formatting.fixed, min),
    ("train loss", "results.train_loss", formatting.fixed, min),
    ("steps", "record", progress, None),
    ("tokens", "results.tokens", formatting.count, None),
    ("time", "results.training_seconds", formatting.duration, None),
    ("tokens per second", "results.tokens_per_second", formatting.count, max),
    ("MFU", "results.mfu", formatting.percent, None),
    ("peak memory", "results.peak_memory_bytes", formatting.size, None),
    ("parameters", "results.parameters", formatting.whole, None),
    ("layout", "results.layout", lambda name: name or "–", None),
    ("precision", "results.precision", lambda name: name or "–", None),
    ("device", "results.device", lambda name: name or "–", None),
)
"""Each table line: title, attribute path in a `Run`, formatter, and the function that picks the
best."""


def _rows(runs: Sequence[Run]) -> Iterator[ResultRow]:
    """Yield table lines that have a value for any run, the best marked."""
    for title, attribute, shown, choose in FIGURES:
        values = [attrgetter(attribute)(run) for run in runs]
        cells = tuple(map(shown, values))
        best = frozenset() if choose is None else _best(runs, attribute, values, cells, choose)
        if set(cells) != {"–"}:
            yield ResultRow(title, cells, best)


def _best(
    runs: Sequence[Run],
    attribute: str,
    values: Sequence[float],
    cells: Sequence[str],
    choose: Callable[..., Any],
) -> frozenset[int]:
    """Return indices of runs with the best value, or one equal to it within the precision; empty if
    that holds for all, or all read the same."""
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return frozenset()
    first: int = choose(finite, key=values.__getitem__)
    key = attribute.removeprefix("results.")
    best = frozenset(
        index
        for index in finite
        if values[index] == values[first]
        or (key in LOSS_FIGURES and not _resolved(key, runs[index], runs[first]))
    )
    is_told = len(best) < len(finite) and len({cells[index] for index in finite}) > 1
    return best if is_told else frozenset()


def _resolved(key: str, one: Run, other: Run) -> bool:
    """Return whether two runs' losses differ by more than their precision's rounding."""
    a, b = (getattr(run.results, key) for run in (one, other))
    if key == "perplexity":  # whose logarithm is the loss
        a, b = (math.log(value) if value > 0 else value for value in (a, b))
    words = {word for run in (one, other) for word in run.results.precision.split()}
    # Below it the order of sums decides, as on another layout.
    roundoff = max(PRECISIONS[word].roundoff for word in words & PRECISIONS.keys() or {"fp32"})
    return bool(abs(a - b) > roundoff * max(abs(a), abs(b)))


def _verdict(runs: Sequence[Run], differing: dict[str, Any]) -> str:
    """Say in a sentence which run has the lowest validation loss and by how much, or why none is
    named.

    Losses per token compare for equal tokens, bits per byte for equal text.
    """
    texts = [path for path in differing if path.startswith("data.") and path not in SAME_TEXT]
    if texts:
        return (
            f"The runs are evaluated on different text ({', '.join(texts)}): losses do not compare."
        )
    measure, key, why = "validation loss", "best_loss", ""
    if {"data.tokenizer", "model.vocab_size"} & differing.keys():
        measure, key = "bits per byte", "bits_per_byte"
        why = ", which compare where tokens differ"
    ranked = sorted(
        (run for run in runs if math.isfinite(getattr(run.results, key))),
        key=lambda run: (getattr(run.results, key), run.label),
    )
    if len(ranked) < 2:
        return ""
    best, next_best = ranked[:2]
    first, second = (getattr(run.results, key) for run in (best, next_best))
    if first == second:
        return f"{best.label} and {next_best.label} are equal in {measure}{why}: {first:.4f}."
    if not _resolved(key, best, next_best):
        return (
            f"{best.label} and {next_best.label} are equal in {measure}{why}, as far as "
            f"{best.results.precision or 'their precision'} tells: {first:.4f} and {second:.4f}."
        )
    return (
        f"{best.label} has the lowest {measure}{why}: {first:.4f}, {second - first:.4f} below "
        f"{next_best.label}."
    )


# The page


def render_comparison(comparison: Comparison) -> str:
    """Render the whole page as HTML."""
    return render(
        "comparison.html",
        comparison=comparison,
        losses=list(_losses([(run.label, run.record) for run in comparison.runs])),
        n_colours=len(RUN_COLOURS),
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
