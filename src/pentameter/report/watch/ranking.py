"""Runs ranked by their loss. No run is called best if its lead is within seed noise."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pentameter.config.choices import PRECISIONS
from pentameter.config.fields import leaves
from pentameter.config.fingerprint import not_the_training
from pentameter.record.reading import RecordedRun, as_table
from pentameter.record.results import Results, RunOutcome, outcome, results
from pentameter.report.pages.settings import Settings, default_of, settings

SAME_TEXT = ("data.tokenizer", "data.order", "data.packing", "data.evaluations")
"""Prefixes of [data] keys that may differ between runs without changing the held-out text."""
UNKNOWN_NOISE = 0.005
"""If no seed was repeated, a run is called best only with a larger relative lead in loss than this.
The seed alone moves the presets' losses by up to so much: 0.007 of 1.47 for `shakespeare-char`."""
STUDENT_T = (12.71, 4.31, 3.19, 2.78, 2.58, 2.45, 2.37, 2.31, 2.27, 2.23)
"""Quantiles of Student's t for 1, 2, … degrees of freedom (two-sided, 5%). Beyond the last, it
falls to 1.96."""


@dataclass(frozen=True)
class Run:
    """One compared run: its label on the page, everything that its folder records, and the results,
    outcome and settings computed from that."""

    label: str
    record: RecordedRun
    results: Results
    outcome: RunOutcome
    settings: Settings


def compared_run(label: str, record: RecordedRun) -> Run:
    """Return a recorded run with its results, outcome and settings, labelled for a comparison."""
    return Run(label, record, results(record), outcome(record), settings(record.config))


_SEED = re.compile(r"_seed-\d+(?![^_])|(?<![^/])seed-\d+_")  # beside another value of a sweep


@dataclass(frozen=True)
class Repeats:
    """A group of finished runs that differ only in their seed and began with the same weights, so
    that their spread is chance; or a single run. `mean` is their mean loss."""

    runs: tuple[Run, ...]
    """One run per seed, the lowest loss first."""
    mean: float
    deviation: float
    """Standard deviation between seeds; NaN for a single run."""

    @property
    def label(self) -> str:
        """The run's label. Of several the label that they have without their seeds, as a sweep
        names them, else the best run's, and the number of seeds."""
        first = self.runs[0].label
        if len(self.runs) == 1:
            return first
        without = {_SEED.sub("", run.label) for run in self.runs}
        return f"{without.pop() if len(without) == 1 else first} ({len(self.runs)} seeds)"

    @property
    def loss(self) -> str:
        """The mean loss, with the deviation between several seeds: "1.4605 ± 0.0007"."""
        spread = f" ± {self.deviation:.4f}" if len(self.runs) > 1 else ""
        return f"{self.mean:.4f}{spread}"


@dataclass(frozen=True)
class Ranking:
    """Runs ranked by a loss, and a verdict whether one is best."""

    runs: tuple[Run, ...]
    """Runs by rising loss, those without one last; in the order given if losses do not compare."""
    measure: str
    """Title of the ranked loss."""
    key: str
    """The ranked loss's field in `Results`."""
    is_ranked: bool
    """False if runs were evaluated on different text, so that losses do not compare."""
    repeats: tuple[Repeats, ...]
    """Groups of runs that differ only in their seed, two or more each."""
    leaders: frozenset[str]
    """Labels of the best run and its other seeds; empty if its lead may be noise."""
    verdict: str
    """A sentence that names the best run or says why none is; "" if fewer than two have a loss."""
    noise: str
    """A sentence about the loss's deviation between seeds; "" if losses do not compare."""

    @property
    def nats_compare(self) -> bool:
        """True if nats per token compare: all runs have the same tokens and held-out text."""
        return self.is_ranked and self.key == "best_loss"


