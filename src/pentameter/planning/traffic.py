"""What a process sends and receives in a step: calls and bytes, along each dimension of the mesh.

Bytes are what is handed over, the same in the ledger that measures: of an all-reduce and of a
message the tensor, of an all-gather the tensor gathered, of a reduce-scatter the one given. What
then travels depends on the algorithm; a ring of n moves (n - 1) / n of it through each link, and
twice that for an all-reduce.

Shapes: B rows of a micro-batch, T time, D d_model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pentameter.config.choices import look_up
from pentameter.config.schema import Config
from pentameter.planning.architecture import ParameterSpec, padded_vocab_size
from pentameter.planning.chunks import MAX_LOGITS, row_chunks
from pentameter.planning.layout import Layout, part_size
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import (
    ROOT,
    Shape,
    gathered_elements,
    shard_elements,
    stage_tables,
    tensor_dimension,
    tensor_part,
    units,
)
from pentameter.planning.sizes import step_sizes

COPIES_BUCKET_BYTES = 25 * 2**20
"""Gradients that DDP gathers before it sends them, so that it can begin during the backward pass;
its own default, but for the first bucket, which it would make smaller."""
SUM_BUCKET_BYTES = 64 * 2**20
"""The same of sums after the backward pass: few messages, as there is nothing to overlap."""
NORM_READS_OUTPUT = {"pre": False, "post": True}
"""`model.norm_position` → whether a norm reads the sum that a sub-layer's output is part of, so
that backward looks at it."""
WORLD = "world"
"""The dimension of single numbers (the count of targets, the loss, the norm), whichever group of
processes they are summed over."""

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "receive"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one dimension."""

    calls: int
    n_bytes: int


Ledger = Mapping[tuple[str, Kind], Traffic]
"""By dimension (one of MESH_DIMENSIONS, or WORLD) and kind."""


class Tally:
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
) -> Ledger:
    """What the process `rank` sends and receives in a step, its gradient norm included, by
    (dimension, kind); of a resolved configuration.

    `precision` is that of the run where the configuration leaves it open; without it products are
    taken to be in full precision. An optimizer sends nothing (but Muon's, where ZeRO or tensor
    parallelism cut its matrices). The first two steps of DDP differ, as it still learns in which
    order gradients come, and so do stages of which a process has more than three under ZeRO, as
    the schedule gathers them anew.
    """
    step = _Step(config, layout, stages, rank, precision)
    if layout.world_size > 1:
        step.count_numbers()
        step.count_messages()
        step.count_shared_matrices()
        step.count_whole_parameters()
        step.count_copies()
        step.count_shards()
        step.count_tied()
    return dict(step.tally.counted)


def busiest(config: Config, layout: Layout, stages: Sequence[range]) -> Ledger:
    """The traffic of the process that has most of it."""
    first = (layout.rank_of(pipeline=place) for place in range(layout.pipeline))
    each = (step_traffic(config, layout, stages, rank) for rank in first)
    return max(each, key=lambda ledger: sum(traffic.n_bytes for traffic in ledger.values()))


def by_dimension(traffic: Ledger) -> dict[str, dict[str, dict[str, int]]]:
    """Traffic as `plan --json` prints it: dimension → kind → calls and bytes."""
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for (dimension, kind), counted in traffic.items():
        nested.setdefault(dimension, {})[kind] = {
            "calls": counted.calls,
            "bytes": counted.n_bytes,
        }
    return nested


def filled_buckets(sizes: Sequence[int]) -> list[slice]:
    """Which of `sizes` in bytes, in order, go into one message: up to SUM_BUCKET_BYTES, or one
    tensor that is larger."""
    starts: list[int] = []
    n_bytes = 0
    for index, size in enumerate(sizes):
        if not starts or n_bytes + size > SUM_BUCKET_BYTES:
            starts.append(index)
            n_bytes = 0
        n_bytes += size
    return [slice(a, b) for a, b in itertools.pairwise([*starts, len(sizes)])]


