"""The candidates in a layout search: the legal ones, and lower bounds on their time and memory.

A candidate is a mesh layout with a micro-batch size and an activation-checkpointing mode. Its bound
is a time that no schedule can beat: the arithmetic in its slowest stage, and the time that its
layers wait for tensor-parallel communication. Its bytes are bounded from below too, by an even
split of weights and optimizer state plus its blocks' activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentameter.config.choices import TAKES_SEVERAL_STAGES
from pentameter.config.schema import ModelConfig, ParallelConfig
from pentameter.errors import ConfigError, divisors
from pentameter.estimating.bytes.changes import CHECKPOINTS
from pentameter.estimating.bytes.communication import Communication
from pentameter.estimating.bytes.costs import ActivationBytes, Step
from pentameter.estimating.bytes.memory import optimizer_slots, step_memory
from pentameter.estimating.bytes.stages import stage_tables
from pentameter.estimating.seconds.cluster import Cluster, trained_precision
from pentameter.estimating.seconds.compute_time import ComputeTime, fuses_dropout
from pentameter.estimating.seconds.links import Links
from pentameter.planning.adapters import run_operations
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.flops import end_weights
from pentameter.planning.layouts.layout import Layout, make_layout, stage_layers
from pentameter.planning.layouts.layout_checks import (
    check_layout,
    check_micro_batches,
    check_passes,
    divides_heads,
)
from pentameter.planning.plan import Plan
from pentameter.planning.rules import LayoutRules

LARGEST_MICRO_BATCH = 64
"""Maximum sequences per micro-batch that are tried; larger ones use no device better."""
LONG_CONTEXT = 8192
"""Context length in tokens from which on context parallelism is tried."""
MOST_VIRTUAL_STAGES = 8
"""Maximum pipeline stages per rank that are tried; more would cost proportionally more messages for
ever smaller savings in idle time."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout with a micro-batch size and an activation-checkpointing mode, all in `step`. `bound`
    is a lower bound on its seconds per step."""

    step: Step
    bound: float

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """The (data, tensor, pipeline, context) sizes; among candidates with equal sizes a search
        keeps the fastest."""
        layout = self.step.layout
        return layout.data, layout.tensor, layout.pipeline, layout.context


class Candidates:
    """Lists every legal LayoutCandidate of a configuration that uses all devices in a cluster and
    may fit their memory."""

    def __init__(
        self, plan: Plan, cluster: Cluster, precision: str, *, imbalance: float = 1.0
    ) -> None:
        """plan: the configuration's Plan (batch, steps, parameters) on a single rank.
        precision: the matmul precision, a `train.precision` other than `auto`.
        imbalance: the most rows that a rank's experts get ÷ the mean over ranks.
        """
        self.plan = plan
        self.cluster = cluster
        self.precision = precision
        self.imbalance = imbalance
        self.n_legal = 0
        """Number of layouts that split model, batch and devices evenly, whether or not they may
        fit."""
        self._known: dict[object, ComputeTime] = {}
        self._trained: dict[object, _Elements] = {}
        self._memories: dict[object, Any] = {}
        self._bytes: dict[int, int] = {}

    @cached_property
    def by_bound(self) -> list[LayoutCandidate]:
        """All candidates, the lowest time bound first."""
        return sorted(self, key=lambda each: each.bound)

    def __iter__(self) -> Iterator[LayoutCandidate]:
        plan, config, cluster = self.plan, self.plan.config, self.cluster
        run = run_operations(config.model, config.lora)
        ends = end_weights(run, config.parallel.partition)
        trains = {}
        for parallel in self._parallels():
            try:
                layout = make_layout(parallel, cluster.n_devices)
                check_layout(layout, config, cluster.node_size)
            except ConfigError:
                continue
            rows, rest = divmod(plan.batch_size, layout.n_batch_shards)
            if rest:
                continue
            self.n_legal += 1
            kept, gradients = self._least_state_bytes(layout)
            if kept + gradients > cluster.usable_bytes:
                continue
            stages = stage_layers(config.model.n_layers, layout.n_stages, *ends)
            bound = _Bound(layout, stages, cluster, self._known, self._n_trained(layout, stages))
            for micro, how in itertools.product(_micro_batches(rows), CHECKPOINTS):
                if (micro, how) not in trains:
                    update = {"micro_batch_size": micro, "activation_checkpoint": how}
                    trains[micro, how] = config.train.model_copy(update=update)
                train = trains[micro, how]
                try:
                    check_passes(layout, train)
                    check_micro_batches(layout, rows // micro, micro)
                except ConfigError:
                    continue
                if layout.schedule == "gpipe" and rows // micro >= layout.pipeline:
                    continue  # 1F1B saves fewer activations in the same time
                changed = config.model_copy(update={"parallel": parallel, "train": train})
                fused = self._fuses_dropout(layout)
                step = Step(changed, layout, stages, self.precision, fused, self.imbalance)
                if kept + _least_activation_bytes(step) <= cluster.usable_bytes:
                    yield LayoutCandidate(step, bound.seconds(step))

    def device_bytes(self, candidate: LayoutCandidate) -> int:
        """Return the estimated bytes that the fullest rank holds on its device. `candidate` must be
        from `by_bound`; results are cached by its identity."""
        known = id(candidate)  # from `by_bound`, which keeps it alive
        if known not in self._bytes:
            self._bytes[known] = step_memory(candidate.step, known=self._memories).device_bytes
        return self._bytes[known]

    def _fuses_dropout(self, layout: Layout) -> bool:
        model, device = self.plan.config.model, self.cluster.device
        return fuses_dropout(model, layout, trained_precision(self.precision), device)

    def _parallels(self) -> Iterator[ParallelConfig]:
        """Yield `[parallel]` sections whose mesh sizes multiply to the cluster's device count."""
        config, n = self.plan.config, self.cluster.n_devices
        model, old = config.model, config.parallel
        contexts = [1]
        if model.context_length >= LONG_CONTEXT:
            contexts += [size for size in (2, 4, 8, 16) if model.context_length % (2 * size) == 0]
        tensors = [t for t in divisors(self.cluster.node_size) if divides_heads(model, t)]
        for t, c in itertools.product(tensors, contexts):
            for p in divisors(n // (t * c) if n % (t * c) == 0 else 0):
                if p > model.n_layers:
                    continue
                data = n // (t * c * p)
                can_split_sequence = t > 1 and model.context_length % (t * c) == 0
                ways = itertools.product(
                    _zero_stages(data * c, p, offload=config.train.offload),
                    _schedules(p, model.n_layers),
                    ("ring", "all-to-all") if c > 1 else ("ring",),
                    (True, False) if can_split_sequence else (False,),
                    _expert_degrees(model, n // p, self.cluster.node_size),
                )
                for zero, (schedule, v), mode, sequence, (expert, expert_tensor) in ways:
                    yield old.model_copy(
                        update={
                            "data": data,
                            "tensor": t,
                            "sequence": sequence,
                            "pipeline": p,
                            "context": c,
                            "context_mode": mode,
                            "zero": zero,
                            "schedule": schedule,
                            "virtual_stages": v,
                            "expert": expert,
                            "expert_tensor": expert_tensor,
                        }
                    )

    @cached_property
    def _numbers(self) -> tuple[_Elements, _Elements]:
        """Two element counts: that of all weights with their optimizer state, and that of the
        trained weights."""
        table, optimizer = self.plan.table, self.plan.config.optimizer
        trained = [spec for spec in table if spec.is_trained]
        states = (spec.n_elements * optimizer_slots(optimizer, spec) for spec in trained)
        held = _Elements.of(table) + _Elements.of(trained, states)
        return held, _Elements.of(trained)

    def _n_trained(self, layout: Layout, stages: Sequence[range]) -> _Elements:
        """Return how many trained elements the first pipeline rank holds, before tensor or expert
        parallelism or ZeRO shards them. `stages` lists each stage's layers."""
        key = tuple(stages[number] for number in layout.stages_of(0))
        if key not in self._trained:
            tables = stage_tables(self.plan.config, layout, stages, 0)
            specs = itertools.chain.from_iterable(table for _, table in tables)
            self._trained[key] = _Elements.of([spec for spec in specs if spec.is_trained])
        return self._trained[key]

    def _least_state_bytes(self, layout: Layout) -> tuple[float, float]:
        """Return minimum bytes on a device, by an even split: first for weights and optimizer
        state, then for gradients. Gradients count as for a step with one micro-batch, in which the
        fewest are unsharded at the same time. Both are 0 with `train.offload`."""
        if self.plan.config.train.offload:
            return 0.0, 0.0
        held, trained = self._numbers
        e = Step(self.plan.config, layout, (), self.precision).element_bytes / layout.pipeline
        whole = LayoutRules(layout).keeps_whole_gradients(1)
        return e * held.on_rank(layout), e * trained.on_rank(layout, before_zero=whole)


@dataclass(frozen=True)
class _Elements:
    """Numbers of elements of parameters: those of experts' parameters, and those of all others, as
    ranks shard the two differently."""

    of_experts: int
    others: int

    @staticmethod
    def of(specs: Sequence[ParameterSpec], sizes: Iterable[int] | None = None) -> _Elements:
        """Count parameters' elements; `sizes` replaces each one's own count."""
        sizes = (spec.n_elements for spec in specs) if sizes is None else sizes
        counts = [0, 0]
        for spec, size in zip(specs, sizes, strict=True):
            counts["experts" not in spec.axes] += size
        return _Elements(*counts)

    def __add__(self, more: _Elements) -> _Elements:
        return _Elements(self.of_experts + more.of_experts, self.others + more.others)

    def on_rank(self, layout: Layout, *, before_zero: bool = False) -> float:
        """Return the fewest of these elements that a rank can hold, by an even split over the ranks
        of one pipeline stage: after ZeRO has sharded them, or with `before_zero` before."""
        shard = 1 if before_zero else layout.parameter_sizes["shard"]
        others = self.others / (layout.tensor * shard)
        if layout.shards_experts:
            shard = 1 if before_zero else layout.expert_sizes["expert_shard"]
            shard *= layout.expert * layout.expert_tensor
        return others + self.of_experts / shard


def _zero_stages(n_replicas: int, pipeline: int, *, offload: bool) -> Sequence[int]:
    """Return the ZeRO stages worth trying for `n_replicas` data × context ranks. With several
    pipeline ranks, stages 2 and 3 behave like 1; offloading requires a stage above 0."""
    stages = (1,) if pipeline > 1 else (1, 2, 3)
    if offload:
        return stages
    return (0,) if n_replicas == 1 else (0, *stages)


def _schedules(pipeline: int, n_layers: int) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages per rank) for a pipeline with `pipeline` ranks: every schedule with
    each number of stages that it takes, up to MOST_VIRTUAL_STAGES. With several stages per rank,
    all stages must have equally many layers. Without a pipeline, ("1f1b", 1) alone."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    most = min(n_layers // pipeline, MOST_VIRTUAL_STAGES)
    for name, takes_several in TAKES_SEVERAL_STAGES.items():
        if name == "zero-bubble-v":
            counts: Sequence[int] = (2,) if most >= 2 else ()
        elif name == "interleaved":
            counts = range(2, most + 1)
        else:
            counts = range(1, most + 1) if takes_several else (1,)
        for v in counts:
            if v == 1 or n_layers % (pipeline * v) == 0:
                yield name, v


def _expert_degrees(model: ModelConfig, n_ranks: int, node_size: int) -> list[tuple[int, int]]:
    """Return the (expert, expert_tensor) degrees worth trying for the `n_ranks` ranks of a pipeline
    stage; (1, 1) alone for a model without experts. `expert` is every number that divides both
    ranks and experts. `expert_tensor`, within a node, is tried only where ranks could not have
    fewer experts instead: that makes shards as small, sends less and multiplies faster."""
    if model.experts.count is None:
        return [(1, 1)]
    found = []
    for expert, shards in itertools.product(divisors(model.experts.count), divisors(node_size)):
        fewer = any(model.experts.count % (expert * d) == 0 for d in divisors(shards)[1:])
        divides = n_ranks % (expert * shards) == 0 and model.expert_width % shards == 0
        if divides and not fewer:
            found.append((expert, shards))
    return found


def _micro_batches(rows: int) -> list[int]:
    """Return the possible micro-batch sizes: the divisors of `rows` (sequences per data-parallel
    rank), up to LARGEST_MICRO_BATCH."""
    return [size for size in range(1, min(rows, LARGEST_MICRO_BATCH) + 1) if rows % size == 0]


def _least_activation_bytes(step: Step) -> float:
    """Return the minimum bytes that the first pipeline rank's blocks save, for as many
    micro-batches as are in flight at once; for half as many in a V schedule. All blocks count as
    the smallest one."""
    config, layout, stages = step.config, step.layout, step.stages
    costs = ActivationBytes(step)
    blocks = run_operations(config.model, config.lora).alike_blocks
    each = min(costs.kept_of_block(block) for block, _ in blocks)
    n_layers = layout.virtual_stages * min(len(stages[number]) for number in layout.stages_of(0))
    under_way = min(layout.pipeline, step.n_micro_batches) / (2 if layout.turns_back else 1)
    return each * n_layers * under_way


class _Bound:
    """Lower bounds on the seconds per step in one layout, for any micro-batch size and
    checkpointing mode."""

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[range],
        cluster: Cluster,
        known: dict[object, ComputeTime],
        n_trained: _Elements,
    ) -> None:
        """stages: each stage's layers.
        known: caches ComputeTime across layouts, by its `key`.
        n_trained: trained elements on the first pipeline rank, before sharding.
        """
        self.layout = layout
        self.stages = stages
        self.cluster = cluster
        self.known = known
        self.n_trained = n_trained
        self.rules = LayoutRules(layout)
        self.links = Links(layout, cluster)
        self.ranks = list(map(layout.stages_of, range(layout.pipeline)))

    def seconds(self, step: Step) -> float:
        """Return a lower bound in seconds on the time for `step`, which has this layout."""
        layout, M = self.layout, step.n_micro_batches
        compute = ComputeTime(step, self.cluster)
        compute = self.known.setdefault(compute.key, compute)
        seconds = [compute.stage(layers) for layers in self.stages]
        whole = [sum(each) for each in seconds]
        sums, exchange = self.sums_of_sub_layer(step), self.exchange_of_layer(step)
        has_experts = step.config.model.experts.are_in
        slowest = filling = draining = 0.0
        for numbers in self.ranks:
            layers = list(itertools.chain.from_iterable(self.stages[each] for each in numbers))
            n_experts = sum(map(has_experts, layers))
            waiting = (2 * len(layers) - n_experts) * sums + n_experts * exchange
            busy = M * (sum(whole[number] for number in numbers) + waiting)
            # While other ranks drain the pipeline, it may compute its weights' gradients.
            late = 0.0
            if layout.splits_backward:
                late = M * sum(seconds[number].backward_weight for number in numbers)
            slowest = max(slowest, filling + busy, filling + busy - late + draining)
            filling += seconds[numbers[0]].forward
            draining += seconds[numbers[0]].backward_input
        sent = self.gradients_and_weights(step)
        if layout.pipeline > 1:  # not overlapped: before the first pass and after the last
            return slowest + sent
        hidden = self.cluster.device.calibration.interference_share * min(slowest, sent)
        return max(slowest, sent) + hidden

    def exchange_of_layer(self, step: Step) -> float:
        """Return a lower bound on the seconds that one layer with experts waits for the exchange of
        rows between ranks, per micro-batch, forward and backward together; 0 if its experts are not
        sharded. The k rows of each token are sent to their experts and back in each pass, and to
        every shard of an expert."""
        layout, model = self.layout, step.config.model
        if not layout.shards_experts:
            return 0.0
        n_tokens = step.micro_batch_size * model.context_length // layout.context
        n_rows = n_tokens // layout.tensor * model.experts.n_chosen * layout.expert_tensor
        n_bytes = n_rows * model.d_model * step.product_bytes
        sent = self.links.seconds("expert", "all_to_all", Communication(1, n_bytes))
        n_backward = 1 if step.config.lora.rank is None else 0
        counting = self.cluster.device.calibration.counts_seconds
        return counting + (2 + 2 * n_backward) * step.rows_over_mean * sent

    def sums_of_sub_layer(self, step: Step) -> float:
        """Return the minimum seconds per micro-batch that attention or a feed-forward layer waits
        for tensor-parallel sums, forward and backward. With sequence parallelism a sum is two
        collectives, each half as long as an all-reduce. 0 without tensor parallelism, and for a
        layer of which only the result is summed."""
        layout, config = self.layout, step.config
        if layout.tensor == 1:
            return 0.0
        n_tokens = step.micro_batch_size * config.model.context_length // layout.context
        n_bytes = n_tokens * config.model.d_model * step.product_bytes
        one = self.links.seconds("tensor", "all_reduce", Communication(1, n_bytes))
        if config.model.attention.type == "latent":  # narrower inputs than the stream are gathered
            return one / 2
        if config.lora.rank is not None:  # the first layer's inputs need no gradient
            return one
        if not self.rules.reads_at_once(config.lora):
            return 2 * one
        gathers = 1 if layout.sequence else 0  # for the results' gradients
        return (1 + gathers / 2 + self.cluster.device.calibration.interference_share) * one

    def gradients_and_weights(self, step: Step) -> float:
        """Return a lower bound on the seconds per step for summing gradients and gathering weights
        over data-parallel ranks, in one call per step, or one per ZeRO unit. Of parameters that
        tensor-parallel ranks replicate, only 1/tensor is counted; those of sharded experts, which
        have groups of their own, are left out."""
        rules, M, links = self.rules, step.n_micro_batches, self.links
        data_sum = step.sharding.data_sum
        if data_sum == "none":
            return 0.0
        n = self.n_trained.others // self.layout.tensor
        if not self.layout.shards_experts:
            n += self.n_trained.of_experts
        whole = n * step.element_bytes
        if data_sum != "fsdp":
            return links.seconds("data", "all_reduce", Communication(1, whole))
        n_gathers = 1 if rules.weights_stay_gathered else 2 * M
        n_sums = M if rules.reduces_each_micro_batch else 1
        n_units = 1 + 2 * sum(len(self.stages[number]) for number in self.ranks[0])
        gathered = Communication(n_units, n * step.product_bytes)
        gathers = links.seconds("shard", "all_gather", gathered)
        sums = links.seconds("shard", "reduce_scatter", Communication(n_units, whole))
        return n_gathers * gathers + n_sums * sums
