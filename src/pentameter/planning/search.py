"""The search for layouts: all that are legal on a cluster, best first, by branch and bound.

Of each candidate a bound of its time is computed that no schedule can beat: the arithmetic of its
slowest stage, and what its layers wait for in tensor-parallel processes. In the order of that bound
candidates are then timed in full, and held to the device's memory, until no bound is below the
times found. So the ranking is that of the whole time model, and most candidates are never timed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pentameter.config.choices import TAKES_SEVERAL_STAGES
from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.planning.adapters import run_operations
from pentameter.planning.cluster import Cluster
from pentameter.planning.compute_time import ComputeTime
from pentameter.planning.costs import ActivationBytes, StepSizes, end_weights, step_sizes
from pentameter.planning.estimate import Estimate, best_precision
from pentameter.planning.fused_step import fuses_dropout
from pentameter.planning.layout import Layout, make_layout, stage_layers
from pentameter.planning.layout_checks import (
    check_layout,
    check_micro_batches,
    check_passes,
)
from pentameter.planning.links import Links
from pentameter.planning.memory import optimizer_slots, step_memory
from pentameter.planning.plan import Plan, make_plan
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import stage_tables
from pentameter.planning.step_time import step_time
from pentameter.planning.traffic import Traffic

LARGEST_MICRO_BATCH = 64
"""Sequences; more fill no device better."""
LONG_CONTEXT = 8192
"""Tokens from which on dividing time is tried."""
MOST_TIMED = 60
"""Candidates that are timed in full, at most: those with the lowest bounds. It is no time, so that
a busy machine finds the same."""
VIRTUAL_STAGES = (2, 3, 4, 6)
CHECKPOINTS = (None, "selective", "full")

Change = tuple[str, object]
"""The dotted path of a setting, and its new value."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout with a micro-batch and what it recomputes, and the least time that it can take."""

    config: Config
    layout: Layout
    stages: tuple[range, ...]
    bound: float

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """The sizes of its mesh; of equal ones the best is kept."""
        layout = self.layout
        return layout.data, layout.tensor, layout.pipeline, layout.context


Allowed = Callable[[LayoutCandidate], bool]


@dataclass(frozen=True)
class Found:
    """What a search found: the best layout of each mesh, best first."""

    estimates: tuple[Estimate, ...]
    n_candidates: int
    n_timed: int
    n_too_large: int
    """Candidates timed that did not fit the device."""
    is_complete: bool
    """Whether every candidate was timed, or known to be slower."""
    seconds: float


def search(
    config: Config,
    cluster: Cluster,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    n_best: int = 5,
    most_timed: int = MOST_TIMED,
    sequence: bool = True,
    allowed: Allowed = lambda candidate: True,
) -> Found:
    """The fastest layouts of a configuration on a whole cluster that fit its devices.

    Its own `[parallel]`, micro-batch and activation checkpointing are left aside, its batch kept.
    `sequence` says whether tensor-parallel processes divide time, and `allowed` of a candidate
    whether it may be taken.
    """
    start = time.monotonic()
    plan = _base(config, vocab_size, rows_per_epoch)
    precision = best_precision(config, cluster)
    candidates = sorted(
        (each for each in _candidates(plan, cluster, precision, sequence) if allowed(each)),
        key=lambda each: each.bound,
    )
    best: dict[tuple[int, ...], tuple[float, LayoutCandidate]] = {}
    n_timed = n_too_large = 0
    is_complete = True
    for candidate in candidates:
        times = sorted(found for found, _ in best.values())
        limit = times[n_best - 1] if len(times) >= n_best else math.inf
        own = best[candidate.degrees][0] if candidate.degrees in best else math.inf
        if candidate.bound >= limit:
            break
        if candidate.bound >= own:
            continue
        if n_timed >= most_timed:
            is_complete = False
            break
        n_timed += 1
        parts = (candidate.config, candidate.layout, candidate.stages)
        took = step_time(*parts, cluster, precision).seconds
        if took >= min(own, limit):
            continue
        fused = fuses_dropout(plan.config.model, candidate.layout, precision, cluster.device)
        memory = step_memory(*parts, precision, fused_dropout=fused)
        if memory.total_bytes > cluster.usable_bytes:
            n_too_large += 1
            continue
        best[candidate.degrees] = took, candidate
    ranked = sorted(best.values(), key=lambda each: each[0])[:n_best]
    estimates = (_estimate(plan, each, cluster, vocab_size, rows_per_epoch) for _, each in ranked)
    return Found(
        estimates=tuple(estimates),
        n_candidates=len(candidates),
        n_timed=n_timed,
        n_too_large=n_too_large,
        is_complete=is_complete,
        seconds=time.monotonic() - start,
    )


