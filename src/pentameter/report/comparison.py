"""Several runs side by side, as data and as a page: their results, and the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pentameter import wording
from pentameter.config.fields import leaves
from pentameter.config.fingerprint import NOT_THE_TRAINING
from pentameter.errors import ConfigError
from pentameter.report.markup import render
from pentameter.report.plots import (
    AXES,
    LOSSES,
    RUN_COLOURS,
    is_cut,
    overlay_figure,
    page_svg,
    useful_axes,
)
from pentameter.report.reading import RecordedRun, check_run_folder, read_run
from pentameter.report.results import Results, RunOutcome, outcome, progress, results
from pentameter.report.settings import Settings, settings
from pentameter.train.log_files import strict

SAME_TEXT = ("data.tokenizer", "data.order", "data.packing")
"""Keys of [data] that leave open which text is held out."""


@dataclass(frozen=True)
class Run:
    """One of the runs, under the name that it has on the page."""

    label: str
    record: RecordedRun
    results: Results
    outcome: RunOutcome
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
                    "outcome": run.outcome.label,
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
    for folder in folders:
        check_run_folder(folder)
    places = [folder.resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{folder} is named twice; name each run once")
    records = [read_run(folder) for folder in folders]
    names = [record.name for record in records]
    labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    runs = tuple(
        Run(label, record, results(record), outcome(record), settings(record.config))
        for label, record in zip(labels, records, strict=True)
    )
    differing = _differing(runs)
    return Comparison(runs, tuple(_rows(runs)), differing, _verdict(runs, differing))


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


ROUNDOFF = {
    "fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-9,
}  # fmt: skip
"""Largest relative error of rounding to a precision. Where two losses differ by less, the order of
sums decides, as on another layout."""
LOSS_FIGURES = ("best_loss", "final_loss", "perplexity", "bits_per_byte", "train_loss")

FIGURES: tuple[tuple[str, str, Callable[[Any], str], Callable[..., float] | None], ...] = (
    ("outcome", "outcome.label", str, None),
    ("best validation loss", "results.best_loss", wording.fixed, min),
    ("at step", "results.best_step", wording.whole, None),
    ("final validation loss", "results.final_loss", wording.fixed, min),
    ("perplexity", "results.perplexity", lambda value: wording.fixed(value, 3), min),
    ("bits per byte", "results.bits_per_byte", wording.fixed, min),
    ("train loss", "results.train_loss", wording.fixed, min),
    ("steps", "record", progress, None),
    ("tokens", "results.tokens", wording.count, None),
    ("time", "results.training_seconds", wording.duration, None),
    ("tokens per second", "results.tokens_per_second", wording.count, max),
    ("MFU", "results.mfu", wording.percent, None),
    ("peak memory", "results.peak_memory_bytes", wording.size, None),
    ("parameters", "results.parameters", wording.whole, None),
    ("layout", "results.layout", lambda name: name or "–", None),
    ("precision", "results.precision", lambda name: name or "–", None),
    ("device", "results.device", lambda name: name or "–", None),
)
"""Title of each line of the table, its value in a `Run`, the words for it, and which is best."""


def _rows(runs: Sequence[Run]) -> Iterator[Row]:
    """The lines of the table that hold something for any run; the best are marked, unless nothing
    tells them from the rest."""
    for title, place, shown, choose in FIGURES:
        values = [attrgetter(place)(run) for run in runs]
        cells = tuple(map(shown, values))
        best = frozenset() if choose is None else _best(runs, place, values, cells, choose)
        if set(cells) != {"–"}:
            yield Row(title, cells, best)


def _best(
    runs: Sequence[Run],
    place: str,
    values: Sequence[float],
    cells: Sequence[str],
    choose: Callable[..., Any],
) -> frozenset[int]:
    """The runs whose value is the best, or as good as its precision resolves; none where that holds
    of all, or where all read the same."""
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return frozenset()
    first: int = choose(finite, key=values.__getitem__)
    key = place.removeprefix("results.")
    best = frozenset(
        index
        for index in finite
        if values[index] == values[first]
        or (key in LOSS_FIGURES and not _resolved(key, runs[index], runs[first]))
    )
    is_told = len(best) < len(finite) and len({cells[index] for index in finite}) > 1
    return best if is_told else frozenset()


def _resolved(key: str, one: Run, other: Run) -> bool:
    """True if a loss of two runs differs by more than the rounding of what they computed with."""
    a, b = (getattr(run.results, key) for run in (one, other))
    if key == "perplexity":  # whose logarithm is the loss
        a, b = (math.log(value) if value > 0 else value for value in (a, b))
    words = {word for run in (one, other) for word in run.results.precision.split()}
    roundoff = max((ROUNDOFF[word] for word in words & ROUNDOFF.keys()), default=ROUNDOFF["fp32"])
    return bool(abs(a - b) > roundoff * max(abs(a), abs(b)))


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
    key = "bits_per_byte" if other_tokens else "best_loss"
    ranked = sorted(
        (run for run in runs if math.isfinite(getattr(run.results, key))),
        key=lambda run: (getattr(run.results, key), run.label),
    )
    if len(ranked) < 2:
        return ""
    best, next_best = ranked[:2]
    first, second = (getattr(run.results, key) for run in (best, next_best))
    why = ", which compare where tokens differ" if other_tokens else ""
    if first == second:
        return f"{best.label} and {next_best.label} are equal in {what}{why}: {first:.4f}."
    if not _resolved(key, best, next_best):
        return (
            f"{best.label} and {next_best.label} are equal in {what}{why}, as far as "
            f"{best.results.precision or 'their precision'} tells: {first:.4f} and {second:.4f}."
        )
    return (
        f"{best.label} has the lowest {what}{why}: {first:.4f}, {second - first:.4f} below "
        f"{next_best.label}."
    )


# The page


def render_comparison(comparison: Comparison) -> str:
    """The whole page as HTML."""
    return render(
        "comparison.html",
        comparison=comparison,
        losses=list(_losses([(run.label, run.record) for run in comparison.runs])),
        n_colours=len(RUN_COLOURS),
        not_the_training=NOT_THE_TRAINING,
    )


def _losses(runs: Sequence[tuple[str, RecordedRun]]) -> Iterable[dict[str, Any]]:
    """The losses over each axis that tells the runs apart, and those of the whole runs."""
    labels = {"step": "by step", "tokens": "by tokens", "elapsed_seconds": "by time"}
    asked = [(labels[axis], axis, True) for axis in useful_axes(runs)]
    if is_cut(runs):
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
