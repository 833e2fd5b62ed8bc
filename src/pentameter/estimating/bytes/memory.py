"""Peak memory per rank, in bytes: weights, gradients, optimizer state, gathered weights,
activations."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from pentameter.config.choices import MOMENTS, look_up
from pentameter.config.schema import OptimizerConfig
from pentameter.estimating.bytes.costs import ActivationBytes, Step
from pentameter.estimating.bytes.stages import (
    ROOT,
    alike_stages,
    is_rounded,
    stage_kind,
    stage_tables,
    units,
)
from pentameter.estimating.seconds.timeline import UnderWay, passes_under_way, waiting_messages
from pentameter.planning.adapters import Run, run_operations
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.buckets import SUM_BUCKET_BYTES


@dataclass(frozen=True)
class StateBytes:
    """Bytes for weights, gradients and optimizer state on the rank that holds the most."""

    weights_bytes: int
    gradients_bytes: int
    """The most bytes of gradients held from one micro-batch to the next, or to the optimizer's
    step."""
    optimizer_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes for weights, gradients and optimizer state together."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Upper bound on the host memory for a rank's copy of its weights and optimizer state,
        while a checkpoint is written during training. It is an upper bound because ranks that hold
        replicas each copy only a fraction of them."""
        return self.weights_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Memory(StateBytes):
    """Bytes by component on the rank that needs the most, in any step after the first, which
    allocates the optimizer state. With `train.offload`, weights, gradients' shards and optimizer
    state are in host memory, the rest in device memory."""

    gathered_bytes: int
    """Additional bytes at the peak: weights that are gathered from shards or rounded for matmuls,
    and communication buffers in flight."""
    received_bytes: int
    """Bytes in pipeline messages: received activations and gradients that no pass has read yet, and
    gradients being sent. A received activation that has been read counts as an activation."""
    activations_bytes: int
    """The most bytes that forward passes have saved at one time for backward passes that are still
    to come."""
    total_bytes: int
    """The peak, which is less than the sum if gradients reuse the memory freed by activations."""
    device_bytes: int
    """The peak in device memory: `total_bytes`, unless there is `train.offload`."""


def step_memory(step: Step, *, known: dict[object, _RankMemory] | None = None) -> Memory:
    """Return the Memory in a step on the rank that needs the most, estimated from shapes. Attention
    dropout is assumed to write out the attention weights, unless `step.drops_by_blocks`. Of ranks
    that shard the same tensors, only the first is computed, which holds the largest shards. Muon's
    workspace for a matrix is left out.

    known: a dict kept by the caller, which caches what depends on parameters alone, for calls with
        the same model, optimizer and precision. None caches nothing.
    """
    layout, n_micro_batches = step.layout, step.n_micro_batches
    under_way = passes_under_way(layout, n_micro_batches)
    waiting = waiting_messages(layout, n_micro_batches)
    known = {} if known is None else known
    found = []
    for coordinates in alike_stages(step.config.model, layout, step.stages):
        key = layout, coordinates[0], n_micro_batches > 1
        if key not in known:
            known[key] = _RankMemory(step, coordinates[0])
        held = _RankActivations(step, coordinates[0])
        peaks = {
            (*held.peaks(under_way[each]), held.received(waiting[each])) for each in coordinates
        }
        found += [known[key].memory(*most) for most in _largest(peaks)]
    return max(found, key=lambda memory: memory.device_bytes)