def reasons(better: Estimate, worse: Estimate) -> list[str]:
    """In which parts of a step one estimate is faster than another, the largest first, in words."""
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
    """Changes of a Plan with which a process takes no more than `usable_bytes`, as they stand on a
    command line: single ones first, then recomputation with the smallest micro-batch. With
    `fused_dropout` kernels drop attention's weights."""
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
        memory = other.memory(precision, fused_dropout=fused_dropout)
        if memory.total_bytes <= usable_bytes:
            found.append(_as_options(changes))
    return found


def first_change(estimate: Estimate) -> tuple[str, Estimate] | None:
    """The single change that makes a step fastest and fits; None where none gains 1 %."""
    for words, changed in _changes(estimate):
        if changed.time.seconds > 0.99 * estimate.time.seconds:
            return None
        if changed.fits:
            return words, changed
    return None


def _changes(estimate: Estimate) -> list[tuple[str, Estimate]]:
    """Estimates with one setting changed, the fastest first."""
    found = []
    for change in _single_changes(estimate.plan):
        other = _changed(estimate.plan, [change])
        if other is not None:
            changed = Estimate(other, estimate.cluster, estimate.precision)
            found.append((_as_options([change]), changed))
    return sorted(found, key=lambda each: each[1].time.seconds)


def _single_changes(plan: Plan) -> list[Change]:
    """One setting each that may be changed: the micro-batch, what is recomputed and shared out."""
    rows, micro = plan.batch_size // plan.layout.n_row_parts, plan.micro_batch_size
    sizes = [size for size in (micro * 2, *range(micro - 1, 0, -1)) if rows % size == 0]
    ways: list[Change] = [("train.micro_batch_size", size) for size in sizes[:4]]
    ways += [("train.activation_checkpoint", how) for how in CHECKPOINTS]
    ways += [("parallel.zero", zero) for zero in (0, 1, 2, 3) if plan.layout.data > 1]
    ways += [("parallel.sequence", True)] if plan.layout.tensor > 1 else []
    if plan.layout.pipeline > 1:
        ways += [("parallel.schedule", name) for name in ("1f1b", "zero-bubble")]
    return [way for way in ways if attrgetter(way[0])(plan.config) != way[1]]


def _changed(plan: Plan, changes: Sequence[Change]) -> Plan | None:
    """The Plan with some settings changed; None where it cannot be."""
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


def _base(config: Config, vocab_size: int | None, rows_per_epoch: int | None) -> Plan:
    """The Plan on one process, whose resolved configuration every candidate starts from."""
    alone = config.model_copy(
        update={
            "parallel": ParallelConfig(
                partition=config.parallel.partition, timeout_seconds=config.parallel.timeout_seconds
            ),
            "train": config.train.model_copy(update={"micro_batch_size": None, "offload": False}),
        }
    )
    return make_plan(alone, vocab_size, rows_per_epoch, world_size=1)


def _estimate(
    base: Plan,
    candidate: LayoutCandidate,
    cluster: Cluster,
    vocab_size: int | None,
    rows_per_epoch: int | None,
) -> Estimate:
    config = candidate.config
    plan = make_plan(config, vocab_size, rows_per_epoch, world_size=candidate.layout.world_size)
    return Estimate(plan, cluster, best_precision(config, cluster))


