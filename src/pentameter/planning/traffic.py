"""Collectives and messages of a step: calls and bytes, along each dimension of the mesh.

Bytes are what is handed over, the same in the ledger that measures: of an all-reduce and of a
message the tensor, of an all-gather the tensor gathered, of a reduce-scatter the one given. What
then travels depends on the algorithm; a ring of n moves (n - 1) / n of it through each link, and
twice that for an all-reduce.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import Config
from pentameter.planning.adapters import is_of_adapter, run_operations
from pentameter.planning.architecture import (
    ActivationTensor,
    Axis,
    Operation,
    ParameterSpec,
    shares_kv_heads,
)
from pentameter.planning.costs import (
    MAX_LOGITS,
    ActivationBytes,
    attention_elements,
    row_chunks,
    step_sizes,
)
from pentameter.planning.grid_traffic import GridTraffic
from pentameter.planning.layout import Layout, Shape
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import (
    gathered_elements,
    is_rounded,
    shard_elements,
    stage_tables,
    units,
)

COPIES_BUCKET_BYTES = 25 * 2**20
"""Size of DDP's buckets, whose all-reduces begin during the backward pass; its own default, but
for the first bucket, which it would make smaller."""
SUM_BUCKET_BYTES = 64 * 2**20
"""Size of a bucket in all-reduces after the backward pass: few messages, as there is nothing to
overlap."""
WORLD = "world"
"""The dimension of single numbers (the count of targets, the loss, the norm), whichever group of
processes they are summed over."""

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "receive",
]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one dimension."""

    calls: int
    n_bytes: int


StepTraffic = Mapping[tuple[str, Kind], Traffic]
"""Traffic by dimension (one of MESH_DIMENSIONS, or WORLD) and kind."""


When = Literal["forward", "backward", "beside"]
"""When tensor-parallel matrices send: in a pass, which waits, or beside products of the backward
pass."""


class TrafficCounter:
    """Adds up Traffic by (dimension, kind)."""

    def __init__(self) -> None:
        self.counted: dict[tuple[str, Kind], Traffic] = defaultdict(lambda: Traffic(0, 0))

    def add(self, dimension: str, kind: Kind, n_bytes: int, calls: int = 1) -> None:
        """Count `calls` calls of `n_bytes` each."""
        if calls:
            old = self.counted[dimension, kind]
            self.counted[dimension, kind] = Traffic(
                old.calls + calls, old.n_bytes + calls * n_bytes
            )


def step_traffic(
    config: Config,
    layout: Layout,
    stages: Sequence[range],
    rank: int = 0,
    precision: str | None = None,
) -> StepTraffic:
    """The traffic of the process `rank` in a step of a resolved configuration, its gradient norm
    included.

    `precision` is that of the run where the configuration leaves it open; without it products are
    taken to be in full precision. An optimizer sends nothing (but Muon's, where ZeRO or tensor
    parallelism cut its matrices). The first two steps of DDP differ, as it still learns in which
    order gradients come, and so do stages of which a process has more than three under ZeRO, as
    the schedule gathers them anew.
    """
    step = _RankTraffic(config, layout, stages, rank, precision)
    if layout.world_size > 1:
        step.count_numbers()
        step.count_messages()
        if layout.tensor_mode == "1d":
            step.count_divided_matrices()
        else:
            step.count_grid()
        step.count_context()
        step.count_loss()
        step.count_whole_parameters()
        step.count_copies()
        step.count_shards()
        step.count_tied()
    return dict(step.counter.counted)


def matrix_traffic(
    config: Config, layout: Layout, stages: Sequence[range], rank: int, precision: str
) -> dict[When, StepTraffic]:
    """Of the traffic of a process in a step that of tensor-parallel matrices, by when it is sent;
    the arguments are `step_traffic`'s."""
    counters: dict[When, TrafficCounter] = defaultdict(TrafficCounter)
    step = _RankTraffic(config, layout, stages, rank, precision)
    for when, dimension, kind, n_bytes, calls in step.messages_of_matrices():
        counters[when].add(dimension, kind, n_bytes, calls)
    return {when: dict(counter.counted) for when, counter in counters.items()}


