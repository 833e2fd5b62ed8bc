"""The candidates of a search for layouts: which are legal, and bounds of their time and memory.

A candidate's bound is a time that no schedule of it can beat: the arithmetic of its slowest stage,
and what its layers wait for in tensor-parallel processes. Its bytes are bounded from below too, by
an even share of weights and optimizer with the activations of its blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentameter.config.choices import TAKES_SEVERAL_STAGES
from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.planning.adapters import check_adapters, run_operations
from pentameter.planning.cluster import Cluster
from pentameter.planning.compute_time import ComputeTime
from pentameter.planning.costs import ActivationBytes, StepSizes, end_weights, step_sizes
from pentameter.planning.fused_step import fuses_dropout
from pentameter.planning.layout import Layout, make_layout, stage_layers
from pentameter.planning.layout_checks import check_layout, check_micro_batches, check_passes
from pentameter.planning.links import Links
from pentameter.planning.memory import device_bytes, optimizer_slots, step_memory
from pentameter.planning.plan import Plan
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import stage_tables
from pentameter.planning.traffic import Traffic

LARGEST_MICRO_BATCH = 64
"""Sequences; more fill no device better."""
LONG_CONTEXT = 8192
"""Tokens from which on dividing time is tried."""
MOST_VIRTUAL_STAGES = 8
"""Stages of a process; more are as many more messages, for ever less idle time."""
CHECKPOINTS = (None, "selective", "full")


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


class Candidates:
    """Every legal candidate of a configuration on a whole cluster that may fit its devices."""

    def __init__(
        self, plan: Plan, cluster: Cluster, precision: str, *, sequence: bool | None = None
    ) -> None:
        """`plan` is that of the configuration on one process; `sequence` says whether
        tensor-parallel processes divide time, where it is not left open."""
        self.plan = plan
        self.cluster = cluster
        self.precision = precision
        self.sequences = (True, False) if sequence is None else (sequence,)
        self.n_legal = 0
        """Layouts that divide model, batch and devices, whether they may fit or not."""
        self._known: dict[object, ComputeTime] = {}
        self._trained: dict[object, int] = {}
        self._memories: dict[object, Any] = {}
        self._bytes: dict[int, int] = {}

    @cached_property
    def by_bound(self) -> list[LayoutCandidate]:
        """All of them, those with the lowest bound first."""
        return sorted(self, key=lambda each: each.bound)

    def __iter__(self) -> Iterator[LayoutCandidate]:
        plan, config, cluster = self.plan, self.plan.config, self.cluster
        ends = end_weights(config)
        trains = {}
        for parallel in self._parallels():
            try:
                layout = make_layout(parallel, cluster.n_devices).for_model(config.model)
                check_layout(layout, config.model, cluster.node_size)
                check_adapters(config.lora, layout)
            except ConfigError:
                continue
            rows, rest = divmod(plan.batch_size, layout.n_row_parts)
            if rest:
                continue
            self.n_legal += 1
            kept, gradients = self._least_state_bytes(layout)
            if kept + gradients > cluster.usable_bytes:
                continue
            stages = stage_layers(config.model.n_layers, layout.n_stages, *ends)
            bound = _Bound(
                layout,
                stages,
                cluster,
                self.precision,
                self._known,
                self._n_trained(layout, stages),
            )
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
                    continue  # 1F1B keeps fewer activations in the same time
                changed = config.model_copy(update={"parallel": parallel, "train": train})
                fused = self._fuses_dropout(layout)
                sizes = step_sizes(changed, layout, self.precision, fused_dropout=fused)
                held = _least_activation_bytes(changed, layout, stages, sizes)
                if kept + held <= cluster.usable_bytes:
                    seconds = bound.seconds(changed, sizes)
                    yield LayoutCandidate(changed, layout, stages, seconds)

    def device_bytes(self, candidate: LayoutCandidate) -> int:
        """Bytes of the fullest process of a candidate in its device."""
        known = id(candidate)  # of `by_bound`, which keeps it
        if known not in self._bytes:
            config, layout, stages = candidate.config, candidate.layout, candidate.stages
            memory = step_memory(
                config,
                layout,
                stages,
                self.precision,
                fused_dropout=self._fuses_dropout(layout),
                known=self._memories,
            )
            self._bytes[known] = device_bytes(memory, offload=config.train.offload)
        return self._bytes[known]

    def _fuses_dropout(self, layout: Layout) -> bool:
        model, device = self.plan.config.model, self.cluster.device
        return fuses_dropout(model, layout, self.precision, device)

    def _parallels(self) -> Iterator[ParallelConfig]:
        """Sections `[parallel]` that make up the whole cluster."""
        config, n = self.plan.config, self.cluster.n_devices
        model, old = config.model, config.parallel
        contexts = [1]
        if model.context_length >= LONG_CONTEXT:
            contexts += [size for size in (2, 4, 8, 16) if model.context_length % (2 * size) == 0]
        tensors = [t for t in _divisors(self.cluster.node_size) if model.n_heads % t == 0]
        for t, c in itertools.product(tensors, contexts):
            for p in _divisors(n // (t * c) if n % (t * c) == 0 else 0):
                if p > model.n_layers:
                    continue
                data = n // (t * c * p)
                divides_time = t > 1 and model.context_length % (t * c) == 0
                ways = itertools.product(
                    _zero_stages(data * c, p, offload=config.train.offload),
                    _schedules(p, model.n_layers),
                    ("ring", "all-to-all") if c > 1 else ("ring",),
                    self.sequences if divides_time else (False,),
                )
                for zero, (schedule, v), mode, sequence in ways:
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
                        }
                    )

    @cached_property
    def _numbers(self) -> tuple[int, int, int]:
        """Numbers of all weights, of those that are trained, and of their optimizer's state."""
        table, optimizer = self.plan.table, self.plan.config.optimizer
        trained = [spec for spec in table if spec.is_trained]
        return (
            sum(spec.n_elements for spec in table),
            sum(spec.n_elements for spec in trained),
            sum(spec.n_elements * optimizer_slots(optimizer, spec) for spec in trained),
        )

    def _n_trained(self, layout: Layout, stages: Sequence[range]) -> int:
        """Numbers that the first process of the pipeline trains, before they are divided."""
        key = tuple(stages[number] for number in layout.stages_of(0))
        if key not in self._trained:
            tables = stage_tables(self.plan.config, layout, stages, 0)
            specs = itertools.chain.from_iterable(table for _, table in tables)
            self._trained[key] = sum(spec.n_elements for spec in specs if spec.is_trained)
        return self._trained[key]

    def _least_state_bytes(self, layout: Layout) -> tuple[float, float]:
        """Bytes that weights and optimizer, and gradients take at least in a device: an even
        share. Where a step has one micro-batch, fewer gradients are whole at once."""
        if self.plan.config.train.offload:
            return 0.0, 0.0
        weights, trained, slots = self._numbers
        parts = layout.tensor * layout.pipeline
        e = step_sizes(self.plan.config, Layout(), self.precision).element_bytes
        shard = layout.shard if layout.zero else 1
        whole = LayoutRules(layout).keeps_whole_gradients(1)
        kept = e * (weights + slots) / (parts * shard)
        return kept, e * trained / (parts * (1 if whole else shard))