class _Step:
    """One process's step, and the tally of what it sends in each way."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[range],
        rank: int,
        precision: str | None,
    ) -> None:
        model, sizes = config.model, step_sizes(config, layout, precision)
        self.config = config
        self.layout = layout
        self.rules = LayoutRules(layout)
        self.tally = Tally()
        self.places = layout.coordinates(rank)
        self.n_micro_batches = sizes.n_micro_batches
        self.element_bytes = sizes.element_bytes
        self.product_bytes = sizes.product_bytes
        self.n_rows = sizes.micro_batch_size * model.context_length
        self.stream_elements = self.n_rows * model.d_model  # (B, T, D)
        self.stages = dict(stage_tables(model, layout, stages, self.places["pipeline"]))
        self.n_layers = sum(len(stages[number]) for number in self.stages)
        self.has_first = 0 in self.stages
        self.has_last = layout.n_stages - 1 in self.stages

    def local_shapes(self, specs: Sequence[ParameterSpec]) -> Iterator[tuple[ParameterSpec, Shape]]:
        """Parameters with the shape of this process's tensor-parallel part."""
        for spec in specs:
            yield spec, tensor_part(spec, self.layout.tensor, self.places["tensor"])

    def gradient_bytes(self, specs: Sequence[ParameterSpec]) -> list[int]:
        """Bytes of the gradients that this process has after the backward pass."""
        shard, place = self.layout.shard, self.places["shard"]
        return [
            self.element_bytes * shard_elements(shape, shard, place)
            for _, shape in self.local_shapes(specs)
        ]

    def count_numbers(self) -> None:
        """Targets of the step before it, loss and gradient norm after it: fp64, one each."""
        self.tally.add(WORLD, "all_reduce", 8, calls=3)

    def count_messages(self) -> None:
        """The stream to the next stage and its gradient back, in the weights' dtype, for each
        micro-batch; with sequence parallelism each process has its own part of the time."""
        if self.layout.pipeline == 1:
            return
        part = self.layout.tensor if self.layout.sequence else 1
        n_bytes = self.stream_elements // part * self.element_bytes
        for number in self.stages:
            n_neighbours = (number > 0) + (number < self.layout.n_stages - 1)
            for kind in ("send", "receive"):
                self.tally.add("pipeline", kind, n_bytes, n_neighbours * self.n_micro_batches)

    def count_shared_matrices(self) -> None:
        """The partial sums of the matrices that tensor-parallel processes share.

        The sums of a layer's two outputs come in the products' dtype, those of the gradients of
        its two inputs in the stream's; so do the embedding's output and the gradient of the
        head's input. With sequence parallelism each sum is left divided by time (reduce-scatter),
        and each input, or gradient of an output, gathered again.
        """
        layout, M = self.layout, self.n_micro_batches
        if layout.tensor == 1:
            return
        stream = self.stream_elements * self.element_bytes
        product = self.stream_elements * self.product_bytes
        pairs = 2 * self.n_layers
        again = self.n_recomputed_sums()
        if layout.sequence:
            gathered_again = pairs if self.config.train.activation_checkpoint else 0
            self.tally.add("tensor", "reduce_scatter", product, M * (pairs + again))
            self.tally.add("tensor", "all_gather", stream, M * (pairs + gathered_again))
            self.tally.add("tensor", "all_gather", product, M * pairs)
            self.tally.add("tensor", "reduce_scatter", stream, M * pairs)
            for _ in range(self.has_first + self.has_last):
                self.tally.add("tensor", "reduce_scatter", stream, M)
                self.tally.add("tensor", "all_gather", stream, M)
        else:
            self.tally.add("tensor", "all_reduce", product, M * (pairs + again))
            self.tally.add("tensor", "all_reduce", stream, M * pairs)
            self.tally.add("tensor", "all_reduce", stream, M * (self.has_first + self.has_last))
        if self.has_last:
            self.count_loss()

    def n_recomputed_sums(self) -> int:
        """Sums that activation checkpointing repeats, for a micro-batch: of both outputs of each
        layer, but not of the last where backward does not look at it, which is where it is only
        added to the stream."""
        model = self.config.model
        if self.config.train.activation_checkpoint is None:
            return 0
        key = "model.norm_position"
        reads = look_up(NORM_READS_OUTPUT, model.norm_position, key, "the planner's traffic")
        looked_at = reads or model.dropout > 0
        return self.n_layers * (2 if looked_at else 1)

    def count_loss(self) -> None:
        """For the loss each row needs its largest logit, and its sum of exponentials with the
        logit of its target, over the parts of the vocabulary."""
        width = part_size(padded_vocab_size(self.config.model), self.layout.tensor, 0)
        for rows in row_chunks(self.n_rows, width, MAX_LOGITS):
            n_rows = rows.stop - rows.start
            for n_columns in (1, 2):
                n_bytes = n_columns * n_rows * self.element_bytes
                self.tally.add("tensor", "all_reduce", n_bytes, self.n_micro_batches)

    def count_whole_parameters(self) -> None:
        """With sequence parallelism what every process holds whole has the gradient of its own
        tokens alone: norms and positions. (A bias after a sum gets that of the gathered tokens.)"""
        if not self.rules.sums_over_tensor:
            return
        whole = [
            spec
            for specs in self.stages.values()
            for spec in specs
            if tensor_dimension(spec) is None and not spec.name.endswith(("out.bias", "down.bias"))
        ]
        self.count_sums("tensor", self.gradient_bytes(whole))

    def count_sums(self, dimension: str, sizes: Sequence[int]) -> None:
        for bucket in filled_buckets(sizes):
            self.tally.add(dimension, "all_reduce", sum(sizes[bucket]))

    def count_copies(self) -> None:
        """The gradients of whole copies: by DDP, or after the backward pass where the model is cut
        in other ways too."""
        specs = [spec for table in self.stages.values() for spec in table]
        if self.rules.data_sum == "after_backward":
            self.count_sums("data", self.gradient_bytes(specs))
        if self.rules.data_sum != "ddp":
            return
        n_bytes = 0
        for size in self.gradient_bytes(_backward_order(specs)):  # DDP closes what is full
            n_bytes += size
            if n_bytes >= COPIES_BUCKET_BYTES:
                self.tally.add("data", "all_reduce", n_bytes)
                n_bytes = 0
        if n_bytes:
            self.tally.add("data", "all_reduce", n_bytes)

    def count_shards(self) -> None:
        """ZeRO: weights are gathered for the forward pass, and stay so to the end of the step (1,
        2, and in a pipeline) or are gathered again for each backward pass (3). Gradients are
        reduced to their shards in the last micro-batch (1, and in a pipeline) or in each, and
        summed over copies of the shards in the last.
        """
        rules, shard = self.rules, self.layout.shard
        if rules.data_sum != "fsdp":
            return
        n_gathers = 1 if rules.weights_stay_gathered else 2 * self.n_micro_batches
        n_reductions = self.n_micro_batches if rules.reduces_each_micro_batch else 1
        for specs in self.stages.values():
            for name, unit in units(specs).items():
                gathered = sum(gathered_elements(s, shard) for _, s in self.local_shapes(unit))
                low = self.element_bytes if name == ROOT else self.product_bytes
                if shard > 1:
                    whole = gathered * self.element_bytes
                    self.tally.add("shard", "all_gather", gathered * low, n_gathers)
                    self.tally.add("shard", "reduce_scatter", whole, n_reductions)
                if rules.sums_shard_copies:
                    self.tally.add("data", "all_reduce", gathered // shard * self.element_bytes)

    def count_tied(self) -> None:
        """The gradients of the embedding and of its copy in the last stage, added up."""
        layout, model = self.layout, self.config.model
        if layout.pipeline == 1 or not model.tied_head:
            return
        for specs in self.stages.values():
            held = [spec for spec in specs if spec.name == "token_embedding.weight"]
            for size in self.gradient_bytes(held):
                self.tally.add("pipeline", "all_reduce", size)


def _backward_order(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Parameters in the order in which a backward pass completes their gradients."""
    first = ("token_embedding.weight", "position_embedding.weight")
    return [
        *(spec for spec in reversed(specs) if spec.name not in first),
        *(spec for spec in reversed(specs) if spec.name in first),
    ]