def rank(runs: Sequence[Run], differing: Sequence[str]) -> Ranking:
    """Rank runs by their best validation loss per token, or by bits per byte if their tokenizers
    differ. `differing` are the dotted paths of settings that differ between them. If some of these
    change the held-out text, runs are not ranked."""
    texts = [
        path for path in differing if path.startswith("data.") and not path.startswith(SAME_TEXT)
    ]
    if "data.order" in differing and _hold_out_differently(runs):
        texts.append("data.order")
    samples = {None if s is None else s.tokens for s in (run.record.sample for run in runs)}
    if len(samples) > 1:
        texts.append("train.eval_tokens")
    measure, key, why = "validation loss", "best_loss", ""
    if {"data.tokenizer", "model.vocab_size"} & set(differing):
        measure, key = "bits per byte", "bits_per_byte"
        why = ", which compare where tokens differ"
    if texts:
        why = (
            f"The runs are evaluated on different text ({', '.join(texts)}): losses do not compare."
        )
        return Ranking(tuple(runs), measure, key, False, (), frozenset(), why, "")
    ranked = sorted(runs, key=lambda run: (_loss(run, key, math.inf), run.label))
    known = [run for run in ranked if math.isfinite(_loss(run, key))]
    groups = sorted(_repeats(known, key), key=lambda group: group.mean)
    repeats = tuple(group for group in groups if len(group.runs) > 1)
    if len(known) < 2:
        return Ranking(tuple(ranked), measure, key, True, repeats, frozenset(), "", "")
    noise = _Noise(repeats)
    leaders, verdict = _verdict(groups, noise, f"{measure}{why}")
    return Ranking(
        tuple(ranked), measure, key, True, repeats, leaders, verdict, noise.sentence(measure)
    )


def _hold_out_differently(runs: Sequence[Run]) -> bool:
    """Return True if some runs hold out a text's beginning for validation, as a streamed text does,
    and others its end, so that their losses do not compare. Runs whose held-out text does not
    depend on that do not count: documents split by their hash, a validation text of its own, and
    tokens that were prepared before."""
    streamed = {run.settings.get("data.order") == "streamed" for run in runs if run.settings}
    read = {as_table(run.record.plan.get("data")).get("hash") for run in runs}
    return (
        len(streamed) > 1
        and (len(read) > 1 or None in read)
        and not all(
            run.settings.get("data.split_by") == "document"
            or run.settings.get("data.validation_path") is not None
            for run in runs
        )
    )


def _loss(run: Run, key: str, unknown: float = math.nan) -> float:
    value: float = getattr(run.results, key)
    return value if math.isfinite(value) else unknown


def _repeats(ranked: Sequence[Run], key: str) -> list[Repeats]:
    """Group the runs in `ranked`: finished runs that differ only in their seed form a group, every
    other run is a group by itself. `key` is the field of `Results` with the loss to average."""
    groups: dict[str, dict[str, Run]] = {}
    for index, run in enumerate(ranked):
        same, seed = _training(run) + run.results.began, str(run.settings.get("seed"))
        if run.outcome.kind != "good" or not run.settings or seed in groups.get(same, {}):
            same = f"alone {index}"
        groups.setdefault(same, {})[seed] = run
    found = []
    for seeds in groups.values():
        losses = [_loss(run, key) for run in seeds.values()]
        deviation = statistics.stdev(losses) if len(losses) > 1 else math.nan
        found.append(Repeats(tuple(seeds.values()), statistics.fmean(losses), deviation))
    return found


def _training(run: Run) -> str:
    """Return a string that is equal for runs that differ only in their seed, name, layout or
    output. A key that is missing in an earlier version's run counts as its default."""
    ends = ("train.steps", "train.epochs", "train.patience")
    return json.dumps(
        {
            path: value
            for path, value in ({key: default_of(key) for key in leaves()} | run.settings).items()
            if path != "seed"
            and not path.startswith("parallel.")
            and (path in ends or path not in not_the_training())
        },
        sort_keys=True, default=str,
    )  # fmt: skip


