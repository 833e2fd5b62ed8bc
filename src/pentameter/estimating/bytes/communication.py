"""Communication per step: calls and bytes, along each mesh dimension.

Bytes are the size of the tensor passed to the call, as in the ledger that measures it: the tensor
itself for an all-reduce or a message, the gathered tensor for an all-gather, the input for a
reduce-scatter. The algorithm decides how much then travels; a ring with n ranks moves (n - 1) / n
of it through each link, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pentameter.estimating.bytes.costs import ActivationBytes, Step
from pentameter.estimating.bytes.grid_communication import GridCommunication
from pentameter.estimating.bytes.operation_communication import (
    OF_MATRICES,
    Kind,
    OperationCommunication,
    Sent,
    When,
)
from pentameter.estimating.bytes.stages import alike_stages, is_rounded, stage_tables, units
from pentameter.planning.adapters import run_operations
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.buckets import COPIES_BUCKET_BYTES, filled_buckets
from pentameter.planning.layouts.layout import EXPERT_DIMENSIONS, PARAMETER_DIMENSIONS

WORLD = "world"
"""Stands in place of a mesh dimension for all reductions of single numbers (target count, loss,
gradient norm), whichever ranks they span."""


@dataclass(frozen=True)
class Communication:
    """The volume that one kind of collective or message sends along one mesh dimension: the number
    of calls, and the total bytes passed to them."""

    calls: int
    n_bytes: int


StepCommunication = Mapping[tuple[str, Kind], Communication]
"""Maps (dimension, kind) to the Communication in a step. A dimension is one of MESH_DIMENSIONS or
EXPERT_DIMENSIONS, or WORLD. Under `expert` are the exchanges of experts' rows, whose ranks also
differ along `expert_tensor`; how much each rank sends depends on the routing, and the mean over
ranks is counted."""


class CommunicationCounter:
    """Adds up the number of calls and the bytes that one rank communicates, by mesh dimension and
    kind of collective."""

    def __init__(self) -> None:
        self.counted: dict[tuple[str, Kind], Communication] = defaultdict(
            lambda: Communication(0, 0)
        )

    def add(self, dimension: str, kind: Kind, n_bytes: int, calls: int = 1) -> None:
        """Add `calls` calls of one kind of collective along a mesh dimension, each with `n_bytes`.
        Nothing is recorded for 0 calls."""
        if calls:
            old = self.counted[dimension, kind]
            self.counted[dimension, kind] = Communication(
                old.calls + calls, old.n_bytes + calls * n_bytes
            )

    def add_sent(self, sent: Sent, n_micro_batches: int) -> None:
        """Add the calls in `sent`, those of one micro-batch, `n_micro_batches` times."""
        self.add(sent.dimension, sent.kind, sent.n_bytes, sent.calls * n_micro_batches)


def step_communication(step: Step, rank: int = 0) -> StepCommunication:
    """Return the calls and bytes of one rank in a step, including the gradient norm, counted from
    the model's operations; empty on a single device. An optimizer sends nothing, except Muon for
    matrices sharded by ZeRO or tensor parallelism, which is left out.

    A run differs in two cases: in DDP's first two steps, while it learns the order in which
    gradients arrive; and under ZeRO on a rank with more than three stages, whose weights the
    schedule gathers again.
    """
    on_rank = _RankCommunication(step, rank)
    if step.layout.world_size > 1:
        on_rank.count_numbers()
        on_rank.count_messages()
        on_rank.count_operations()
        on_rank.count_sums_after_backward()
        on_rank.count_ddp()
        on_rank.count_shards()
        on_rank.count_tied()
    return dict(on_rank.counter.counted)


def matrix_communication(step: Step, rank: int) -> dict[When, StepCommunication]:
    """Return one rank's communication in a step for tensor-parallel matrices, split by when it is
    sent: in the "forward" or "backward" pass, or "beside" (overlapped with the backward pass's
    matmuls)."""
    counters: dict[When, CommunicationCounter] = defaultdict(CommunicationCounter)
    for sent in _RankCommunication(step, rank).operations.sent(OF_MATRICES):
        counters[sent.when].add_sent(sent, step.n_micro_batches)
    return {when: dict(counter.counted) for when, counter in counters.items()}


def communication_of_stages(step: Step) -> list[StepCommunication]:
    """Return, for each `pipeline` coordinate, the communication of its first rank in a step: (mesh
    dimension, kind) → calls and bytes. Coordinates whose stages are equal share one result."""
    found: dict[int, StepCommunication] = {}
    for coordinates in alike_stages(step.config.model, step.layout, step.stages):
        rank = step.layout.rank_of(pipeline=coordinates[0])
        found |= dict.fromkeys(coordinates, step_communication(step, rank))
    return [found[coordinate] for coordinate in range(step.layout.pipeline)]


def busiest(step: Step) -> StepCommunication:
    """Return the step's communication for the pipeline rank that passes the most bytes to
    collectives and messages in total."""
    each = communication_of_stages(step)
    return max(each, key=lambda sent: sum(traffic.n_bytes for traffic in sent.values()))


def by_dimension(traffic: StepCommunication) -> dict[str, dict[str, dict[str, int]]]:
    """Return a rank's communication in a step, (dimension, kind) → calls and bytes, as `train
    --dry-run` prints it: dimension → kind → {"calls", "bytes"}."""
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for (dimension, kind), counted in traffic.items():
        nested.setdefault(dimension, {})[kind] = {"calls": counted.calls, "bytes": counted.n_bytes}
    return nested


class _RankCommunication:
    """Counts everything that one rank sends in a step, in `counter`; each `count_…` method adds one
    source."""

    def __init__(self, step: Step, rank: int) -> None:
        self.step = step
        self.config, self.layout, self.sharding = step.config, step.layout, step.sharding
        self.counter = CommunicationCounter()
        self.coordinates = self.layout.coordinates(rank)
        self.parameter_coordinates = self.layout.parameter_coordinates(rank)
        tables = stage_tables(self.config, self.layout, step.stages, self.coordinates["pipeline"])
        self.stages = dict(tables)
        runs = [
            run_operations(self.config.model, self.config.lora, step.stages[number])
            for number in self.stages
        ]
        count = GridCommunication if self.layout.is_grid else OperationCommunication
        self.operations = count(step, self.coordinates, runs)

    def gradient_bytes(self, specs: Sequence[ParameterSpec]) -> list[int]:
        """Return, for each parameter in `specs`, the bytes of the gradient that this rank holds
        after the backward pass; with ZeRO, those of its shard alone."""
        return [
            self.step.element_bytes * self.sharding.zero_elements(spec, self.parameter_coordinates)
            for spec in specs
        ]

    def gathered_elements(self, specs: Sequence[ParameterSpec]) -> int:
        """Return the elements that this rank receives when it all-gathers these parameters."""
        elements, coordinates = self.sharding.gathered_elements, self.parameter_coordinates
        return sum(elements(spec, coordinates) for spec in specs)

    def count_numbers(self) -> None:
        """Count the all-reduces of single numbers in a step, one fp64 each: the number of targets
        before the passes, the loss and the gradient norm after them."""
        self.counter.add(WORLD, "all_reduce", 8, calls=3)

    def count_messages(self) -> None:
        """Count the pipeline's messages: the residual stream sent to the next stage and its
        gradient sent back, in the stream's dtype, per micro-batch. Tensor-parallel ranks send one
        shard each, and all-gather the shards they receive if each needs the whole stream."""
        if self.layout.pipeline == 1:
            return
        M, costs = self.step.n_micro_batches, ActivationBytes(self.step)
        gathers = self.sharding.shards_messages(self.config.model.context_length)
        for number in self.stages:
            place_of = self.layout.pipeline_rank_of_stage
            neighbours = [place_of[n] for n in (number - 1, number + 1) if n in place_of]
            n_neighbours = sum(coordinate != place_of[number] for coordinate in neighbours)
            for kind in ("send", "receive"):
                self.counter.add("pipeline", kind, costs.message, n_neighbours * M)
            self.counter.add("tensor", "all_gather", costs.stream, gathers * len(neighbours) * M)

    def count_operations(self) -> None:
        """Count the collectives of the model's operations (tensor and context parallelism) in all
        micro-batches."""
        for sent in self.operations.sent():
            self.counter.add_sent(sent, self.step.n_micro_batches)

    def count_sums_after_backward(self) -> None:
        """Count the all-reduces that sum gradients after the backward pass, in buckets: for
        parameters that several ranks replicate but apply to different tokens, heads or batch rows,
        along the dimensions in their placement's `summed_over`."""
        trained = [spec for table in self.stages.values() for spec in table if spec.is_trained]
        for dimension in dict.fromkeys((*PARAMETER_DIMENSIONS, *EXPERT_DIMENSIONS)):
            summed = [
                spec for spec in trained if dimension in self.sharding.placement(spec).summed_over
            ]
            sizes = self.gradient_bytes(summed)
            for bucket in filled_buckets(sizes):
                self.counter.add(dimension, "all_reduce", sum(sizes[bucket]))

    def count_ddp(self) -> None:
        """Count DDP's all-reduces along `data`, one per bucket, for parameters whose placement
        leaves the gradient sum to DDP."""
        specs = [spec for table in self.stages.values() for spec in table if spec.is_trained]
        by_ddp = [each for each in _backward_order(specs) if self.sharding.placement(each).ddp_over]
        n_bytes = 0
        for size in self.gradient_bytes(by_ddp):  # DDP closes full buckets
            n_bytes += size
            if n_bytes >= COPIES_BUCKET_BYTES:
                self.counter.add("data", "all_reduce", n_bytes)
                n_bytes = 0
        if n_bytes:
            self.counter.add("data", "all_reduce", n_bytes)

    def count_shards(self) -> None:
        """Count ZeRO's collectives; does nothing without ZeRO. Weights are all-gathered once if
        they stay gathered over the step (`rules.weights_stay_gathered`), else in both passes of
        each micro-batch. Gradients are reduce-scattered in each micro-batch if
        `rules.reduces_each_micro_batch`, else in the last one only. If shards have replicas, these
        all-reduce gradients in the last micro-batch."""
        rules = self.step.rules
        if self.sharding.data_sum != "fsdp":
            return
        n_gathers = 1 if rules.weights_stay_gathered else 2 * self.step.n_micro_batches
        n_reductions = self.step.n_micro_batches if rules.reduces_each_micro_batch else 1
        for specs in self.stages.values():
            for name, unit in units(specs).items():
                *replicas, dimension = self.sharding.placement(unit[0]).fsdp_over
                shard = self.sharding.n_zero_shards(unit[0])
                gathered = self.gathered_elements(unit)
                reduced = self.gathered_elements([spec for spec in unit if spec.is_trained])
                low = self.step.product_bytes if is_rounded(name) else self.step.element_bytes
                if shard > 1:
                    self.counter.add(dimension, "all_gather", gathered * low, n_gathers)
                if shard > 1 and reduced:
                    whole = reduced * self.step.element_bytes
                    self.counter.add(dimension, "reduce_scatter", whole, n_reductions)
                for replica in replicas if reduced else ():
                    n_bytes = reduced // shard * self.step.element_bytes
                    self.counter.add(replica, "all_reduce", n_bytes)

    def count_tied(self) -> None:
        """Count the all-reduce of a tied embedding's gradient over the first and the last pipeline
        stage, which both hold the parameter. There is none if both stages are on one rank."""
        layout, model = self.layout, self.config.model
        if layout.pipeline == 1 or layout.turns_back or not model.tied_head:
            return
        for specs in self.stages.values():
            named = [spec for spec in specs if spec.name == "token_embedding.weight"]
            held = [spec for spec in named if spec.is_trained]
            for size in self.gradient_bytes(held):
                self.counter.add("pipeline", "all_reduce", size)


def _backward_order(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Return parameters in the order in which a backward pass completes their gradients: `specs`
    reversed, with the embeddings last."""
    first = ("token_embedding.weight", "position_embedding.weight")
    return [
        *(spec for spec in reversed(specs) if spec.name not in first),
        *(spec for spec in reversed(specs) if spec.name in first),
    ]
