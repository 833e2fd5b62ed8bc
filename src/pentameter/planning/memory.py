"""Bytes that each process holds: weights, gradients, optimizer, what it gathers, activations."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import Config, OptimizerConfig
from pentameter.planning.adapters import Run, run_operations
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.costs import ActivationBytes, StepSizes, step_sizes
from pentameter.planning.layout import Layout
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import (
    ROOT,
    alike_places,
    gathered_elements,
    is_rounded,
    shard_elements,
    stage_tables,
    units,
)
from pentameter.planning.timeline import (
    UnderWay,
    passes_under_way,
    waiting_messages,
)
from pentameter.planning.traffic import SUM_BUCKET_BYTES


@dataclass(frozen=True)
class StateBytes:
    """The bytes of what the fullest process holds from step to step, and its gradients."""

    weights_bytes: int
    gradients_bytes: int
    """The most that are held from one micro-batch to the next, or to the optimizer's step."""
    optimizer_bytes: int


@dataclass(frozen=True)
class Memory(StateBytes):
    """The bytes of the fullest process, in a step after the first one, which makes the optimizer's
    state.

    With `train.offload` weights, gradients and optimizer lie in the machine's memory, the rest in
    the device's.
    """

    gathered_bytes: int
    """Bytes beyond these at the peak: weights gathered from shards, or rounded for products, and
    what is on its way between processes."""
    received_bytes: int
    """Messages of a pipeline under way: activations and gradients that no pass has read yet, and
    gradients sent. A received activation that was read is among the activations."""
    activations_bytes: int
    """The most that the forward passes under way have kept for their backward passes."""
    total_bytes: int
    """The peak: less than the sum where gradients take the place of activations."""


def step_memory(
    config: Config,
    layout: Layout,
    stages: Sequence[range],
    precision: str | None = None,
    *,
    fused_dropout: bool = False,
    known: dict[object, _RankMemory] | None = None,
) -> Memory:
    """The Memory of a step of a resolved configuration, of the fullest process.

    `precision` is that of the run where the configuration leaves it open; without it products are
    taken to be in full precision. Attention's weights that are dropped are taken to be written out,
    unless kernels drop them, `fused_dropout`. The first of the processes that share tensors or
    shards holds the largest parts. Muon's work on a matrix is left out. `known` keeps what follows
    from parameters alone for other calls with the same model, optimizer and precision.
    """
    sizes = step_sizes(config, layout, precision, fused_dropout=fused_dropout)
    n_micro_batches = sizes.n_micro_batches
    under_way = passes_under_way(layout, n_micro_batches)
    waiting = waiting_messages(layout, n_micro_batches)
    known = {} if known is None else known
    found = []
    for places in alike_places(layout, stages):
        key = layout, places[0], n_micro_batches > 1
        if key not in known:
            known[key] = _RankMemory(config, layout, stages, places[0], sizes)
        held = _RankActivations(config, layout, stages, places[0], sizes)
        peaks = {(*held.peaks(under_way[each]), held.received(waiting[each])) for each in places}
        found += [known[key].memory(*most) for most in _largest(peaks)]
    return max(found, key=lambda memory: memory.total_bytes)