def busiest(config: Config, layout: Layout, stages: Sequence[range]) -> StepTraffic:
    """The traffic of the process that has most of it."""
    first = (layout.rank_of(pipeline=place) for place in range(layout.pipeline))
    each = (step_traffic(config, layout, stages, rank) for rank in first)
    return max(each, key=lambda sent: sum(traffic.n_bytes for traffic in sent.values()))


def by_dimension(traffic: StepTraffic) -> dict[str, dict[str, dict[str, int]]]:
    """Traffic as `train --dry-run` prints it: dimension → kind → calls and bytes."""
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for (dimension, kind), counted in traffic.items():
        nested.setdefault(dimension, {})[kind] = {
            "calls": counted.calls,
            "bytes": counted.n_bytes,
        }
    return nested


def filled_buckets(sizes: Sequence[int]) -> list[slice]:
    """Buckets of tensors of these sizes in bytes, in order: up to SUM_BUCKET_BYTES each, or one
    tensor that is larger."""
    starts: list[int] = []
    n_bytes = 0
    for index, size in enumerate(sizes):
        if not starts or n_bytes + size > SUM_BUCKET_BYTES:
            starts.append(index)
            n_bytes = 0
        n_bytes += size
    return [slice(a, b) for a, b in itertools.pairwise([*starts, len(sizes)])]