def _candidates(
    plan: Plan, cluster: Cluster, precision: str, sequence: bool = True
) -> Iterator[LayoutCandidate]:
    """Every legal candidate whose weights, gradients and optimizer may fit."""
    config = plan.config
    known: dict[object, ComputeTime] = {}
    ends = end_weights(config)
    for parallel in _parallels(plan, cluster, sequence):
        try:
            layout = make_layout(parallel, cluster.n_devices).for_model(config.model)
            check_layout(layout, config.model, cluster.node_size)
        except ConfigError:
            continue
        left = cluster.usable_bytes - _state_bytes(plan, layout)
        if plan.batch_size % layout.n_row_parts or left < 0:
            continue
        rows = plan.batch_size // layout.n_row_parts
        for micro, how in itertools.product(_micro_batches(rows), CHECKPOINTS):
            train = config.train.model_copy(
                update={"micro_batch_size": micro, "activation_checkpoint": how}
            )
            changed = config.model_copy(update={"parallel": parallel, "train": train})
            try:
                check_passes(layout, train)
                check_micro_batches(layout, rows // micro, micro)
            except ConfigError:
                continue
            fused = fuses_dropout(config.model, layout, precision, cluster.device)
            sizes = step_sizes(changed, layout, precision, fused_dropout=fused)
            if _activation_bytes(changed, layout, ActivationBytes(changed, layout, sizes)) > left:
                continue
            stages = stage_layers(config.model.n_layers, layout.n_stages, *ends)
            bound = _bound(changed, layout, stages, cluster, precision, known)
            yield LayoutCandidate(changed, layout, stages, bound)


def _parallels(plan: Plan, cluster: Cluster, sequence: bool) -> Iterator[ParallelConfig]:
    """Sections `[parallel]` that make up the whole cluster."""
    model, old, n = plan.config.model, plan.config.parallel, cluster.n_devices
    contexts = [1]
    if model.context_length >= LONG_CONTEXT:
        contexts += [size for size in (2, 4, 8, 16) if model.context_length % (2 * size) == 0]
    tensors = [t for t in _divisors(cluster.node_size) if model.n_heads % t == 0]
    for t, c in itertools.product(tensors, contexts):
        for p in _divisors(n // (t * c) if n % (t * c) == 0 else 0):
            if p > model.n_layers:
                continue
            data = n // (t * c * p)
            zeros = (0,) if data * c == 1 else (0, 1) if p > 1 else (0, 1, 2, 3)
            modes = ("ring", "all-to-all") if c > 1 else ("ring",)
            ways = itertools.product(zeros, _schedules(p, model.n_layers), modes)
            for zero, (schedule, v), mode in ways:
                yield old.model_copy(
                    update={
                        "data": data,
                        "tensor": t,
                        "sequence": sequence and t > 1 and model.context_length % (t * c) == 0,
                        "pipeline": p,
                        "context": c,
                        "context_mode": mode,
                        "zero": zero,
                        "schedule": schedule,
                        "virtual_stages": v,
                    }
                )


def _schedules(pipeline: int, n_layers: int) -> Iterator[tuple[str, int]]:
    if pipeline == 1:
        yield "1f1b", 1
        return
    for name, takes_several in TAKES_SEVERAL_STAGES.items():
        if name == "gpipe":  # 1F1B keeps fewer activations in the same time
            continue
        if name == "zero-bubble-v":
            counts: Sequence[int] = (2,)
        elif name == "zero-bubble":
            counts = (1,)
        else:
            counts = VIRTUAL_STAGES if takes_several else (1,)
        for v in counts:
            if n_layers % (pipeline * v) == 0 or (v == 1 and pipeline <= n_layers):
                yield name, v


def _micro_batches(rows: int) -> list[int]:
    """Sizes of a micro-batch, of those that divide the rows: powers of two, and all of them."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, LARGEST_MICRO_BATCH) if rows % size == 0]
    return sizes if rows > LARGEST_MICRO_BATCH or rows in sizes else [*sizes, rows]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _state_bytes(plan: Plan, layout: Layout) -> float:
    """Bytes that weights, gradients and the optimizer's state take at least: an even share."""
    config, e = plan.config, step_sizes(plan.config, Layout()).element_bytes
    table = plan.table
    parts = layout.tensor * layout.pipeline
    n = sum(spec.n_elements for spec in table) / parts
    in_all = sum(spec.n_elements * optimizer_slots(config.optimizer, spec) for spec in table)
    slots = in_all / parts
    shard = layout.shard if layout.zero else 1
    shares_gradients = layout.zero >= 2 and layout.pipeline == 1
    return e * (n / shard + n / (shard if shares_gradients else 1) + slots / shard)


def _activation_bytes(config: Config, layout: Layout, cost: ActivationBytes) -> float:
    """Bytes of activations that the first process of the pipeline keeps at least: those of its
    blocks, for as many micro-batches as are under way."""
    block = run_operations(config.model, config.lora, range(1))
    each = cost.stage([op for op in block if op.layer is not None])
    under_way: float = min(layout.pipeline, cost.sizes.n_micro_batches)
    if layout.turns_back:
        under_way /= 2
    return each * config.model.n_layers // layout.pipeline * under_way


def _sums_of_layer(config: Config, layout: Layout, cluster: Cluster, sizes: StepSizes) -> float:
    """The least that a layer's passes wait for tensor-parallel sums of its two sub-layers, of which
    each is as long as an all-reduce, or, where time is divided, as two half as long."""
    n_tokens = sizes.micro_batch_size * config.model.context_length // layout.context
    n_bytes = n_tokens * config.model.d_model * sizes.product_bytes
    one = Links(layout, cluster).seconds("tensor", "all_reduce", Traffic(1, n_bytes))
    if config.lora.rank is not None:  # the first layer's inputs need no gradient
        return 2 * one
    if not LayoutRules(layout).reads_at_once(config.lora):
        return 4 * one
    gathers = 1 if layout.sequence else 0  # of the results' gradients
    return (2 + gathers + 2 * cluster.device.calibration.interference_share) * one


def _gradients_and_weights(
    config: Config, layout: Layout, stages: Sequence[range], cluster: Cluster, sizes: StepSizes
) -> float:
    """The least time that sums of gradients and gathers of weights take in a step: one message, or
    one for each of ZeRO's units; of what tensor-parallel processes hold whole each has its part."""
    rules, M, links = LayoutRules(layout), sizes.n_micro_batches, Links(layout, cluster)
    tables = stage_tables(config, layout, stages, 0)
    n = sum(spec.n_elements for _, table in tables for spec in table if spec.is_trained)
    n //= layout.tensor
    whole = n * sizes.element_bytes
    match rules.data_sum:
        case "none":
            return 0.0
        case "ddp" | "after_backward":
            return links.seconds("data", "all_reduce", Traffic(1, whole))
        case "fsdp":
            n_gathers = 1 if rules.weights_stay_gathered else 2 * M
            n_sums = M if rules.reduces_each_micro_batch else 1
            n_units = 1 + 2 * sum(len(stages[number]) for number in layout.stages_of(0))
            gathered = Traffic(n_units, n * sizes.product_bytes)
            gathers = links.seconds("shard", "all_gather", gathered)
            sums = links.seconds("shard", "reduce_scatter", Traffic(n_units, whole))
            return n_gathers * gathers + n_sums * sums


def _bound(
    config: Config,
    layout: Layout,
    stages: Sequence[range],
    cluster: Cluster,
    precision: str,
    known: dict[object, ComputeTime],
) -> float:
    """A time that no step of this layout falls below."""
    sizes = step_sizes(config, layout, precision)
    compute = ComputeTime(config, layout, sizes, cluster, precision)
    compute = known.setdefault(compute.key, compute)
    seconds = [compute.stage(layers) for layers in stages]
    sums = _sums_of_layer(config, layout, cluster, sizes)
    slowest = filling = draining = 0.0
    M = sizes.n_micro_batches
    for place in range(layout.pipeline):
        numbers = layout.stages_of(place)
        n_layers = sum(len(stages[number]) for number in numbers)
        busy = M * (sum(sum(seconds[number]) for number in numbers) + n_layers * sums)
        # While others drain the pipeline, it may compute the gradients of its weights.
        late = (
            M * sum(seconds[number].backward_weight for number in numbers)
            if layout.splits_backward
            else 0.0
        )
        slowest = max(slowest, filling + busy, filling + busy - late + draining)
        filling += seconds[numbers[0]].forward
        draining += seconds[numbers[0]].backward_input
    sent = _gradients_and_weights(config, layout, stages, cluster, sizes)
    if layout.pipeline > 1:  # all of it before the first pass and after the last one
        return slowest + sent
    hidden = cluster.device.calibration.interference_share * min(slowest, sent)
    return max(slowest, sent) + hidden