def _zero_stages(n_copies: int, pipeline: int, *, offload: bool) -> Sequence[int]:
    """The stages of ZeRO that differ; what is offloaded needs one of them."""
    stages = (1,) if pipeline > 1 else (1, 2, 3)
    if offload:
        return stages
    return (0,) if n_copies == 1 else (0, *stages)


def _schedules(pipeline: int, n_layers: int) -> Iterator[tuple[str, int]]:
    """Schedules with stages of a process."""
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


def _micro_batches(rows: int) -> list[int]:
    """Sizes of a micro-batch, of those that divide the rows, and all of them where they are few."""
    return [size for size in range(1, min(rows, LARGEST_MICRO_BATCH) + 1) if rows % size == 0]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _least_activation_bytes(
    config: Config, layout: Layout, stages: Sequence[range], sizes: StepSizes
) -> float:
    """Bytes of activations that the first process of the pipeline keeps at least: those of its
    blocks, for as many micro-batches as are under way, in a V half as many."""
    run = run_operations(config.model, config.lora, range(1))
    block = [op for op in run if op.layer is not None]
    each = ActivationBytes(config, layout, sizes).stage(block)
    n_layers = layout.virtual_stages * min(len(stages[number]) for number in layout.stages_of(0))
    under_way = min(layout.pipeline, sizes.n_micro_batches) / (2 if layout.turns_back else 1)
    return each * n_layers * under_way