class _RankTraffic:
    """One process's step, and the counts of what it sends in each way."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[range],
        rank: int,
        precision: str | None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.rules = LayoutRules(layout)
        self.counter = TrafficCounter()
        self.places = layout.coordinates(rank)
        self.parameter_places = layout.parameter_coordinates(rank)
        self.sizes = step_sizes(config, layout, precision)
        self.n_micro_batches = self.sizes.n_micro_batches
        self.element_bytes = self.sizes.element_bytes
        self.stages = dict(stage_tables(config, layout, stages, self.places["pipeline"]))
        self.operations = [
            op
            for number in self.stages
            for op in run_operations(config.model, config.lora, stages[number])
        ]

    @property
    def recomputes(self) -> bool:
        """Whether backward computes blocks again."""
        return self.config.train.activation_checkpoint is not None

    @cached_property
    def repeated(self) -> set[str]:
        """Operations whose results backward computes again."""
        return _recomputed_results(self.operations) if self.recomputes else set()

    def local_shape(self, spec: ParameterSpec) -> Shape:
        """The shape of this process's part of a parameter, before ZeRO shards it."""
        return self.layout.parameter_shape(spec.shape, spec.axes, self.parameter_places)

    def gradient_bytes(self, specs: Sequence[ParameterSpec]) -> list[int]:
        """Bytes of the gradients that this process has after the backward pass."""
        shard, place = self.layout.shard, self.parameter_places["shard"]
        return [
            self.element_bytes * shard_elements(self.local_shape(spec), shard, place)
            for spec in specs
        ]

    def count_numbers(self) -> None:
        """Targets of the step before it, loss and gradient norm after it: fp64, one each."""
        self.counter.add(WORLD, "all_reduce", 8, calls=3)

    def count_messages(self) -> None:
        """The stream to the next stage and its gradient back, in the weights' dtype, for each
        micro-batch; tensor-parallel processes send a part of it each, and gather what they receive
        where the stream is whole in each of them."""
        if self.layout.pipeline == 1:
            return
        M, costs = self.n_micro_batches, ActivationBytes(self.config, self.layout, self.sizes)
        gathers = self.layout.cuts_messages(self.config.model.context_length)
        for number in self.stages:
            place_of = self.layout.place_of_stage
            beside = [place_of[n] for n in (number - 1, number + 1) if n in place_of]
            n_neighbours = sum(place != place_of[number] for place in beside)
            for kind in ("send", "receive"):
                self.counter.add("pipeline", kind, costs.message, n_neighbours * M)
            self.counter.add("tensor", "all_gather", costs.stream, gathers * len(beside) * M)

    def count_divided_matrices(self) -> None:
        """The messages of divided matrices, along each mesh dimension that divides some."""
        for _, dimension, kind, n_bytes, calls in self.messages_of_matrices():
            self.counter.add(dimension, kind, n_bytes, calls)
        for dimension in self.layout.dividing_dimensions:
            self.count_head_norms(dimension)

    def messages_of_matrices(self) -> Iterator[tuple[When, str, Kind, int, int]]:
        """When they are sent, dimension, kind, bytes of a call and calls.

        Where the axis that a matrix sums over is divided, its result is a partial sum; where its
        result's axis is divided, the gradient of what it reads is one. With sequence parallelism
        each sum is left divided by time, and what is read, or the gradient of a result, gathered.
        All is in the products' dtype, but for the embedding's, which is in the stream's.
        """
        axes, rules = self.layout.divided_axes, self.rules
        # An adapter's partial sums join those of the matrix that it adapts.
        matrices = [
            (op, op.contracts)
            for op in self.operations
            if op.contracts and not is_of_adapter(op.parameters[0])
        ]
        for dimension in self.layout.dividing_dimensions:
            for op, contracted in matrices:
                if dimension in axes.get(contracted, ()):
                    yield self.sum_of("forward", dimension, op.result)
                    if op.name in self.repeated:
                        yield self.sum_of("backward", dimension, op.result)
                    if op.reads_gradient:
                        yield self.gather_of("backward", dimension, op.result)
            reading = {
                read: op
                for op, _ in matrices
                if dimension in axes.get(op.result.axes[1], ())
                for read in op.reads  # once, however many matrices read it
            }
            for read, op in reading.items():
                rounded = replace(read, dtype="products")
                at_once = op.kind == "product" and rules.reads_at_once(self.config.lora)
                yield self.gather_of("forward", dimension, rounded)
                if op.layer is not None and self.gathers_again(at_once):
                    yield self.gather_of("backward", dimension, rounded)
                if at_once:
                    yield self.gather_of("beside", dimension, rounded)
                if op.gives_gradient:
                    when: When = "beside" if at_once else "backward"
                    yield self.sum_of(when, dimension, rounded)

    def gathers_again(self, at_once: bool) -> bool:
        """Whether recomputing a block gathers what its matrices read: selective checkpointing keeps
        what an operation that sends has made."""
        how = self.config.train.activation_checkpoint
        return how == "full" or (how == "selective" and not at_once)

    def sum_of(
        self, when: When, dimension: str, tensor: ActivationTensor
    ) -> tuple[When, str, Kind, int, int]:
        """The sum of an activation, or of its gradient, in each micro-batch; where that dimension
        divides time, each process adds up its own part, which the others send."""
        divides_time = dimension in self.layout.divided_axes.get("time", ())
        kind: Kind = "all_to_all" if divides_time else "all_reduce"
        return when, dimension, kind, self.bytes_of_all_tokens(tensor), self.n_micro_batches

    def gather_of(
        self, when: When, dimension: str, tensor: ActivationTensor
    ) -> tuple[When, str, Kind, int, int]:
        """The gathering of an activation, or of its gradient, where a dimension divides time."""
        divides_time = dimension in self.layout.divided_axes.get("time", ())
        n_calls = self.n_micro_batches * divides_time
        return when, dimension, "all_gather", self.bytes_of_all_tokens(tensor), n_calls

    def bytes_of_all_tokens(self, tensor: ActivationTensor) -> int:
        """Bytes of an activation of all tokens of a micro-batch."""
        whole_axes: tuple[Axis, Axis] = ("context", tensor.axes[1])
        n_elements = math.prod(self.layout.local_shape(tensor.shape, whole_axes, self.places))
        return self.sizes.micro_batch_size * n_elements * self.sizes.bytes_of(tensor)

    def count_head_norms(self, dimension: str) -> None:
        """The mean squares of norms over the channels of divided heads: one number of each token,
        added up in each pass."""
        for op in self.operations:
            of_heads = op.kind == "norm" and op.result.axes[1] in ("heads", "kv_heads")
            if not of_heads or op.parameters[0].axes == ("head",):  # the latter of one head
                continue
            T = self.layout.local_shape(op.result.shape, op.result.axes)[0]
            n_bytes = self.sizes.micro_batch_size * T * max(4, self.element_bytes)
            n_calls = (2 if op.name in self.repeated else 1) + op.gives_gradient
            self.counter.add(dimension, "all_reduce", n_bytes, self.n_micro_batches * n_calls)

    def count_grid(self) -> None:
        """The collectives of a tensor mode of several dimensions, in each micro-batch."""
        repeated: set[str] = set()
        if self.recomputes:  # what we save is saved by an operation that has run
            repeated = _recomputed_results(self.operations, with_last=True)
        grid = GridTraffic(self.config, self.layout, self.sizes, self.places, repeated)
        for op in self.operations:
            for each in grid.of(op):
                self.counter.add(
                    each.dimension, each.kind, each.n_bytes, each.calls * self.n_micro_batches
                )

    def count_context(self) -> None:
        """What attention needs of the other processes' time. In a ring keys and values travel past
        all of them in each pass, and their gradients once, added up in float32 at least; or two
        exchanges give each all the time of some heads, and take the result back."""
        n, M = self.layout.context, self.n_micro_batches
        if n == 1:
            return
        for op in self.operations:
            if op.kind != "attention":
                continue
            n_q, n_kv = (
                self.sizes.micro_batch_size * n
                for n in attention_elements(op, self.layout, self.places)
            )
            # Selective checkpointing keeps a ring's result.
            in_ring = self.layout.context_mode == "ring"
            is_kept = in_ring and self.config.train.activation_checkpoint == "selective"
            n_forward = 2 if op.name in self.repeated and not is_kept else 1
            n_backward = int(op.gives_gradient)
            n_passes = n_forward + n_backward
            match self.layout.context_mode:
                case "ring":
                    n_bytes = n_kv * self.sizes.product_bytes
                    n_summed = n_kv * max(4, self.element_bytes)
                    n_calls = M * (n - 1)
                    for kind in ("send", "receive"):
                        self.counter.add("context", kind, n_bytes, n_calls * n_passes)
                        self.counter.add("context", kind, n_summed, n_calls * n_backward)
                case "all-to-all":
                    shares_kv = shares_kv_heads(self.config.model)
                    for n_elements in (n_q, n_kv, n_q) if shares_kv else (n_q + n_kv, n_q):
                        n_bytes = n_elements * self.sizes.product_bytes
                        self.counter.add("context", "all_to_all", n_bytes, M * n_passes)
                case unknown:
                    refuse_unknown(unknown, "parallel.context_mode", "the planner's traffic")

    def count_loss(self) -> None:
        """The loss's all-reduces over the parts of the vocabulary: of each row its largest logit,
        then its sum of exponentials with the logit of its target."""
        heads = [op for op in self.operations if op.kind == "head"]
        for head, dimension in itertools.product(heads, self.layout.divided_axes.get("vocab", ())):
            T, width = self.layout.local_shape(head.result.shape, head.result.axes)
            for rows in row_chunks(self.sizes.micro_batch_size * T, width, MAX_LOGITS):
                n_rows = rows.stop - rows.start
                for n_columns in (1, 2):
                    n_bytes = n_columns * n_rows * self.element_bytes
                    self.counter.add(dimension, "all_reduce", n_bytes, self.n_micro_batches)

    def count_whole_parameters(self) -> None:
        """The gradients of norms, positions and biases after a sum, which sequence parallelism
        leaves whole in every process: each has those of its own tokens. Likewise, one by one, of
        what acts on a process's own heads and is whole. In tensor modes that divide rows those of
        all that a dimension does not divide."""
        if self.layout.tensor_mode != "1d":
            every = [spec for table in self.stages.values() for spec in table]
            for dimension in self.rules.sums_copies_over:
                alike = [
                    spec
                    for spec in every
                    if dimension not in self.layout.parameter_divisions(spec.axes)
                ]
                self.count_sums(dimension, self.gradient_bytes(alike))
            return
        self.count_alike()
        if not self.rules.sums_copies_over:
            return
        on_stream = {
            spec
            for op in self.operations
            if op.result.axes[1] == "embed"
            for spec in op.parameters
            if not set(spec.axes) & self.layout.divided_axes.keys() and not is_of_adapter(spec)
        }
        trained = (spec for table in self.stages.values() for spec in table if spec.is_trained)
        whole = [spec for spec in trained if spec in on_stream]
        self.count_sums("tensor", self.gradient_bytes(whole))

    def count_alike(self) -> None:
        """The gradients of parameters that every process has whole for its own part of a matrix:
        those of keys and values of few heads, of norms of each head, and of the half of an adapter
        that is not divided with its matrix. ZeRO's unit sums them before it shards them, as the
        backward pass made them, or as micro-batches added them up."""
        layout, rules = self.layout, self.rules
        if layout.tensor == 1:
            return
        each_time = rules.reduces_each_micro_batch
        is_fresh = rules.data_sum == "fsdp" and (each_time or self.n_micro_batches == 1)
        found = {
            spec: self.sizes.product_bytes
            if is_fresh and op.kind == "product"
            else self.element_bytes
            for op in self.operations
            for spec in op.parameters
            if op.result.axes[1] in ("heads", "kv_heads") or is_of_adapter(spec)
            if spec.is_trained and not set(spec.axes) & layout.divided_axes.keys()
        }
        for spec, width in found.items():
            n_times = self.n_micro_batches if each_time else 1
            self.counter.add("tensor", "all_reduce", width * spec.n_elements, n_times)

    def count_sums(self, dimension: str, sizes: Sequence[int]) -> None:
        for bucket in filled_buckets(sizes):
            self.counter.add(dimension, "all_reduce", sum(sizes[bucket]))

    def count_copies(self) -> None:
        """The gradients of whole copies: by DDP, or after the backward pass where the model is cut
        in other ways too."""
        specs = [spec for table in self.stages.values() for spec in table if spec.is_trained]
        if self.rules.data_sum == "after_backward":
            self.count_sums("data", self.gradient_bytes(specs))
        if self.rules.data_sum != "ddp":
            return
        n_bytes = 0
        for size in self.gradient_bytes(_backward_order(specs)):  # DDP closes what is full
            n_bytes += size
            if n_bytes >= COPIES_BUCKET_BYTES:
                self.counter.add("data", "all_reduce", n_bytes)
                n_bytes = 0
        if n_bytes:
            self.counter.add("data", "all_reduce", n_bytes)

    def count_shards(self) -> None:
        """ZeRO's collectives, as the rules say: weights are gathered once, or for each pass, and
        gradients reduce-scattered in the last micro-batch or in each; copies of the shards sum
        theirs in the last."""
        rules, shard = self.rules, self.layout.shard
        if rules.data_sum != "fsdp":
            return
        n_gathers = 1 if rules.weights_stay_gathered else 2 * self.n_micro_batches
        n_reductions = self.n_micro_batches if rules.reduces_each_micro_batch else 1
        for specs in self.stages.values():
            for name, unit in units(specs).items():
                gathered, reduced = (
                    sum(gathered_elements(self.local_shape(spec), shard) for spec in specs)
                    for specs in (unit, [spec for spec in unit if spec.is_trained])
                )
                low = self.sizes.product_bytes if is_rounded(name) else self.element_bytes
                if shard > 1:
                    self.counter.add("shard", "all_gather", gathered * low, n_gathers)
                if shard > 1 and reduced:
                    whole = reduced * self.element_bytes
                    self.counter.add("shard", "reduce_scatter", whole, n_reductions)
                if rules.sums_shard_copies and reduced:
                    self.counter.add("data", "all_reduce", reduced // shard * self.element_bytes)

    def count_tied(self) -> None:
        """The gradients of the embedding and of its copy in the last stage, added up."""
        layout, model = self.layout, self.config.model
        if layout.pipeline == 1 or layout.turns_back or not model.tied_head:
            return
        for specs in self.stages.values():
            named = [spec for spec in specs if spec.name == "token_embedding.weight"]
            held = [spec for spec in named if spec.is_trained]
            for size in self.gradient_bytes(held):
                self.counter.add("pipeline", "all_reduce", size)


def _recomputed_results(run: Sequence[Operation], *, with_last: bool = False) -> set[str]:
    """Operations whose results activation checkpointing computes again: those before the last one
    of their block that saves something, and it too `with_last`. What only adds to the stream after
    it is not looked at."""
    last_saving = {op.layer: index for index, op in enumerate(run) if op.saves}
    return {
        op.name
        for index, op in enumerate(run)
        if op.layer is not None and index < last_saving[op.layer] + with_last
    }


def _backward_order(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Parameters in the order in which a backward pass completes their gradients."""
    first = ("token_embedding.weight", "position_embedding.weight")
    return [
        *(spec for spec in reversed(specs) if spec.name not in first),
        *(spec for spec in reversed(specs) if spec.name in first),
    ]
