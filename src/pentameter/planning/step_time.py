"""The time of a step on a cluster: compute, bubble, exposed communication, optimizer.

A stage's passes take what their operations take (`compute_time.py`) and the collectives that they
wait for (`links.py`); a pipeline is simulated pass by pass from the lists that the run executes
(`timeline.py`). Beside compute run the gathers and reductions of ZeRO, DDP's buckets, a ring's
messages and a part of tensor parallelism's: they are exposed where they take longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pentameter.config.schema import Config
from pentameter.planning.cluster import Cluster
from pentameter.planning.compute_time import ComputeTime
from pentameter.planning.costs import ActivationBytes, PassSeconds, StepSizes, step_sizes
from pentameter.planning.layout import Layout
from pentameter.planning.links import Links
from pentameter.planning.memory import optimizer_slots
from pentameter.planning.rules import LayoutRules
from pentameter.planning.shares import alike_places, shard_elements, stage_tables
from pentameter.planning.timeline import PipelineTime, Span, pipeline_time
from pentameter.planning.traffic import (
    WORLD,
    Kind,
    StepTraffic,
    When,
    matrix_traffic,
    step_traffic,
)

FORWARD_SHARE = 1 / 3
"""Part of a layer's messages in its forward pass, of a grid's products and of divided time: each
product is one forward and two backward, and gradients are summed in float32."""
MOVES: Mapping[Kind, int] = {"all_gather": 1, "all_to_all": 2}
"""How often a tensor-parallel message's bytes are read or written beside its sending."""
IN_LAYERS = ("tensor", "row", "depth")
"""Dimensions of the mesh whose collectives every layer waits for."""


@dataclass(frozen=True)
class StepTime:
    """Where a step's time goes, in seconds; the parts add up to the whole."""

    seconds: float
    compute: float
    """Of the mean process of a pipeline, with what activation checkpointing computes again."""
    bubble: float
    """Idle time of the mean process of a pipeline."""
    exposed: dict[str, float]
    """Communication that compute waits for, by dimension of the mesh."""
    optimizer: float
    """The update, and the norm of the gradients."""
    hidden: dict[str, float]
    """Communication beside compute, by dimension."""
    pipeline: PipelineTime | None = field(default=None, repr=False)
    """The passes of the pipeline's processes; None without one."""

    @property
    def bubble_fraction(self) -> float:
        """Idle time ÷ busy time of the pipeline's processes; 0 without one."""
        return 0.0 if self.pipeline is None else self.bubble / (self.pipeline.length - self.bubble)

    @property
    def spans(self) -> Sequence[Sequence[Span]]:
        """The passes of the pipeline's processes: of the first rounds where there are many."""
        return [] if self.pipeline is None else self.pipeline.spans


def step_time(
    config: Config,
    layout: Layout,
    stages: Sequence[range],
    cluster: Cluster,
    precision: str,
    traffic: Sequence[StepTraffic] | None = None,
) -> StepTime:
    """The StepTime of a resolved configuration, in a precision of the products that the cluster's
    devices have; `traffic` is that of `traffic_of_places`, where it is known already."""
    traffic = traffic or traffic_of_places(config, layout, stages, precision)
    return _Step(config, layout, stages, cluster, precision, traffic).time()


def traffic_of_places(
    config: Config, layout: Layout, stages: Sequence[range], precision: str
) -> list[StepTraffic]:
    """What the first process at each place of the pipeline sends in a step; alike places are
    counted once."""
    found: dict[int, StepTraffic] = {}
    for places in alike_places(layout, stages):
        rank = layout.rank_of(pipeline=places[0])
        found |= dict.fromkeys(places, step_traffic(config, layout, stages, rank, precision))
    return [found[place] for place in range(layout.pipeline)]


class _Waiting(NamedTuple):
    """Seconds of communication of a stage's passes of a micro-batch."""

    hidden: dict[str, float]
    """Beside compute, by dimension."""
    exposed: dict[str, float]
    """That compute waits for."""
    passes: PassSeconds = PassSeconds(0.0, 0.0, 0.0)
    """The latter by pass."""