def _largest(peaks: set[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return those tuples that no other tuple equals or exceeds in every component. Only they can
    give the peak."""
    return [
        one
        for one in peaks
        if not any(other != one and all(map(operator.ge, other, one)) for other in peaks)
    ]


def state_bytes(step: Step, tables: Sequence[Sequence[ParameterSpec]]) -> StateBytes:
    """Return the fullest rank's bytes for weights, gradients and optimizer state, estimated from
    the parameters' shapes. Frozen parameters have weights alone. `tables` lists each pipeline
    stage's parameters; one in several stages is counted once per rank."""
    layout, sharding, optimizers = step.layout, step.sharding, step.config.optimizer
    whole_gradients = step.rules.keeps_whole_gradients(step.n_micro_batches)

    def on_rank(coordinate: int) -> StateBytes:
        weights = gradients = optimizer = 0
        numbers = layout.stages_of(coordinate)
        specs = {spec.name: spec for number in numbers for spec in tables[number]}
        for spec in specs.values():
            local = sharding.parameter_shape(spec)
            n_local = sharding.zero_elements(spec)
            weights += n_local
            if not spec.is_trained:
                continue
            gradients += math.prod(local) if whole_gradients else n_local
            optimizer += n_local * optimizer_slots(optimizers, spec)
        e = step.element_bytes
        return StateBytes(e * weights, e * gradients, e * optimizer)

    ranks = map(on_rank, range(layout.pipeline))
    return max(ranks, key=lambda held: held.state_bytes)


def optimizer_slots(optimizer: OptimizerConfig, spec: ParameterSpec) -> int:
    """Return how many elements of state the optimizer keeps per element of a parameter: 2 for AdamW
    and Adam; 1 for SGD with momentum, 0 without; for Muon 1 in a matrix within a block, else 2. The
    configuration must be resolved."""
    if optimizer.name == "sgd" and not optimizer.momentum:
        return 0
    if optimizer.name == "muon" and spec.is_orthogonalized:
        return 1
    return look_up(MOMENTS, optimizer.name, "optimizer.name", "the planner's memory")


@dataclass(frozen=True)
class _FsdpUnit:
    """Bytes that one rank holds of an FSDP unit, a group of parameters that are gathered and
    reduced together: the gathered weights, the gradients, and this rank's shard of these."""

    gathered: int
    """Unsharded parameters in the dtype that they are gathered in, shards padded to the largest."""
    fresh: int
    """Unsharded gradients of one backward pass, in the dtype that it computes."""
    largest: int
    """The fresh gradient of the largest parameter."""
    whole: int
    """Unsharded gradients in the dtype in which micro-batches accumulate them."""
    padded: int
    """Unsharded gradients as they are reduce-scattered, shards padded to the largest."""
    shard: int
    """This rank's shard of the gradients."""


@dataclass(frozen=True)
class _Snapshot:
    """Bytes that a rank holds at one moment of a step, beyond weights and optimizer state:
    `state_bytes` for gradients, gathered weights and buffers, the other field for activations."""

    state_bytes: int
    activations_bytes: float = 0.0


def _peak(points: Iterable[_Snapshot], received: int) -> int:
    """Return the most bytes that are held at any of these moments, counting the buffers of
    `received` pipeline messages' bytes, too."""
    return round(max(point.state_bytes + received + point.activations_bytes for point in points))


class _RankActivations:
    """Computes the bytes of activations on one rank, given by its `pipeline` coordinate; its
    coordinates along other mesh dimensions are 0."""

    def __init__(self, step: Step, coordinate: int) -> None:
        self.costs = ActivationBytes(step)
        config, layout, stages = step.config, step.layout, step.stages
        self.numbers = layout.stages_of(coordinate)
        last = layout.n_stages - 1
        known: dict[object, tuple[int, int, int]] = {}
        found = []
        for number in self.numbers:
            kind = stage_kind(config.model, stages[number])
            if kind not in known:
                run = run_operations(config.model, config.lora, stages[number])
                known[kind] = self._of_stage(run, number > 0, number < last)
            found.append(known[kind])
        kept, split, at_once = zip(*found, strict=True)
        self.at_once = max(at_once)
        self.of_passes = [*kept, *split]
        """Bytes per pass in flight, in the order of an UnderWay's columns: per stage, the tensors
        saved by its forward pass until the backward pass is done; then per stage, those held
        between the two halves of a split backward pass, among them the gradients received and
        sent."""

    def _of_stage(self, run: Run, receives: bool, sends: bool) -> tuple[int, int, int]:
        """Return three byte counts for a stage: saved by its forward pass, held between the two
        halves of a split backward pass (0 if not split), and temporary at the peak. `receives` and
        `sends` say whether another stage precedes and follows."""
        costs, step = self.costs, self.costs.step
        in_shards = receives and step.sharding.shards_messages(step.config.model.context_length)
        # The stage keeps sent activations and received shards; the gathered input counts with the
        # first block.
        kept = costs.stage(run) + costs.message * (sends + in_shards)
        split = 0
        if step.layout.splits_backward:
            split = costs.between_backward_halves(run) + costs.message * (receives + sends)
        extra = costs.recomputing(run), costs.attending(run), costs.loss(run)
        return kept, split, max(*extra, costs.multiplying(run))

    def peaks(self, under_way: UnderWay) -> tuple[int, int]:
        """Return (peak activation bytes over the step, peak after the first backward pass, when
        gradients exist). The second is 0 if nothing is in flight then. Both include the temporary
        bytes for recomputing one block and for the loss. `under_way` counts this rank's passes in
        flight at each moment."""
        ever, later = under_way.peaks(self.of_passes)
        return ever + self.at_once, later + self.at_once if later else 0

    def received(self, waiting: int) -> int:
        """Return the bytes in pipeline messages on this rank: `waiting` messages received and not
        yet read, for each stage after the first the gradient that was sent last, and the gradient
        being computed."""
        n_sending = sum(number > 0 for number in self.numbers)
        return self.costs.message * (waiting + n_sending + (n_sending > 0))


class _RankMemory:
    """Computes the memory that one rank needs, given by its `pipeline` coordinate; its coordinates
    along other mesh dimensions are 0. Whatever follows from its parameters alone is computed
    once."""

    def __init__(self, step: Step, coordinate: int) -> None:
        """Prepare to compute the memory of one rank.

        step: what is planned for one training step.
        coordinate: the rank's index along the pipeline.

        The object can be used again for a `step` with another micro-batch size, unless one of the
        two has a single micro-batch and the other several.
        """
        self.step = step
        config, layout = step.config, step.layout
        self.has_tied_head = config.model.tied_head
        self.element_bytes = step.element_bytes
        self.product_bytes = step.product_bytes
        self.accumulates = step.n_micro_batches > 1
        numbered = dict(stage_tables(config, layout, step.stages, coordinate))
        self.tables = list(numbered.values())
        self.has_first, self.has_last = 0 in numbered, layout.n_stages - 1 in numbered
        self.specs = [spec for table in self.tables for spec in table]
        self.trained = [spec for spec in self.specs if spec.is_trained]
        self.activations_bytes = self.later_activations_bytes = 0
        self.fsdp = _FsdpSnapshots(self)
        self.weights_bytes = self.element_bytes * sum(map(self.elements, self.specs))
        self.optimizer_bytes = self.element_bytes * sum(
            self.elements(spec) * optimizer_slots(config.optimizer, spec) for spec in self.trained
        )

    def memory(self, activations: int, later_activations: int, received: int) -> Memory:
        """Return this rank's Memory (bytes by component).

        activations: the peak of its activation bytes over the step.
        later_activations: the peak after the first backward pass, when gradients exist.
        received: bytes of pipeline messages that wait on this rank.
        """
        self.activations_bytes, self.later_activations_bytes = activations, later_activations
        points = list(
            self.fsdp.snapshots() if self.step.sharding.data_sum == "fsdp" else self.without_zero()
        )
        gradients = self.gradients_bytes
        total = self.weights_bytes + self.optimizer_bytes + _peak(points, received)
        device = total
        if self.step.config.train.offload:
            device = _peak(_FsdpSnapshots(self, offload=True).snapshots(), received)
        return Memory(
            weights_bytes=self.weights_bytes,
            gradients_bytes=gradients,
            optimizer_bytes=self.optimizer_bytes,
            gathered_bytes=max(point.state_bytes for point in points) - gradients,
            received_bytes=received,
            activations_bytes=activations,
            total_bytes=total,
            device_bytes=device,
        )

    def elements(self, spec: ParameterSpec) -> int:
        """Return how many of a parameter's elements this rank holds between steps: its shard with
        ZeRO."""
        return self.step.sharding.zero_elements(spec)

    def whole_elements(self, spec: ParameterSpec) -> int:
        """Return how many of a parameter's elements this rank holds while ZeRO's shards are
        gathered."""
        return math.prod(self.step.sharding.parameter_shape(spec))

    def padded_elements(self, specs: Sequence[ParameterSpec]) -> int:
        """Return the elements received when all-gathering these parameters from ZeRO's shards, each
        padded to the largest."""
        return sum(map(self.step.sharding.gathered_elements, specs))

    @cached_property
    def gradients_bytes(self) -> int:
        """Gradient bytes held from one micro-batch to the next, or to the optimizer's step:
        unsharded if `rules.keeps_whole_gradients` says so, else this rank's shards."""
        whole = self.step.rules.keeps_whole_gradients(self.step.n_micro_batches)
        elements = self.whole_elements if whole else self.elements
        return self.element_bytes * sum(map(elements, self.trained))

    def head_gradient_bytes(self) -> int:
        """Return the bytes for the head weight's gradient, the first that a backward pass computes;
        0 without the head on this rank."""
        head = "token_embedding.weight" if self.has_tied_head else "head.weight"
        specs = [spec for spec in self.trained if spec.name == head and self.has_last]
        return self.element_bytes * sum(self.whole_elements(spec) for spec in specs)

    def embedding_gradient_bytes(self) -> int:
        """Return the extra bytes at the end of the backward pass while the embedding's new gradient
        is added to another: the new one and the sum if the tied head is on this rank too; the new
        one alone with several micro-batches; 0 in all other cases."""
        if not self.has_first or not self.specs[0].is_trained:
            return 0
        fresh = self.element_bytes * self.whole_elements(self.specs[0])
        if self.has_tied_head and self.has_last:
            return 2 * fresh  # the gradient, and its sum with the head's
        return fresh if self.accumulates else 0

    def kept_head_gradient_bytes(self) -> int:
        """Return the bytes of a tied head's gradient, which is kept until the embedding's is
        computed and added. 0 unless both ends of the model are on this rank."""
        both = self.has_tied_head and self.has_first and self.has_last
        return self.head_gradient_bytes() if both else 0

    # -- snapshots of a step ----------------------------------------------------------------------

    def without_zero(self) -> Iterator[_Snapshot]:
        """Yield the live bytes (estimated, as a _Snapshot) at each moment in a step without ZeRO
        that may be the peak: the first backward pass, a later one if there are several
        micro-batches, the end of the last one, and the all-reduce after it. If micro-batches
        accumulate gradients, DDP holds buckets for all gradients from the start."""
        data_sum, whole = self.step.sharding.data_sum, self.gradients_bytes
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
        yield _Snapshot(rounded + whole + min(self.summed_bytes, SUM_BUCKET_BYTES))

    @cached_property
    def summed_bytes(self) -> int:
        """Bytes for the gradients that are summed over ranks after the backward pass."""
        placement = self.step.sharding.placement
        summed = [spec for spec in self.trained if placement(spec).summed_over]
        return self.element_bytes * sum(map(self.whole_elements, summed))

    @cached_property
    def rounded_bytes(self) -> int:
        """Bytes for weights in the matmul dtype that are kept for all micro-batches, without ZeRO;
        0 if each micro-batch rounds them anew, or if none need rounding."""
        return sum(map(self.rounded_bytes_of, self.tables))

    @cached_property
    def split_gradient_bytes(self) -> int:
        """Bytes for the largest stage's gradients in the matmul dtype: the second half of a split
        backward pass computes all of them before it accumulates any. 0 if the backward pass is not
        split."""
        if not self.step.layout.splits_backward:
            return 0
        return max(map(self.rounded_bytes_of, self.tables))

    def rounded_bytes_of(self, table: Sequence[ParameterSpec]) -> int:
        """Return the bytes for one stage's weights in the matmul dtype; 0 if these copies are not
        kept over micro-batches."""
        rounds_once = self.step.rules.rounds_once(self.step.n_micro_batches)
        if not rounds_once or self.product_bytes == self.element_bytes:
            return 0
        rounded = [specs for name, specs in units(table).items() if is_rounded(name)]
        return self.product_bytes * sum(map(self.whole_elements, itertools.chain(*rounded)))


class _FsdpSnapshots:
    """The moments of a rank's step with ZeRO at which memory may be at its peak: each unit's
    all-gather in the forward pass, its gradients and their reduction in the backward pass, and the
    step's end. Methods yield a _Snapshot of each: estimated bytes for gradients with gathered
    weights, and for activations, besides weights and optimizer state."""

    def __init__(self, rank: _RankMemory, *, offload: bool = False) -> None:
        """Prepare the moments of a step of `rank` under ZeRO. With `offload`, only device memory is
        counted, which a gradient's shard leaves as soon as it is reduced."""
        self.rank = rank
        self.offload = offload

    def kept(self, unit: _FsdpUnit) -> int:
        """Return the bytes of a unit's reduced gradients that stay on the device."""
        return 0 if self.offload else unit.shard

    @property
    def adds_whole(self) -> bool:
        """True if micro-batches add up gradients before they are sharded, so that they are reduced
        once per step: with several micro-batches, under ZeRO 1 or in a pipeline."""
        return self.rank.accumulates and not self.rank.step.rules.reduces_each_micro_batch

    @cached_property
    def units(self) -> tuple[list[_FsdpUnit], _FsdpUnit]:
        """FSDP's units in the blocks, in execution order, and the root unit (embeddings, last norm,
        head)."""
        blocks: list[_FsdpUnit] = []
        roots: list[_FsdpUnit] = []
        for table in self.rank.tables:
            for name, specs in units(table).items():
                e = self.rank.element_bytes
                p = self.rank.product_bytes if is_rounded(name) else e
                trained = [spec for spec in specs if spec.is_trained]
                whole = [self.rank.whole_elements(spec) for spec in trained]
                gathered, padded = map(self.rank.padded_elements, (specs, trained))
                n_shards = self.rank.step.sharding.n_zero_shards(specs[0]) if specs else 1
                unit = _FsdpUnit(
                    gathered=p * gathered,
                    fresh=p * sum(whole),
                    largest=p * max(whole, default=0),
                    whole=e * sum(whole),
                    padded=e * padded,
                    shard=e * padded // n_shards,
                )
                (roots if name == ROOT else blocks).append(unit)
        return blocks, _FsdpUnit(
            *(sum(values) for values in zip(*map(astuple, roots), strict=True))
        )

    def snapshots(self) -> Iterator[_Snapshot]:
        """Yield snapshots (bytes held at one moment, besides weights and optimizer state) of the
        step's last micro-batch with ZeRO, from gathering the weights to reducing the gradients; in
        a pipeline, those of the whole step."""
        if self.rank.step.layout.pipeline > 1:
            yield from self.in_pipeline()
            return
        blocks, root = self.units
        every = [*blocks, root]
        adds_whole = self.adds_whole
        accumulated = 0  # gradients from earlier micro-batches
        if self.rank.accumulates:
            accumulated = sum(unit.whole if adds_whole else self.kept(unit) for unit in every)
        # A reduction's input is kept until the next reduction, even across micro-batches.
        reduced = root.padded if self.rank.accumulates and not adds_whole else 0
        yield from self.gathering(blocks, root, accumulated + reduced)
        yield from self.reducing(blocks, root, accumulated, reduced)
        yield _Snapshot(sum(map(self.kept, every)))

    def gathering(
        self, blocks: list[_FsdpUnit], root: _FsdpUnit, accumulated: int
    ) -> Iterator[_Snapshot]:
        """Yield a snapshot (bytes held at one moment) for each unit in a forward pass. `blocks` are
        the units in execution order, `root` the one gathered throughout; `accumulated` bytes of
        gradients are held all the time. A unit's gather buffer is kept until the next one is
        available; with prefetching, the next unit is gathered while this one computes."""
        each = self.rank.activations_bytes / len(blocks)
        gathered = root.gathered
        for index, unit in enumerate(blocks):
            ahead = blocks[index + 1 : index + 2] if self.rank.step.rules.prefetches_weights else []
            arriving = unit.gathered + sum(later.gathered for later in ahead)
            yield _Snapshot(accumulated + gathered + unit.gathered + arriving, (index + 1) * each)
            if self.rank.step.rules.weights_stay_gathered:
                gathered += unit.gathered
        if not self.rank.step.rules.weights_stay_gathered:  # for the backward pass
            yield _Snapshot(accumulated + 2 * root.gathered, self.rank.activations_bytes)

    def reducing(
        self, blocks: list[_FsdpUnit], root: _FsdpUnit, accumulated: int, reduced: int
    ) -> Iterator[_Snapshot]:
        """Yield snapshots (bytes held at one moment) of a backward pass, two for each unit in
        `blocks` (execution order) and two for `root`. `accumulated` is gradient bytes from earlier
        micro-batches, `reduced` the previous reduction's input, which is kept. Once a unit's
        gradients are all computed, its weights are freed and the gradients are copied for
        reduction. The root, whose first gradients are the head's, follows at the end."""
        adds_whole = self.adds_whole
        each = self.rank.activations_bytes / len(blocks)
        head = self.rank.head_gradient_bytes()
        gathered = root.gathered
        if self.rank.step.rules.weights_stay_gathered:
            gathered += sum(unit.gathered for unit in blocks)
        for index, unit in reversed(list(enumerate(blocks))):
            ahead = 0
            if not self.rank.step.rules.weights_stay_gathered:
                gathered += unit.gathered
                ahead = blocks[index - 1].gathered if index else 0
            held = accumulated + gathered + ahead + head
            yield _Snapshot(held + self.arriving(unit) + reduced, (index + 1) * each)
            gathered -= unit.gathered
            held += (0 if adds_whole else unit.fresh) - unit.gathered
            yield _Snapshot(held + unit.padded + unit.shard, index * each)
            reduced = unit.padded
            if adds_whole:
                accumulated += self.kept(unit) - unit.whole
            elif not self.rank.accumulates:
                accumulated += self.kept(unit)
        fresh = self.rank.kept_head_gradient_bytes() if adds_whole else root.fresh
        yield _Snapshot(
            accumulated + gathered + fresh + self.rank.embedding_gradient_bytes() + reduced
        )
        yield _Snapshot(accumulated + (0 if adds_whole else fresh) + root.padded + root.shard)

    def arriving(self, unit: _FsdpUnit) -> int:
        """Return the bytes of the new gradients of `unit` at the end of its backward pass, beyond
        those accumulated before. If they are added in place, in the dtype in which they are
        computed, only the largest parameter's count, as each is freed once it is added."""
        return unit.largest if self.adds_whole and unit.fresh == unit.whole else unit.fresh

    def in_pipeline(self) -> Iterator[_Snapshot]:
        """Yield snapshots (bytes held at one moment) of a pipeline's step, in which all units stay
        gathered, and gradients unsharded, until its end."""
        blocks, root = self.units
        every = [*blocks, root]
        gathered = sum(unit.gathered for unit in every)
        whole = sum(unit.whole for unit in every)
        fresh = max(map(self.arriving, blocks))
        head = self.rank.head_gradient_bytes()
        yield _Snapshot(gathered + fresh + head, self.rank.activations_bytes)
        yield _Snapshot(gathered + whole + fresh + head, self.rank.later_activations_bytes)
        yield _Snapshot(gathered + whole + self.rank.embedding_gradient_bytes())
        for unit in every:
            yield _Snapshot(gathered - unit.gathered + whole + unit.padded + unit.shard)
