"""The layout search: the fastest legal layouts on a cluster, by branch and bound.

Candidates are visited in the order of a lower bound on their time (`candidates.py`). Those that
exceed the device's memory are skipped, those that are tight are set aside, and the others are timed
in full, until no bound is below the times found. The ranking is therefore that of the whole time
model, although most candidates are never timed. What is tight is timed, and ranked below, only
where fewer fit than are asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pentameter.config.schema import Config, ParallelConfig
from pentameter.estimating.bytes.changes import as_options, changed, single_changes
from pentameter.estimating.bytes.fit import memory_verdict
from pentameter.estimating.search.candidates import Candidates, LayoutCandidate
from pentameter.estimating.seconds.cluster import Cluster
from pentameter.estimating.seconds.estimate import Estimate, best_precision
from pentameter.estimating.seconds.step_time import step_time
from pentameter.planning.plan import Plan, make_plan

MOST_TIMED = 200
"""Maximum number of fitting candidates that are timed in full: those with the lowest bounds. A
count rather than a time limit, so that a busy machine finds the same layouts."""


Allowed = Callable[[LayoutCandidate], bool]


@dataclass(frozen=True)
class Found:
    """The search result: `estimates` holds the fastest layout for each mesh, fastest first, at most
    `n_best`. If fewer than that fit, tight ones follow."""

    estimates: tuple[Estimate, ...]
    nearest: Estimate | None
    """If nothing fits, the visited candidate that exceeds the memory least, or None if none was
    visited. None if something fits."""
    n_legal: int
    """Layouts that split the model, the batch and the devices evenly, whether or not they may
    fit."""
    n_candidates: int
    """Legal layouts that may fit, combined with each micro-batch size and checkpointing mode."""
    n_timed: int
    n_too_large: int
    """Candidates that were visited before the search ended and do not fit the device."""
    n_tight: int
    """Candidates that were visited before the search ended and are tight."""
    is_complete: bool
    """Whether every candidate was timed, or is known to be slower."""
    seconds: float


def search(
    config: Config,
    cluster: Cluster,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    n_best: int = 5,
    most_timed: int = MOST_TIMED,
    imbalance: float = 1.0,
    matmuls: str | None = None,
    allowed: Allowed = lambda candidate: True,
) -> Found:
    """Find the fastest layouts for a configuration that use the whole cluster and fit its devices,
    by estimated times; where too few fit, tight ones follow. The configuration's batch is kept; its
    `[parallel]`, micro-batch size and activation checkpointing are ignored.

    vocab_size: needed if the configuration sets none.
    rows_per_epoch: batch rows in the training split; needed if the configuration counts in epochs.
    n_best: most layouts that are returned.
    most_timed: most candidates that are timed in full.
    imbalance: the most rows that a rank's experts get ÷ the mean over ranks.
    matmuls: a number format in LINEAR_ONLY for linear layers' matmuls, or None.
    allowed: returns False for candidates to leave out.
    """
    every = all_candidates(
        config, cluster, vocab_size, rows_per_epoch, imbalance=imbalance, matmuls=matmuls
    )
    return fastest(every, n_best=n_best, most_timed=most_timed, allowed=allowed)


def fastest(every: Candidates, *, n_best: int, most_timed: int, allowed: Allowed) -> Found:
    """Find the fastest of the candidates in `every` for which `allowed` is True. The arguments and
    the result are as in `search`."""
    start, cluster = time.monotonic(), every.cluster
    candidates = list(filter(allowed, every.by_bound))
    fitting = _Fastest(cluster, n_best, most_timed)
    tight: list[LayoutCandidate] = []
    least, nearest = math.inf, None
    n_too_large = 0
    for candidate in candidates:
        if fitting.is_done(candidate):
            break
        if not fitting.may_be_faster(candidate):
            continue
        needed = every.device_bytes(candidate)
        verdict = memory_verdict(needed, cluster.usable_bytes)
        if verdict == "fits":
            fitting.time(candidate)
        elif verdict == "tight":
            tight.append(candidate)
        else:
            n_too_large += 1
            if needed < least:
                least, nearest = needed, candidate
    ranked = fitting.ranked
    # What is tight ranks below all that fits, and is timed only where too little fits.
    below = _Fastest(cluster, n_best - len(ranked), most_timed)
    meshes = {candidate.degrees for candidate in ranked}
    for candidate in tight:
        if below.is_done(candidate):
            break
        if candidate.degrees not in meshes and below.may_be_faster(candidate):
            below.time(candidate)
    estimates = [_estimate(every, candidate) for candidate in (*ranked, *below.ranked)]
    return Found(
        estimates=tuple(estimates),
        nearest=None if estimates or nearest is None else _estimate(every, nearest),
        n_legal=every.n_legal,
        n_candidates=len(candidates),
        n_timed=fitting.n_timed + below.n_timed,
        n_too_large=n_too_large,
        n_tight=len(tight),
        is_complete=fitting.is_complete and below.is_complete,
        seconds=time.monotonic() - start,
    )


class _Fastest:
    """Keeps the fastest candidate for each mesh among those whose time was estimated in full;
    `n_best` of them are wanted. Candidates are offered in the order of their lower bounds."""

    def __init__(self, cluster: Cluster, n_best: int, most_timed: int) -> None:
        """Begin without candidates, for layouts on `cluster`. `n_best` is the number of meshes to
        keep, `most_timed` how many candidates are timed in full at most."""
        self.cluster = cluster
        self.n_best = n_best
        self.most_timed = most_timed
        self.n_timed = 0
        self.is_complete = True
        """Whether every candidate was timed, or is known to be slower."""
        self._best: dict[tuple[int, ...], tuple[float, LayoutCandidate]] = {}
        self._limit = math.inf
        """Seconds per step that the next candidate must stay below to be among the best."""

    def is_done(self, candidate: LayoutCandidate) -> bool:
        """True if the search can end before `candidate`: neither it nor any later one, whose bounds
        are higher, needs to be timed."""
        if self.n_best < 1 or candidate.bound >= self._limit:
            return True
        return not self.is_complete

    def may_be_faster(self, candidate: LayoutCandidate) -> bool:
        """True if the candidate's lower bound is below the best time of its mesh so far, so that it
        must be timed."""
        known = self._best.get(candidate.degrees)
        return known is None or candidate.bound < known[0]

    def time(self, candidate: LayoutCandidate) -> None:
        """Time the candidate, and keep it if it is the fastest of its mesh."""
        if self.n_timed >= self.most_timed:
            self.is_complete = False
            return
        self.n_timed += 1
        took = step_time(candidate.step, self.cluster).seconds
        known = self._best.get(candidate.degrees)
        if took < min(self._limit, math.inf if known is None else known[0]):
            self._best[candidate.degrees] = took, candidate
            if len(self._best) >= self.n_best:
                self._limit = sorted(found for found, _ in self._best.values())[self.n_best - 1]

    @property
    def ranked(self) -> list[LayoutCandidate]:
        """The best candidates, the fastest first."""
        times = sorted(self._best.values(), key=lambda each: each[0])
        return [candidate for _, candidate in times[: self.n_best]]


def _estimate(among: Candidates, candidate: LayoutCandidate) -> Estimate:
    """Return the Estimate for one of the candidates."""
    n, rows_per_epoch = candidate.step.layout.world_size, among.plan.rows_per_epoch
    chosen = make_plan(candidate.step.config, rows_per_epoch=rows_per_epoch, world_size=n)
    return Estimate(chosen, among.cluster, among.precision, among.imbalance)


def why_nothing_fits(config: Config, cluster: Cluster, found: Found) -> str:
    """Return a sentence that says why `found`, the result of a search without estimates, is empty,
    and which change would help."""
    nothing = f"no layout of {config.name} fits {cluster}"
    if not found.n_legal:
        return (
            f"no layout of {config.name} divides a step over all {cluster.n_devices:,} devices of "
            f"{cluster}: name fewer devices, or raise train.batch_size"
        )
    remedy = "name a larger cluster, shorten model.context_length, or take train.offload=true"
    if found.nearest is None:
        return (
            f"{nothing}: weights, gradients, optimizer and activations take more than the "
            f"{cluster.usable_bytes / 1e9:,.1f} GB of a device in each of {found.n_legal:,} "
            f"layouts; {remedy}"
        )
    near = found.nearest
    how = near.plan.config.train.activation_checkpoint
    return (
        f"{nothing}: of {found.n_candidates:,} candidates the smallest, {near.plan.layout} with a "
        f"micro-batch of {near.plan.micro_batch_size}{f' recomputing {how}' if how else ''}, needs "
        f"{-near.spare_bytes / 1e9:,.1f} GB more than the {cluster.usable_bytes / 1e9:,.1f} GB of "
        f"a device; {remedy}"
    )


def reasons(better: Estimate, worse: Estimate) -> list[str]:
    """Return the components that make `better`'s step faster than `worse`'s, as "SECONDS s less
    COMPONENT", the largest gain first. Gains below 0.2 % are left out."""
    parts: list[tuple[str, float, float]] = []
    for name, key in (("compute", "compute"), ("bubble", "bubble"), ("optimizer", "optimizer")):
        parts.append((name, getattr(better.time, key), getattr(worse.time, key)))
    for name in dict.fromkeys((*better.time.exposed, *worse.time.exposed)):
        ours, theirs = (each.time.exposed.get(name, 0.0) for each in (better, worse))
        parts.append((f"waiting for {name}", ours, theirs))
    gains = sorted(((theirs - ours, name) for name, ours, theirs in parts), reverse=True)
    least = 0.002 * worse.time.seconds
    return [f"{gain:.3g} s less {name}" for gain, name in gains if gain > least]


