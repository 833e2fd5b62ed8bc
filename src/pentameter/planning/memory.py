"""Bytes that each process holds: weights, gradients, optimizer, what it gathers, activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pentameter.config.choices import look_up
from pentameter.config.schema import Config
from pentameter.planning.activations import kept_activations_bytes
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.layout import Layout
from pentameter.planning.optimizer import optimizer_slots
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import (
    ROOT,
    gathered_elements,
    shard_elements,
    stage_tables,
    tensor_part,
    units,
)
from pentameter.planning.sizes import step_sizes
from pentameter.planning.timeline import Pass, pass_order
from pentameter.planning.traffic import SUM_BUCKET_BYTES


@dataclass(frozen=True)
class Memory:
    """The fullest process's, in a step after the first one, which makes the optimizer's state.

    With `train.offload` weights, gradients and optimizer lie in the machine's memory, the rest in
    the device's.
    """

    weights_bytes: int
    gradients_bytes: int
    """The most that are held from one micro-batch to the next, or to the optimizer's step."""
    optimizer_bytes: int
    gathered_bytes: int
    """Beyond these, when it is fullest: weights gathered from shards, or rounded for products, and
    what is on its way between processes."""
    received_bytes: int
    """Room for what stages of a pipeline receive: PyTorch keeps it for every micro-batch."""
    activations_bytes: int
    """What the forward passes under way have kept for their backward passes, at the most."""
    total_bytes: int
    """When it is fullest: less than the sum where gradients take the place of activations."""

    @property
    def state_bytes(self) -> int:
        """All but the activations."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.gathered_bytes
            + self.received_bytes
        )


def step_memory(
    config: Config, layout: Layout, stages: Sequence[range], precision: str | None = None
) -> Memory:
    """What the fullest process holds in a step of a resolved configuration.

    `precision` is that of the run where the configuration leaves it open; without it products are
    taken to be in full precision. The first of the processes that share tensors or shards holds
    the largest parts. Muon's work on a matrix is left out.
    """
    passes = pass_order(layout, _enough_micro_batches(config, layout))
    each = (
        _Process(config, layout, stages, place, passes[place], precision).memory()
        for place in range(layout.pipeline)
    )
    return max(each, key=lambda memory: memory.total_bytes)


REPEATS = {"gpipe": False, "1f1b": True, "interleaved": True, "zero-bubble": True}
"""`parallel.schedule` → whether its passes repeat once the pipeline is full."""


def _enough_micro_batches(config: Config, layout: Layout) -> int:
    """Micro-batches of a step, or so many that more do not keep more under way at a time: but for
    GPipe's, a pipeline's passes repeat once it is full."""
    n_micro_batches = step_sizes(config, layout).n_micro_batches
    several_rounds = 4 * layout.pipeline
    repeats = look_up(REPEATS, layout.schedule, "parallel.schedule", "the planner's memory")
    if not repeats or n_micro_batches % several_rounds:
        return n_micro_batches
    return several_rounds


@dataclass(frozen=True)
class _Unit:
    """Parameters that are gathered and reduced together, in bytes."""

    gathered: int
    """Whole, as the products read them."""
    fresh: int
    """Their whole gradients as the backward pass makes them,"""
    largest: int
    """of the largest parameter alone;"""
    whole: int
    """as they are added up,"""
    padded: int
    """and as they are reduced."""
    shard: int
    """The part of the gradients that stays here."""


@dataclass(frozen=True)
class _Moment:
    """What is held beside weights and optimizer: state, and activations."""

    state_bytes: int
    activations_bytes: float = 0.0


class _Process:
    """The process at a place of the pipeline, and first along every other dimension."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[range],
        place: int,
        passes: Sequence[Pass],
        precision: str | None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.rules = LayoutRules(layout)
        self.sizes = step_sizes(config, layout, precision)
        self.element_bytes = self.sizes.element_bytes
        self.product_bytes = self.sizes.product_bytes
        self.accumulates = self.sizes.n_micro_batches > 1
        numbered = dict(stage_tables(config.model, layout, stages, place))
        self.tables, self.numbers = list(numbered.values()), list(numbered)
        self.has_first, self.has_last = 0 in numbered, layout.n_stages - 1 in numbered
        self.specs = [spec for table in self.tables for spec in table]
        self.activations_bytes, self.later_activations_bytes = kept_activations_bytes(
            config, layout, stages, passes, self.sizes
        )

    def elements(self, spec: ParameterSpec) -> int:
        """Numbers of a parameter that stay here."""
        return shard_elements(tensor_part(spec, self.layout.tensor), self.layout.shard, 0)

    def memory(self) -> Memory:
        weights = self.element_bytes * sum(self.elements(spec) for spec in self.specs)
        optimizer = self.element_bytes * sum(
            self.elements(spec) * optimizer_slots(self.config.optimizer, spec)
            for spec in self.specs
        )
        held = self.received_bytes()
        moments = [
            _Moment(moment.state_bytes + held, moment.activations_bytes)
            for moment in (self.sharded() if self.rules.data_sum == "fsdp" else self.copied())
        ]
        gradients = self.gradients_bytes()
        most = max(moment.state_bytes for moment in moments)
        total = max(m.state_bytes + m.activations_bytes for m in moments)
        return Memory(
            weights_bytes=weights,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            gathered_bytes=most - gradients - held,
            received_bytes=held,
            activations_bytes=self.activations_bytes,
            total_bytes=weights + optimizer + round(total),
        )

    def received_bytes(self) -> int:
        """Of what comes from other stages: for each micro-batch of a step there is room for the
        stream and for the gradient of what was sent, and the stream's own gradient stays there."""
        if self.layout.pipeline == 1:
            return 0
        model = self.config.model
        part = self.layout.tensor if self.layout.sequence else 1
        n_tokens = self.sizes.n_rows * model.context_length
        last = self.layout.n_stages - 1
        n = sum(2 * (stage > 0) + (stage < last) for stage in self.numbers)
        return n * n_tokens * model.d_model // part * self.element_bytes

    def gradients_bytes(self) -> int:
        """Shards from ZeRO 2 on, but in a pipeline, which reduces them at the end of the step; and
        with ZeRO 1 where no micro-batch but the last one leaves any."""
        whole = self.rules.keeps_whole_gradients(self.sizes.n_micro_batches)
        elements = self.whole_elements if whole else self.elements
        return self.element_bytes * sum(map(elements, self.specs))

    @property
    def adds_whole(self) -> bool:
        """Whether micro-batches add up whole gradients."""
        return self.accumulates and not self.rules.reduces_each_micro_batch

    def whole_elements(self, spec: ParameterSpec) -> int:
        return shard_elements(tensor_part(spec, self.layout.tensor), 1, 0)

    def head_gradient_bytes(self) -> int:
        """Of the head's weight, which has its gradient before all others."""
        head = "token_embedding.weight" if self.config.model.tied_head else "head.weight"
        specs = [spec for spec in self.specs if spec.name == head and self.has_last]
        return self.element_bytes * sum(self.whole_elements(spec) for spec in specs)

    def embedding_gradient_bytes(self) -> int:
        """Of the embedding, when its gradient comes, last of all, beside what is counted as the
        gradients: DTensor makes it whole for a part of the vocabulary too."""
        if not self.has_first:
            return 0
        part = self.element_bytes * self.whole_elements(self.specs[0])
        whole = self.element_bytes * self.specs[0].n_elements
        if self.config.model.tied_head and self.has_last:
            return whole + part * (1 if whole == part else 2)  # it, and the sum with the head's
        return whole - part + (whole if self.accumulates else 0)

    def kept_head_gradient_bytes(self) -> int:
        """Of a tied head, which waits for the embedding's before it is added to what is there."""
        both = self.config.model.tied_head and self.has_first and self.has_last
        return self.head_gradient_bytes() if both else 0

    def copied(self) -> Iterator[_Moment]:
        """Without ZeRO. DDP has room for all gradients from the start, where micro-batches add
        theirs up."""
        data_sum, whole = self.rules.data_sum, self.gradients_bytes()
        in_buckets = whole if data_sum == "ddp" else 0
        added = whole if self.accumulates and not in_buckets else 0
        head = self.head_gradient_bytes()
        yield _Moment(in_buckets + head, self.activations_bytes)
        if self.accumulates:
            yield _Moment(in_buckets + added + head, self.later_activations_bytes)
        kept = self.kept_head_gradient_bytes() if in_buckets + added else 0
        held = max(whole, in_buckets + added)
        yield _Moment(held + kept + self.embedding_gradient_bytes())
        if data_sum == "after_backward":
            yield _Moment(whole + min(whole, SUM_BUCKET_BYTES))

    def units(self) -> tuple[list[_Unit], _Unit]:
        """Those of blocks in the order in which they run, and the rest."""
        blocks: list[_Unit] = []
        rest: list[_Unit] = []
        for table in self.tables:
            for name, specs in units(table).items():
                p = self.element_bytes if name == ROOT else self.product_bytes
                shard = self.layout.shard
                shapes = [tensor_part(spec, self.layout.tensor) for spec in specs]
                padded = sum(gathered_elements(shape, shard) for shape in shapes)
                whole = sum(self.whole_elements(spec) for spec in specs)
                e = self.element_bytes
                largest = p * max(self.whole_elements(spec) for spec in specs)
                unit = _Unit(
                    p * padded, p * whole, largest, e * whole, e * padded, e * padded // shard
                )
                (rest if name == ROOT else blocks).append(unit)
        return blocks, _Unit(*(sum(values) for values in zip(*map(_fields, rest), strict=True)))

    def sharded(self) -> Iterator[_Moment]:
        """With ZeRO: the units gathered, and the gradients on their way to shards, in the last
        micro-batch of a step."""
        if self.layout.pipeline > 1:
            yield from self.sharded_in_pipeline()
            return
        blocks, root = self.units()
        every = [*blocks, root]
        adds_whole = self.adds_whole
        here = 0  # gradients of the micro-batches before
        if self.accumulates:
            here = sum(unit.whole if adds_whole else unit.shard for unit in every)
        # What was sent to be reduced is kept until the next reduction, in the next micro-batch too.
        reduced = root.padded if self.accumulates and not adds_whole else 0
        yield from self.gathering(blocks, root, here + reduced)
        yield from self.reducing(blocks, root, here, reduced)
        yield _Moment(sum(unit.shard for unit in every))

    def gathering(self, blocks: list[_Unit], root: _Unit, here: int) -> Iterator[_Moment]:
        """The forward pass. What a unit was gathered in is kept until the next one is there, and
        with ZeRO 3 the next one comes while it computes."""
        each = self.activations_bytes / len(blocks)
        gathered = root.gathered
        for index, unit in enumerate(blocks):
            ahead = blocks[index + 1 : index + 2] if self.rules.prefetches_weights else []
            arriving = unit.gathered + sum(later.gathered for later in ahead)
            yield _Moment(here + gathered + unit.gathered + arriving, (index + 1) * each)
            if self.rules.weights_stay_gathered:
                gathered += unit.gathered
        if not self.rules.weights_stay_gathered:  # for the backward pass
            yield _Moment(here + 2 * root.gathered, self.activations_bytes)

    def reducing(
        self, blocks: list[_Unit], root: _Unit, here: int, reduced: int
    ) -> Iterator[_Moment]:
        """The backward pass. Each unit is freed, and its gradients copied to be reduced, when all
        of them are there; the rest, whose first gradients are the head's, at the end."""
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
            yield _Moment(held + self.arriving(unit) + reduced, (index + 1) * each)
            gathered -= unit.gathered
            held += (0 if adds_whole else unit.fresh) - unit.gathered
            yield _Moment(held + unit.padded + unit.shard, index * each)
            reduced = unit.padded
            if adds_whole:
                here += unit.shard - unit.whole
            elif not self.accumulates:
                here += unit.shard
        fresh = self.kept_head_gradient_bytes() if adds_whole else root.fresh
        yield _Moment(here + gathered + fresh + self.embedding_gradient_bytes() + reduced)
        yield _Moment(here + (0 if adds_whole else fresh) + root.padded + root.shard)

    def arriving(self, unit: _Unit) -> int:
        """Gradients of a unit when its backward pass is through, beside those that are added up
        in place, one parameter after another, where both are in the same dtype."""
        return unit.largest if self.adds_whole and unit.fresh == unit.whole else unit.fresh

    def sharded_in_pipeline(self) -> Iterator[_Moment]:
        """All units stay gathered, and gradients whole, to the end of the step."""
        blocks, root = self.units()
        every = [*blocks, root]
        gathered = sum(unit.gathered for unit in every)
        whole = sum(unit.whole for unit in every)
        fresh = max(map(self.arriving, blocks))
        head = self.head_gradient_bytes()
        yield _Moment(gathered + fresh + head, self.activations_bytes)
        yield _Moment(gathered + whole + fresh + head, self.later_activations_bytes)
        yield _Moment(gathered + whole + self.embedding_gradient_bytes())
        for unit in every:
            yield _Moment(gathered - unit.gathered + whole + unit.padded + unit.shard)


def _fields(unit: _Unit) -> tuple[int, ...]:
    return unit.gathered, unit.fresh, unit.largest, unit.whole, unit.padded, unit.shard
