"""The layout search: the fastest legal layouts on a cluster, by branch and bound.

Candidates are visited in the order of a lower bound on their time (`candidates.py`). Those that
exceed the device's memory are skipped, and the others are timed in full, until no bound is below
the times found. The ranking is therefore that of the whole time model, although most candidates are
never timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError, divisors
from pentameter.estimating.candidates import CHECKPOINTS, Candidates, LayoutCandidate
from pentameter.estimating.cluster import Cluster
from pentameter.estimating.estimate import Estimate, best_precision
from pentameter.estimating.plan_estimates import plan_memory
from pentameter.estimating.step_time import step_time
from pentameter.planning.plan import Plan, make_plan

MOST_TIMED = 200
"""Maximum number of fitting candidates that are timed in full: those with the lowest bounds. A
count rather than a time limit, so that a busy machine finds the same layouts."""

Change = tuple[str, object]
"""A setting's dotted path ("train.micro_batch_size"), and its new value."""


Allowed = Callable[[LayoutCandidate], bool]


@dataclass(frozen=True)
class Found:
    """The search result: `estimates` holds the fastest layout for each mesh, fastest first, at most
    `n_best`."""

    estimates: tuple[Estimate, ...]
    nearest: Estimate | None
    """If nothing fits, the visited candidate that exceeds the memory least; None if something fits
    or none was visited."""
    n_legal: int
    """Layouts that split the model, the batch and the devices evenly, whether or not they may
    fit."""
    n_candidates: int
    """Legal layouts that may fit, combined with each micro-batch size and checkpointing mode."""
    n_timed: int
    n_too_large: int
    """Candidates that were visited before the search ended and do not fit the device."""
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
    sequence: bool | None = None,
    imbalance: float = 1.0,
    matmuls: str | None = None,
    allowed: Allowed = lambda candidate: True,
    among: Candidates | None = None,
) -> Found:
    """Find the fastest layouts for a configuration that use the whole cluster and fit its devices,
    by estimated times.

    The configuration's `[parallel]`, micro-batch size and activation checkpointing are ignored; its
    batch is kept. `vocab_size` is needed if the configuration sets none, `rows_per_epoch` (batch
    rows in the training split) if it counts in epochs. At most `n_best` layouts are returned, after
    at most `most_timed` full timings. `sequence` sets whether tensor-parallel ranks also split the
    sequence; None tries both. `imbalance` is the most rows that a rank's experts get ÷ the mean
    over ranks. `matmuls` is a number format in PLANNED_ONLY for linear layers' matmuls, or None.
    Candidates for which `allowed` is false are left out. `among` reuses the candidates
    from another search for the same configuration, cluster, imbalance and matmuls; None lists them
    anew.
    """
    start = time.monotonic()
    sizes = vocab_size, rows_per_epoch
    every = among or all_candidates(
        config, cluster, *sizes, sequence=sequence, imbalance=imbalance, matmuls=matmuls
    )
    candidates = list(filter(allowed, every.by_bound))
    best: dict[tuple[int, ...], tuple[float, LayoutCandidate]] = {}
    least, nearest = math.inf, None
    n_timed = n_too_large = 0
    is_complete = True
    for candidate in candidates:
        times = sorted(found for found, _ in best.values())
        limit = times[n_best - 1] if len(times) >= n_best else math.inf
        best_of_mesh = best[candidate.degrees][0] if candidate.degrees in best else math.inf
        if candidate.bound >= limit:
            break
        if candidate.bound >= best_of_mesh:
            continue
        needed = every.device_bytes(candidate)
        if needed > cluster.usable_bytes:
            n_too_large += 1
            if needed < least:
                least, nearest = needed, candidate
            continue
        if n_timed >= most_timed:
            is_complete = False
            break
        n_timed += 1
        took = step_time(candidate.step, cluster).seconds
        if took < min(best_of_mesh, limit):
            best[candidate.degrees] = took, candidate
    ranked = sorted(best.values(), key=lambda each: each[0])[:n_best]
    estimate = partial(_estimate, every, *sizes)
    return Found(
        estimates=tuple(estimate(candidate) for _, candidate in ranked),
        nearest=None if best or nearest is None else estimate(nearest),
        n_legal=every.n_legal,
        n_candidates=len(candidates),
        n_timed=n_timed,
        n_too_large=n_too_large,
        is_complete=is_complete,
        seconds=time.monotonic() - start,
    )


def _estimate(
    among: Candidates,
    vocab_size: int | None,
    rows_per_epoch: int | None,
    candidate: LayoutCandidate,
) -> Estimate:
    """Return the Estimate for one of the candidates; sizes as passed to `search`."""
    n = candidate.step.layout.world_size
    chosen = make_plan(candidate.step.config, vocab_size, rows_per_epoch, world_size=n)
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
    """Return the components that make one estimate's step faster than another's, as "SECONDS s less
    COMPONENT", the largest gain first; gains below 0.2 % are left out."""
    parts: list[tuple[str, float, float]] = []
    for name, key in (("compute", "compute"), ("bubble", "bubble"), ("optimizer", "optimizer")):
        parts.append((name, getattr(better.time, key), getattr(worse.time, key)))
    for name in dict.fromkeys((*better.time.exposed, *worse.time.exposed)):
        ours, theirs = (each.time.exposed.get(name, 0.0) for each in (better, worse))
        parts.append((f"waiting for {name}", ours, theirs))
    gains = sorted(((theirs - ours, name) for name, ours, theirs in parts), reverse=True)
    least = 0.002 * worse.time.seconds
    return [f"{gain:.3g} s less {name}" for gain, name in gains if gain > least]