def first_change(estimate: Estimate) -> tuple[str, Estimate] | None:
    """Return the single change that makes a step fastest and fits, as command-line options, with
    its Estimate; None if no fitting change gains 1 %."""
    changes = [[change] for change in single_changes(estimate.plan)]
    plans = [(as_options(change), changed(estimate.plan, change)) for change in changes]
    found = [(words, replace(estimate, plan=plan)) for words, plan in plans if plan is not None]
    for words, other in sorted(found, key=lambda each: each[1].time.seconds):
        if other.time.seconds > 0.99 * estimate.time.seconds:
            return None
        if other.fits:
            return words, other
    return None


def all_candidates(
    config: Config,
    cluster: Cluster,
    vocab_size: int | None,
    rows_per_epoch: int | None,
    *,
    imbalance: float = 1.0,
    matmuls: str | None = None,
) -> Candidates:
    """Return the candidates for a configuration on a cluster, to pass to several calls of
    `fastest`. The arguments are as in `search`."""
    precision = best_precision(config, cluster, matmuls)
    plan = _base(config, vocab_size, rows_per_epoch)
    return Candidates(plan, cluster, precision, imbalance=imbalance)


def _base(config: Config, vocab_size: int | None, rows_per_epoch: int | None) -> Plan:
    """Return the Plan of the configuration on a single rank, with the default `[parallel]` and
    micro-batch size; every candidate is a change of it."""
    kept = {"partition", "timeout_seconds"}
    parallel = ParallelConfig(**config.parallel.model_dump(include=kept))
    alone = config.updated({"parallel": parallel, "train.micro_batch_size": None})
    return make_plan(alone, vocab_size, rows_per_epoch, world_size=1)