class _Bound:
    """The times that no step of a layout falls below."""

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[range],
        cluster: Cluster,
        precision: str,
        known: dict[object, ComputeTime],
        n_trained: int,
    ) -> None:
        """`n_trained` counts the numbers that the first process of the pipeline trains, before they
        are divided."""
        self.layout = layout
        self.stages = stages
        self.cluster = cluster
        self.precision = precision
        self.known = known
        self.n_trained = n_trained
        self.rules = LayoutRules(layout)
        self.links = Links(layout, cluster)
        self.places = [
            (numbers, sum(len(stages[number]) for number in numbers))
            for numbers in map(layout.stages_of, range(layout.pipeline))
        ]

    def seconds(self, config: Config, sizes: StepSizes) -> float:
        """The bound of a step with a micro-batch and what it recomputes."""
        layout, M = self.layout, sizes.n_micro_batches
        compute = ComputeTime(config, layout, sizes, self.cluster, self.precision)
        compute = self.known.setdefault(compute.key, compute)
        seconds = [compute.stage(layers) for layers in self.stages]
        whole = [sum(each) for each in seconds]
        sums = self.sums_of_layer(config, sizes)
        slowest = filling = draining = 0.0
        for numbers, n_layers in self.places:
            busy = M * (sum(whole[number] for number in numbers) + n_layers * sums)
            # While others drain the pipeline, it may compute the gradients of its weights.
            late = 0.0
            if layout.splits_backward:
                late = M * sum(seconds[number].backward_weight for number in numbers)
            slowest = max(slowest, filling + busy, filling + busy - late + draining)
            filling += seconds[numbers[0]].forward
            draining += seconds[numbers[0]].backward_input
        sent = self.gradients_and_weights(config, sizes)
        if layout.pipeline > 1:  # all of it before the first pass and after the last one
            return slowest + sent
        hidden = self.cluster.device.calibration.interference_share * min(slowest, sent)
        return max(slowest, sent) + hidden

    def sums_of_layer(self, config: Config, sizes: StepSizes) -> float:
        """The least that a layer's passes wait for tensor-parallel sums of its two sub-layers, of
        which each is as long as an all-reduce, or, where time is divided, as two half as long."""
        layout = self.layout
        if layout.tensor == 1:
            return 0.0
        n_tokens = sizes.micro_batch_size * config.model.context_length // layout.context
        n_bytes = n_tokens * config.model.d_model * sizes.product_bytes
        one = self.links.seconds("tensor", "all_reduce", Traffic(1, n_bytes))
        if config.lora.rank is not None:  # the first layer's inputs need no gradient
            return 2 * one
        if not self.rules.reads_at_once(config.lora):
            return 4 * one
        gathers = 1 if layout.sequence else 0  # of the results' gradients
        return (2 + gathers + 2 * self.cluster.device.calibration.interference_share) * one

    def gradients_and_weights(self, config: Config, sizes: StepSizes) -> float:
        """The least time that sums of gradients and gathers of weights take in a step: one message,
        or one for each of ZeRO's units; of what tensor-parallel processes hold whole each has its
        part."""
        rules, M, links = self.rules, sizes.n_micro_batches, self.links
        if rules.data_sum == "none":
            return 0.0
        n = self.n_trained // self.layout.tensor
        whole = n * sizes.element_bytes
        if rules.data_sum != "fsdp":
            return links.seconds("data", "all_reduce", Traffic(1, whole))
        n_gathers = 1 if rules.weights_stay_gathered else 2 * M
        n_sums = M if rules.reduces_each_micro_batch else 1
        n_units = 1 + 2 * self.places[0][1]
        gathered = Traffic(n_units, n * sizes.product_bytes)
        gathers = links.seconds("shard", "all_gather", gathered)
        sums = links.seconds("shard", "reduce_scatter", Traffic(n_units, whole))
        return n_gathers * gathers + n_sums * sums