class _Noise:
    """Standard deviation of the loss between runs that differ only in their seed, pooled over all
    such groups; NaN if no seed was repeated."""

    def __init__(self, repeats: Sequence[Repeats]) -> None:
        self.n_groups = len(repeats)
        self.freedom = sum(len(group.runs) - 1 for group in repeats)
        squares = sum(group.deviation**2 * (len(group.runs) - 1) for group in repeats)
        self.deviation = math.sqrt(squares / self.freedom) if self.freedom else math.nan

    def bound(self, n: int, m: int, loss: float) -> float:
        """Return the largest difference between n runs' and m runs' mean losses that may be chance,
        at the 5% level; UNKNOWN_NOISE × `loss` if no seed was repeated."""
        if not self.freedom:
            return UNKNOWN_NOISE * abs(loss)
        t = STUDENT_T[min(self.freedom, len(STUDENT_T)) - 1]
        return t * self.deviation * math.sqrt(1 / n + 1 / m)

    def sentence(self, measure: str) -> str:
        """Return a sentence or two about the deviation between seeds; `measure` names the loss."""
        if not self.freedom:
            return (
                "Noise is unknown: no two finished runs differ in their seed alone. A lead below "
                f"{100 * UNKNOWN_NOISE:g} % is taken to be within it and names nobody; train the "
                "best ones again with another --seed to learn what a lead is worth."
            )
        s = "s" if self.n_groups > 1 else ""
        return (
            f"Noise: the seed alone moves the {measure} by {self.deviation:.4f} (standard "
            f"deviation, {self.n_groups} group{s} of repeated seeds). Between two single runs "
            f"anything up to {self.bound(1, 1, 0):.4f} may be chance."
        )


def _verdict(groups: Sequence[Repeats], noise: _Noise, measure: str) -> tuple[frozenset[str], str]:
    """Return the leading runs' labels (none if the lead may be chance), and a sentence with the
    reason. `groups` are sorted by mean loss."""
    if len(groups) == 1:
        only = groups[0]
        return frozenset(), f"The runs differ in their seed alone: {measure} {only.mean:.4f} ± " + (
            f"{only.deviation:.4f} (mean and standard deviation of {len(only.runs)})."
        )
    best, *others = groups
    near = [
        other
        for other in others
        if other.mean - best.mean <= noise.bound(len(best.runs), len(other.runs), best.mean)
        or not _resolved(best, other)
    ]
    mean = "mean " if len(best.runs) > 1 else ""
    origins = _origins(groups)
    if not near:
        each = " each" if len(others[0].runs) == 1 else ""
        said = (
            f"{best.label} has the lowest {mean}{measure}: {best.loss}, "
            f"{others[0].mean - best.mean:.4f} below {others[0].label}"
            f"{'' if mean else f', with one seed{each}'}.{origins}"
        )
        return frozenset(run.label for run in best.runs), said
    if best.mean == near[0].mean and len(near) == 1:
        return (
            frozenset(),
            f"{best.label} and {near[0].label} are equal in {measure}: {best.mean:.4f}.{origins}",
        )
    also = near[0].label if len(near) == 1 else f"{len(near)} others, {near[0].label} first,"
    lead = f"{near[0].mean - best.mean:.4f}"
    return frozenset(), (
        f"No best run can be named: {best.label} has {mean}{measure} {best.loss}, and {also} "
        f"cannot be told from it (a lead of {lead} is within the noise).{origins}"
    )


def _origins(groups: Sequence[Repeats]) -> str:
    """Return a sentence to append about the weights that the best runs began with; "" if all runs
    began with the same. `groups` are sorted by mean loss."""
    began = {group.label: group.runs[0].results.began for group in groups}
    if len(set(began.values())) == 1:
        return ""
    best, *others = began.items()
    other = next(each for each in others if each[1] != best[1])
    (one, first), (two, second) = best, other
    return (
        f" {one} began with {first or 'weights of unknown origin'}, {two} with "
        f"{second or 'weights of unknown origin'}: the difference is not that of their training "
        "alone."
    )


def _resolved(one: Repeats, other: Repeats) -> bool:
    """Return True if the mean losses of `one` and `other` differ by more than the rounding error in
    the coarsest precision of their runs."""
    runs = (*one.runs, *other.runs)
    words = {word for run in runs for word in run.results.precision.split()}
    # Below it the order of sums decides, as on another layout.
    roundoff = max(PRECISIONS[word].roundoff for word in words & PRECISIONS.keys() or {"fp32"})
    return bool(abs(one.mean - other.mean) > roundoff * max(abs(one.mean), abs(other.mean)))