def _largest(peaks: set[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Of some tuples those of which no other has as much of everything."""
    return [
        one
        for one in peaks
        if not any(other != one and all(map(operator.ge, other, one)) for other in peaks)
    ]


def state_bytes(
    config: Config, layout: Layout, tables: Sequence[Sequence[ParameterSpec]]
) -> StateBytes:
    """The bytes that follow from parameters alone, of the fullest process of a resolved
    configuration; `tables` are those of its pipeline stages. The optimizer is the configuration's,
    and a matrix is divided along the axes that its table names.
    """
    sizes, rules = step_sizes(config, layout), LayoutRules(layout)
    whole_gradients = rules.keeps_whole_gradients(sizes.n_micro_batches)

    def of_place(place: int) -> StateBytes:
        weights = gradients = optimizer = 0
        numbers = layout.stages_of(place)
        specs = {spec.name: spec for number in numbers for spec in tables[number]}
        for spec in specs.values():
            local = layout.parameter_shape(spec.shape, spec.axes)
            own = shard_elements(local, layout.shard, 0) if local else 1
            weights += own
            gradients += math.prod(local) if whole_gradients else own
            optimizer += own * optimizer_slots(config.optimizer, spec)
        e = sizes.element_bytes
        return StateBytes(e * weights, e * gradients, e * optimizer)

    places = map(of_place, range(layout.pipeline))
    return max(places, key=lambda b: b.weights_bytes + b.gradients_bytes + b.optimizer_bytes)


def device_bytes(memory: Memory, *, offload: bool) -> int:
    """The bytes of a process's Memory that lie in its device."""
    if not offload:
        return memory.total_bytes
    state = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    return max(0, memory.total_bytes - state)


def optimizer_slots(optimizer: OptimizerConfig, spec: ParameterSpec) -> int:
    """Numbers that the optimizer of a resolved configuration keeps beside each weight."""
    match optimizer.name:
        case "adamw" | "adam":
            return 2
        case "sgd":
            return 1 if optimizer.momentum else 0
        case "muon":
            return 1 if spec.is_block_matrix else 2
        case unknown:
            refuse_unknown(unknown, "optimizer.name", "the planner's memory")


@dataclass(frozen=True)
class _FsdpUnit:
    """Bytes of the parameters that FSDP gathers and reduces together."""

    gathered: int
    """Bytes of the whole parameters as products read them, shards padded to the largest."""
    fresh: int
    """Bytes of the whole gradients as a backward pass makes them."""
    largest: int
    """Bytes of the largest parameter's fresh gradient."""
    whole: int
    """Bytes of the whole gradients as micro-batches add them up."""
    padded: int
    """Bytes of the whole gradients as they are reduce-scattered, padded."""
    shard: int
    """Bytes of this process's shard of the gradients."""


@dataclass(frozen=True)
class _Snapshot:
    """Bytes held at one point of a step, beside weights and optimizer."""

    state_bytes: int
    activations_bytes: float = 0.0


class _RankActivations:
    """The activations of the process at a place of the pipeline, first along every other
    dimension."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[range],
        place: int,
        sizes: StepSizes,
    ) -> None:
        self.costs = ActivationBytes(config, layout, sizes)
        self.numbers = layout.stages_of(place)
        last = layout.n_stages - 1
        known: dict[object, tuple[int, int, int]] = {}
        found = []
        for number in self.numbers:
            alike = len(stages[number]), number == 0, number == last
            if alike not in known:
                run = run_operations(config.model, config.lora, stages[number])
                known[alike] = self._of_stage(run, number > 0, number < last)
            found.append(known[alike])
        kept, split, at_once = zip(*found, strict=True)
        self.at_once = max(at_once)
        self.of_passes = [*kept, *split]
        """Bytes of the passes that an UnderWay counts. Each forward pass keeps what its stage
        keeps, until the backward pass is done, and what is between its halves where it is split:
        the gradients of what it received and sent among it."""

    def _of_stage(self, run: Run, receives: bool, sends: bool) -> tuple[int, int, int]:
        """Bytes that a forward pass of a stage keeps, that are kept between the halves of a
        backward pass, and that are added to them for a while."""
        costs, layout = self.costs, self.costs.layout
        in_parts = receives and layout.cuts_messages(costs.config.model.context_length)
        # What was sent, and what was received in parts; as a whole it is the first block's.
        kept = costs.stage(run) + costs.message * (sends + in_parts)
        split = 0
        if layout.splits_backward:
            split = costs.between_backward_halves(run) + costs.message * (receives + sends)
        extra = costs.recomputing(run), costs.attending(run), costs.loss(run)
        return kept, split, max(*extra, costs.multiplying(run))

    def peaks(self, under_way: UnderWay) -> tuple[int, int]:
        """Peak bytes, and the peak once there are gradients, after the first backward pass; with
        what one block needs that is computed again, and what the loss needs."""
        ever, later = under_way.peaks(self.of_passes)
        return ever + self.at_once, later + self.at_once if later else 0

    def received(self, waiting: int) -> int:
        """Bytes of a pipeline's messages under way: those that wait, the gradient that a backward
        pass makes to be sent, and the one sent before by each stage."""
        n_sending = sum(number > 0 for number in self.numbers)
        return self.costs.message * (waiting + n_sending + (n_sending > 0))


class _RankMemory:
    """The memory of such a process, and what of it follows from its parameters alone."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[range],
        place: int,
        sizes: StepSizes,
    ) -> None:
        """Of `sizes` the bytes of numbers count, and whether a step has several micro-batches."""
        self.layout = layout
        self.rules = LayoutRules(layout)
        self.sizes = sizes
        self.has_tied_head = config.model.tied_head
        self.element_bytes = sizes.element_bytes
        self.product_bytes = sizes.product_bytes
        self.accumulates = sizes.n_micro_batches > 1
        numbered = dict(stage_tables(config, layout, stages, place))
        self.tables = list(numbered.values())
        self.has_first, self.has_last = 0 in numbered, layout.n_stages - 1 in numbered
        self.specs = [spec for table in self.tables for spec in table]
        self.trained = [spec for spec in self.specs if spec.is_trained]
        self.activations_bytes = self.later_activations_bytes = 0
        self.weights_bytes = self.element_bytes * sum(map(self.elements, self.specs))
        self.optimizer_bytes = self.element_bytes * sum(
            self.elements(spec) * optimizer_slots(config.optimizer, spec) for spec in self.trained
        )

    def memory(self, activations: int, later_activations: int, received: int) -> Memory:
        """The bytes of this process, at these peaks of activations and with so many bytes of
        messages under way."""
        self.activations_bytes, self.later_activations_bytes = activations, later_activations
        points = list(self.with_fsdp() if self.rules.data_sum == "fsdp" else self.with_copies())
        gradients = self.gradients_bytes
        peak = max(point.state_bytes + received + point.activations_bytes for point in points)
        return Memory(
            weights_bytes=self.weights_bytes,
            gradients_bytes=gradients,
            optimizer_bytes=self.optimizer_bytes,
            gathered_bytes=max(point.state_bytes for point in points) - gradients,
            received_bytes=received,
            activations_bytes=activations,
            total_bytes=self.weights_bytes + self.optimizer_bytes + round(peak),
        )

    def elements(self, spec: ParameterSpec) -> int:
        """Numbers of a parameter that stay here."""
        local = self.layout.parameter_shape(spec.shape, spec.axes)
        return shard_elements(local, self.layout.shard, 0)

    def whole_elements(self, spec: ParameterSpec) -> int:
        """Numbers of a parameter that are here while it is gathered from its shards."""
        return math.prod(self.layout.parameter_shape(spec.shape, spec.axes))

    def padded_elements(self, specs: Sequence[ParameterSpec]) -> int:
        """Numbers of parameters as they are gathered, shards padded to the largest."""
        shapes = [self.layout.parameter_shape(spec.shape, spec.axes) for spec in specs]
        return sum(gathered_elements(shape, self.layout.shard) for shape in shapes)

    @cached_property
    def gradients_bytes(self) -> int:
        """Bytes of gradients held from one micro-batch to the next, or to the optimizer's step."""
        whole = self.rules.keeps_whole_gradients(self.sizes.n_micro_batches)
        elements = self.whole_elements if whole else self.elements
        return self.element_bytes * sum(map(elements, self.trained))

    @property
    def adds_whole(self) -> bool:
        """Whether micro-batches add up whole gradients."""
        return self.accumulates and not self.rules.reduces_each_micro_batch

    def head_gradient_bytes(self) -> int:
        """Bytes of the gradient of the head's weight, the first of a backward pass."""
        head = "token_embedding.weight" if self.has_tied_head else "head.weight"
        specs = [spec for spec in self.trained if spec.name == head and self.has_last]
        return self.element_bytes * sum(self.whole_elements(spec) for spec in specs)

    def embedding_gradient_bytes(self) -> int:
        """Extra bytes at the end of backward: the embedding's gradient, before it is added to what
        is there."""
        if not self.has_first or not self.specs[0].is_trained:
            return 0
        fresh = self.element_bytes * self.whole_elements(self.specs[0])
        if self.has_tied_head and self.has_last:
            return 2 * fresh  # it, and its sum with the head's
        return fresh if self.accumulates else 0

    def kept_head_gradient_bytes(self) -> int:
        """Bytes of a tied head's gradient, which waits for the embedding's before both are added
        to what is there."""
        both = self.has_tied_head and self.has_first and self.has_last
        return self.head_gradient_bytes() if both else 0

    # -- points of a step -----------------------------------------------------------------------

    def with_copies(self) -> Iterator[_Snapshot]:
        """The points of a step without ZeRO. DDP holds buckets for all gradients from the start,
        where micro-batches add theirs up."""
        data_sum, whole = self.rules.data_sum, self.gradients_bytes
        rounded = self.rounded_bytes
        split = self.split_gradient_bytes
        in_buckets = whole if data_sum == "ddp" else 0
        added = whole if self.accumulates and not in_buckets else 0
        head = self.head_gradient_bytes()
        yield _Snapshot(rounded + in_buckets + head, self.activations_bytes)
        if self.accumulates:
            held = rounded + split + in_buckets + added
            yield _Snapshot(held + head, self.later_activations_bytes)
        kept = self.kept_head_gradient_bytes() if in_buckets + added else 0
        held = rounded + split + max(whole, in_buckets + added)
        yield _Snapshot(held + kept + self.embedding_gradient_bytes())
        if data_sum == "after_backward":
            yield _Snapshot(rounded + whole + min(whole, SUM_BUCKET_BYTES))

    @cached_property
    def rounded_bytes(self) -> int:
        """Bytes of the weights that stay rounded for all micro-batches, without ZeRO."""
        return sum(map(self.rounded_bytes_of, self.tables))

    @cached_property
    def split_gradient_bytes(self) -> int:
        """Bytes of the rounded gradients of a stage, all of which the second half of a split
        backward pass makes before they are added up."""
        if not self.layout.splits_backward:
            return 0
        return max(map(self.rounded_bytes_of, self.tables))

    def rounded_bytes_of(self, table: Sequence[ParameterSpec]) -> int:
        """The same of a stage's weights."""
        rounds_once = self.rules.rounds_once(self.sizes.n_micro_batches)
        if not rounds_once or self.product_bytes == self.element_bytes:
            return 0
        return self.product_bytes * sum(
            self.whole_elements(spec)
            for name, specs in units(table).items()
            for spec in specs
            if is_rounded(name)
        )

    @cached_property
    def units(self) -> tuple[list[_FsdpUnit], _FsdpUnit]:
        """FSDP's units in the blocks, in the order in which they run, and the root unit."""
        blocks: list[_FsdpUnit] = []
        roots: list[_FsdpUnit] = []
        for table in self.tables:
            for name, specs in units(table).items():
                e = self.element_bytes
                p = self.product_bytes if is_rounded(name) else e
                trained = [spec for spec in specs if spec.is_trained]
                whole = [self.whole_elements(spec) for spec in trained]
                gathered, padded = map(self.padded_elements, (specs, trained))
                unit = _FsdpUnit(
                    gathered=p * gathered,
                    fresh=p * sum(whole),
                    largest=p * max(whole, default=0),
                    whole=e * sum(whole),
                    padded=e * padded,
                    shard=e * padded // self.layout.shard,
                )
                (roots if name == ROOT else blocks).append(unit)
        return blocks, _FsdpUnit(
            *(sum(values) for values in zip(*map(astuple, roots), strict=True))
        )

    def with_fsdp(self) -> Iterator[_Snapshot]:
        """The points of a step with ZeRO: the units gathered, and the gradients on their way to
        shards, in the last micro-batch of the step."""
        if self.layout.pipeline > 1:
            yield from self.with_fsdp_in_pipeline()
            return
        blocks, root = self.units
        every = [*blocks, root]
        adds_whole = self.adds_whole
        here = 0  # gradients of the micro-batches before
        if self.accumulates:
            here = sum(unit.whole if adds_whole else unit.shard for unit in every)
        # What was sent to be reduced is kept until the next reduction, in the next micro-batch too.
        reduced = root.padded if self.accumulates and not adds_whole else 0
        yield from self.gathering(blocks, root, here + reduced)
        yield from self.reducing(blocks, root, here, reduced)
        yield _Snapshot(sum(unit.shard for unit in every))

    def gathering(self, blocks: list[_FsdpUnit], root: _FsdpUnit, here: int) -> Iterator[_Snapshot]:
        """The points of a forward pass. What a unit was gathered in is kept until the next one is
        there, and with prefetching the next one comes while it computes."""
        each = self.activations_bytes / len(blocks)
        gathered = root.gathered
        for index, unit in enumerate(blocks):
            ahead = blocks[index + 1 : index + 2] if self.rules.prefetches_weights else []
            arriving = unit.gathered + sum(later.gathered for later in ahead)
            yield _Snapshot(here + gathered + unit.gathered + arriving, (index + 1) * each)
            if self.rules.weights_stay_gathered:
                gathered += unit.gathered
        if not self.rules.weights_stay_gathered:  # for the backward pass
            yield _Snapshot(here + 2 * root.gathered, self.activations_bytes)

    def reducing(
        self, blocks: list[_FsdpUnit], root: _FsdpUnit, here: int, reduced: int
    ) -> Iterator[_Snapshot]:
        """The points of a backward pass. Each unit is freed, and its gradients copied to be
        reduced, when all of them are there; the root, whose first gradients are the head's, at
        the end."""
        adds_whole = self.adds_whole
        each = self.activations_bytes / len(blocks)
        head = self.head_gradient_bytes()
        gathered = root.gathered
        if self.rules.weights_stay_gathered:
            gathered += sum(unit.gathered for unit in blocks)
        for index, unit in reversed(list(enumerate(blocks))):
            ahead = 0
            if not self.rules.weights_stay_gathered:
                gathered += unit.gathered
                ahead = blocks[index - 1].gathered if index else 0
            held = here + gathered + ahead + head
            yield _Snapshot(held + self.arriving(unit) + reduced, (index + 1) * each)
            gathered -= unit.gathered
            held += (0 if adds_whole else unit.fresh) - unit.gathered
            yield _Snapshot(held + unit.padded + unit.shard, index * each)
            reduced = unit.padded
            if adds_whole:
                here += unit.shard - unit.whole
            elif not self.accumulates:
                here += unit.shard
        fresh = self.kept_head_gradient_bytes() if adds_whole else root.fresh
        yield _Snapshot(here + gathered + fresh + self.embedding_gradient_bytes() + reduced)
        yield _Snapshot(here + (0 if adds_whole else fresh) + root.padded + root.shard)

    def arriving(self, unit: _FsdpUnit) -> int:
        """Bytes of a unit's gradients when its backward pass is through, beside those that are
        added up in place, one parameter after another, where both are in the same dtype."""
        return unit.largest if self.adds_whole and unit.fresh == unit.whole else unit.fresh

    def with_fsdp_in_pipeline(self) -> Iterator[_Snapshot]:
        """The points of a pipeline's step: units stay gathered, and gradients whole, to its end."""
        blocks, root = self.units
        every = [*blocks, root]
        gathered = sum(unit.gathered for unit in every)
        whole = sum(unit.whole for unit in every)
        fresh = max(map(self.arriving, blocks))
        head = self.head_gradient_bytes()
        yield _Snapshot(gathered + fresh + head, self.activations_bytes)
        yield _Snapshot(gathered + whole + fresh + head, self.later_activations_bytes)
        yield _Snapshot(gathered + whole + self.embedding_gradient_bytes())
        for unit in every:
            yield _Snapshot(gathered - unit.gathered + whole + unit.padded + unit.shard)