class _Step:
    """One step's times, on the processes that are first along every dimension but pipeline."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[range],
        cluster: Cluster,
        precision: str,
        traffic: Sequence[StepTraffic],
    ) -> None:
        self.config = config
        self.layout = layout
        self.stages = stages
        self.cluster = cluster
        self.rules = LayoutRules(layout)
        self.sizes: StepSizes = step_sizes(config, layout, precision)
        self.n_micro_batches = self.sizes.n_micro_batches
        self.precision = precision
        self.links = Links(layout, cluster)
        self.compute = ComputeTime(config, layout, self.sizes, cluster, precision)
        self.hidden: dict[str, float] = {}
        self.exposed: dict[str, float] = {}
        self.traffic = traffic
        self._known: dict[int, Mapping[When, StepTraffic]] = {}
        self._waits: dict[object, _Waiting] = {}

    def time(self) -> StepTime:
        """The whole step."""
        computed, waiting = self._passes()
        pipeline, bubble = None, 0.0
        if self.layout.pipeline == 1:
            length = self._alone(computed[0], waiting[0])
            busy = self.n_micro_batches * sum(computed[0])
        else:
            pipeline, length, busy, bubble = self._pipeline(computed, waiting)
        numbers = self.links.total(self.traffic[0], WORLD)
        optimizer = self._optimizer()
        self.exposed[WORLD] = numbers
        exposed = {name: seconds for name, seconds in self.exposed.items() if seconds}
        return StepTime(
            seconds=length + numbers + optimizer,
            compute=busy,
            bubble=bubble,
            exposed=exposed,
            optimizer=optimizer,
            hidden={name: seconds for name, seconds in self.hidden.items() if seconds},
            pipeline=pipeline,
        )

    # -- passes ---------------------------------------------------------------------------------

    def _passes(self) -> tuple[list[PassSeconds], list[PassSeconds]]:
        """Of each stage the time of its passes, and what they wait for in other processes."""
        computed = [self.compute.stage(layers) for layers in self.stages]
        waiting = [self._waiting(number) for number in range(len(self.stages))]
        for each in waiting:
            for book, part in ((self.hidden, each.hidden), (self.exposed, each.exposed)):
                for name, seconds in part.items():
                    self._note(book, name, seconds * self._passes_per_process)
        return computed, [each.passes for each in waiting]

    def _waiting(self, number: int) -> _Waiting:
        """What a stage's passes wait for; alike stages wait alike."""
        place, layers = self.layout.place_of_stage[number], self.stages[number]
        key = id(self.traffic[place]), len(layers), self.compute.stage(layers)
        if key not in self._waits:
            here = sum(len(self.stages[other]) for other in self.layout.stages_of(place))
            share = len(layers) / here / self.n_micro_batches
            self._waits[key] = self._waiting_of(layers, place, share)
        return self._waits[key]

    def _waiting_of(self, layers: range, place: int, share: float) -> _Waiting:
        """What the passes of layers wait for, which send a share of all that a process sends in a
        step."""
        forward, backward, hidden = self._tensor(layers, place, share)
        waiting = _Waiting({"tensor": hidden}, {"tensor": forward + backward})
        if self.layout.context > 1:
            context = share * self.links.total(self.traffic[place], "context")
            late = context
            if not self.layout.exchanges_heads:  # a ring's messages travel beside attention
                late = max(0.0, context - self.compute.attention(layers))
            waiting.hidden["context"] = context - late
            waiting.exposed["context"] = late
            forward += late * FORWARD_SHARE
            backward += late * (1 - FORWARD_SHARE)
        return waiting._replace(passes=PassSeconds(forward, backward, 0.0))

    def _tensor(self, layers: range, place: int, share: float) -> tuple[float, float, float]:
        """Seconds that the passes of layers, which are a share of all that a process sends, wait
        for matrices that processes share, forward and backward, and what is beside compute."""
        whole = share * self.links.total(self.traffic[place], *IN_LAYERS)
        if self.layout.tensor_mode != "1d" or not whole:
            return FORWARD_SHARE * whole, (1 - FORWARD_SHARE) * whole, 0.0
        sent = self._matrices(place)
        seconds = {when: share * self.links.total(sent[when], "tensor") for when in sent}
        moved = {when: share * self._moving(sent[when]) for when in sent}
        total, hidden = whole + sum(moved.values()), 0.0
        if "beside" in sent:
            # What is read is gathered beside its gradient's products, and that is summed beside
            # those of the weights.
            _, to_input, to_weight = self.compute.reading(layers)
            gathers = share * self._of(sent["beside"], "tensor", "all_gather")[0]
            sums = seconds["beside"] - gathers
            hidden = gathers + sums - self._late(to_input, gathers) - self._late(to_weight, sums)
        forward = seconds["forward"] + moved["forward"]
        return forward, total - hidden - forward, hidden

    @property
    def _passes_per_process(self) -> float:
        """Passes of a stage in a step ÷ processes of the pipeline. Seconds of a stage's pass times
        it, added up over the stages, are those of the mean process."""
        return self.n_micro_batches / self.layout.pipeline

    def _moving(self, traffic: StepTraffic) -> float:
        """Time in which a process puts messages of divided time together, half of which come by
        process and are wanted by time, and adds up what the others sent."""
        moved = sum(MOVES.get(kind, 0) * each.n_bytes for (_, kind), each in traffic.items())
        return moved / self.cluster.memory_bandwidth

    def _matrices(self, place: int) -> Mapping[When, StepTraffic]:
        """What matrices that processes share send in a step, by when; alike places alike."""
        traffic = id(self.traffic[place])
        if traffic not in self._known:
            rank = self.layout.rank_of(pipeline=place)
            self._known[traffic] = matrix_traffic(
                self.config, self.layout, self.stages, rank, self.precision
            )
        return self._known[traffic]

    def _late(self, compute: float, sent: float) -> float:
        """What communication beside compute adds to it: the time that it takes longer, and what it
        costs the compute that hides it."""
        cost = self.cluster.device.calibration.interference_share
        return max(0.0, sent - compute) + cost * min(compute, sent)

    def _note(self, book: dict[str, float], name: str, seconds: float) -> None:
        book[name] = book.get(name, 0.0) + seconds

    # -- one process, or copies and shards of one ------------------------------------------------

    def _alone(self, computed: PassSeconds, waiting: PassSeconds) -> float:
        """Seconds of the passes of all micro-batches, with what ZeRO and DDP do beside them."""
        traffic, M = self.traffic[0], self.n_micro_batches
        forward = computed.forward + waiting.forward
        backward = sum(computed[1:]) + sum(waiting[1:])
        match self.rules.data_sum:
            case "none":
                return M * (forward + backward)
            case "after_backward":
                sums = self.links.total(traffic, "data")
                self._note(self.exposed, "data", sums)
                return M * (forward + backward) + sums
            case "ddp":
                sums = self.links.total(traffic, "data")
                calls = sum(each.calls for key, each in traffic.items() if key[0] == "data")
                last = self._beside(backward, sums, calls, "data")
                return M * (forward + backward) - backward + last
            case "fsdp":
                return self._sharded(forward, backward)

    def _beside(self, compute: float, sent: float, calls: int, name: str) -> float:
        """Time of compute with communication beside it, of which the last call is late."""
        last = sent / max(1, calls)
        time = compute + self._late(compute, sent - last) + last
        self._note(self.exposed, name, time - compute)
        self._note(self.hidden, name, max(0.0, sent - (time - compute)))
        return time

    def _sharded(self, forward: float, backward: float) -> float:
        """ZeRO: weights are gathered once, or before each pass, and gradients reduced in the last
        micro-batch, or in each."""
        traffic, M = self.traffic[0], self.n_micro_batches
        gathers, n_gathers = self._of(traffic, "shard", "all_gather")
        sums, n_sums = self._of(traffic, "shard", "reduce_scatter")
        gathers += self._copying(traffic, "all_gather")
        sums += self._copying(traffic, "reduce_scatter")
        copies, n_copies = self._of(traffic, "data", "all_reduce")
        n_reducing = M if self.rules.reduces_each_micro_batch else 1
        n_gathering = 2 * M if not self.rules.weights_stay_gathered else 1
        gather, calls = gathers / n_gathering, n_gathers // n_gathering
        reduction, n_reduced = sums / n_reducing, n_sums // n_reducing
        total = 0.0
        for number in range(M):
            is_first, is_last = number == 0, number == M - 1
            gathers_anew = not self.rules.weights_stay_gathered
            if number > 1 and not is_last:
                continue
            repeated = M - 2 if number == 1 and not is_last else 1
            time = forward
            before = {name: dict(book) for name, book in self._books().items()}
            if is_first or gathers_anew:
                time = self._beside(forward, gather, calls, "shard")
            sent, n_calls = (gather, calls) if gathers_anew else (0.0, 0)
            if self.rules.reduces_each_micro_batch or is_last:
                sent, n_calls = sent + reduction, n_calls + n_reduced
            if is_last:
                sent, n_calls = sent + copies, n_calls + n_copies
            time += self._beside(backward, sent, n_calls, "shard") if sent else backward
            total += repeated * time
            for name, book in self._books().items():
                for key, seconds in book.items():
                    old = before[name].get(key, 0.0)
                    book[key] = old + repeated * (seconds - old)
        return total

    def _books(self) -> dict[str, dict[str, float]]:
        return {"hidden": self.hidden, "exposed": self.exposed}

    def _of(self, traffic: StepTraffic, dimension: str, kind: str) -> tuple[float, int]:
        """Seconds and calls of one kind along a dimension."""
        for key, counted in traffic.items():
            if key == (dimension, kind):
                return self.links.seconds(dimension, key[1], counted), counted.calls
        return 0.0, 0

    def _copying(self, traffic: StepTraffic, kind: Kind) -> float:
        """Time in which a CPU copies gathered weights out of their message, or gradients into
        theirs: both are in memory that the system gives anew."""
        fresh = self.cluster.device.calibration.fresh_bytes_per_second
        counted = traffic.get(("shard", kind))
        if fresh is None or counted is None:
            return 0.0
        moved = 2 * counted.n_bytes
        return moved / self.cluster.memory_bandwidth + moved * self.cluster.sharing / fresh

    # -- pipelines ------------------------------------------------------------------------------

    def _pipeline(
        self, computed: list[PassSeconds], waiting: list[PassSeconds]
    ) -> tuple[PipelineTime, float, float, float]:
        """The passes, the seconds with what follows the last one, and of the mean process its
        compute and its idle time."""
        both = [
            PassSeconds(*(a + b for a, b in zip(*pair, strict=True)))
            for pair in zip(computed, waiting, strict=True)
        ]
        p, M = self.layout.pipeline, self.n_micro_batches
        sent = ActivationBytes(self.config, self.layout, self.sizes).message
        message = self.links.message_seconds(sent)
        time = pipeline_time(self.layout, M, both, message)
        compute = M * sum(map(sum, computed)) / p
        waited = M * sum(map(sum, waiting)) / p
        tails = [self._after_passes(place) for place in range(p)]
        at_end = {name: max(tail.get(name, 0.0) for tail in tails) for name in tails[0]}
        for name, seconds in at_end.items():
            self._note(self.exposed, name, seconds)
        return time, time.length + sum(at_end.values()), compute, time.length - compute - waited

    def _after_passes(self, place: int) -> dict[str, float]:
        """Communication of a place of the pipeline before its first pass and after its last one."""
        traffic = self.traffic[place]
        tied = sum(
            self.links.seconds(dimension, kind, counted)
            for (dimension, kind), counted in traffic.items()
            if (dimension, kind) == ("pipeline", "all_reduce")
        )
        return {
            "data": self.links.total(traffic, "data"),
            "shard": self.links.total(traffic, "shard"),
            "pipeline": tied,
        }

    # -- the update -----------------------------------------------------------------------------

    def _optimizer(self) -> float:
        """The update of the fullest process: weight and state read and written, gradients read for
        it, for their norm and where they are scaled and zeroed."""
        most = 0.0
        e = self.sizes.element_bytes
        for place in {0, self.layout.pipeline - 1}:
            tables = stage_tables(self.config, self.layout, self.stages, place)
            moved = 0
            for _, table in tables:
                for spec in table:
                    shape = self.layout.parameter_shape(spec.shape, spec.axes)
                    slots = optimizer_slots(self.config.optimizer, spec)
                    numbers = 2 + 2 * slots + 4
                    moved += e * numbers * shard_elements(shape, self.layout.shard, 0)
            most = max(most, moved / self.cluster.memory_bandwidth)
        return most