def settings_that_fit(
    plan: Plan, usable_bytes: float, precision: str | None, *, fused_dropout: bool = False
) -> list[str]:
    """Return changes to a Plan with which a rank needs at most `usable_bytes`, each as command-line
    options ("--train.micro-batch-size 1"): single changes first, then full recomputation with
    micro-batches of one sequence, then these with ZeRO 3. `precision` is the matmul precision
    (None: `train.precision`, with fp32 for `auto`); with `fused_dropout`, attention dropout does
    not write out the weights."""
    ways = [[change] for change in _single_changes(plan)]
    smallest: list[Change] = [
        ("train.micro_batch_size", 1),
        ("train.activation_checkpoint", "full"),
    ]
    ways += [smallest, [*smallest, ("parallel.zero", 3)]]
    found = []
    for changes in ways:
        other = _changed(plan, changes)
        if other is None:
            continue
        memory = plan_memory(other, precision, fused_dropout=fused_dropout)
        if memory.total_bytes <= usable_bytes:
            found.append(_as_options(changes))
    return found


def first_change(estimate: Estimate) -> tuple[str, Estimate] | None:
    """Return the single change that makes a step fastest and fits, as command-line options, with
    its Estimate; None if no fitting change gains 1 %."""
    for words, changed in _changes(estimate):
        if changed.time.seconds > 0.99 * estimate.time.seconds:
            return None
        if changed.fits:
            return words, changed
    return None


def _changes(estimate: Estimate) -> list[tuple[str, Estimate]]:
    """Return, for each possible change of one setting, its command-line options and the changed
    Estimate, the fastest first."""
    found = []
    for change in _single_changes(estimate.plan):
        other = _changed(estimate.plan, [change])
        if other is not None:
            changed = replace(estimate, plan=other)
            found.append((_as_options([change]), changed))
    return sorted(found, key=lambda each: each[1].time.seconds)


def _single_changes(plan: Plan) -> list[Change]:
    """Return changes of one setting to another value: the micro-batch size doubled or reduced to
    one of the next smaller sizes that divide a rank's sequences, activation checkpointing, ZeRO
    stage, sequence parallelism, pipeline schedule."""
    rows, micro = plan.batch_size // plan.layout.n_batch_shards, plan.micro_batch_size
    smaller = [size for size in reversed(divisors(rows)) if size < micro]
    sizes = [*([micro * 2] if rows % (micro * 2) == 0 else []), *smaller]
    ways: list[Change] = [("train.micro_batch_size", size) for size in sizes[:4]]
    ways += [("train.activation_checkpoint", how) for how in CHECKPOINTS]
    ways += [("parallel.zero", zero) for zero in (0, 1, 2, 3) if plan.layout.data > 1]
    ways += [("parallel.sequence", True)] if plan.layout.tensor > 1 else []
    if plan.layout.pipeline > 1:
        ways += [("parallel.schedule", name) for name in ("1f1b", "zero-bubble")]
    return [way for way in ways if attrgetter(way[0])(plan.config) != way[1]]


def _changed(plan: Plan, changes: Sequence[Change]) -> Plan | None:
    """Return the Plan with these settings changed; None if that configuration is invalid."""
    tree = plan.portable_config.model_dump()
    for key, value in changes:
        section, _, name = key.partition(".")
        tree[section][name] = value
    try:
        config = Config.model_validate(tree)
        return make_plan(
            config, rows_per_epoch=plan.rows_per_epoch, world_size=plan.layout.world_size
        )
    except (ConfigError, ValueError):
        return None


def _as_options(changes: Sequence[Change]) -> str:
    return " ".join(
        f"--{key.replace('_', '-')} {'none' if value is None else str(value).lower()}"
        for key, value in changes
    )


def all_candidates(
    config: Config,
    cluster: Cluster,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    sequence: bool | None = None,
    imbalance: float = 1.0,
    matmuls: str | None = None,
) -> Candidates:
    """Return the candidates for a configuration on a cluster, to pass to several calls of `search`
    as `among`. `vocab_size` is needed if the configuration sets none, `rows_per_epoch` (batch rows
    in the training split) if it counts in epochs. `sequence` sets whether tensor-parallel ranks
    also split the sequence; None tries both. `imbalance` is the most rows that a rank's experts get
    ÷ the mean over ranks. `matmuls` is a number format in PLANNED_ONLY, or None."""
    precision = best_precision(config, cluster, matmuls)
    plan = _base(config, vocab_size, rows_per_epoch)
    return Candidates(plan, cluster, precision, sequence=sequence, imbalance=imbalance)


def _base(config: Config, vocab_size: int | None, rows_per_epoch: int | None) -> Plan:
    """Return the Plan on a single rank, with default `[parallel]` and micro-batch size, that every
    candidate is made from."""
    alone = config.model_copy(
        update={
            "parallel": ParallelConfig(
                partition=config.parallel.partition, timeout_seconds=config.parallel.timeout_seconds
            ),
            "train": config.train.model_copy(update={"micro_batch_size": None}),
        }
    )
    return make_plan(alone, vocab_size, rows_per_epoch, world_size=1)
