"""The seconds for a step on a cluster: compute, bubble, exposed communication, optimizer.

A stage's passes take the time for their operations (`compute_time.py`) and for the collectives that
they wait for (`links.py`); a pipeline is simulated pass by pass, in the order that the run executes
(`timeline.py`). ZeRO's gathers and reductions, DDP's buckets, a ring's messages and some
tensor-parallel communication overlap with compute; they are exposed as far as they take longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pentameter.estimating.bytes.communication import (
    WORLD,
    StepCommunication,
    communication_of_stages,
    matrix_communication,
)
from pentameter.estimating.bytes.costs import ActivationBytes, PassSeconds, Step
from pentameter.estimating.bytes.memory import optimizer_slots
from pentameter.estimating.bytes.operation_communication import Kind, When
from pentameter.estimating.bytes.stages import alike_stages, stage_tables
from pentameter.estimating.seconds.cluster import Cluster
from pentameter.estimating.seconds.compute_time import ComputeTime
from pentameter.estimating.seconds.links import Links
from pentameter.estimating.seconds.timeline import PipelineTime, Span, idle_fraction, pipeline_time

FORWARD_SHARE = 1 / 3
"""The forward pass's fraction of a layer's communication, for grid matmuls and sequence shards. A
layer has one matmul in the forward pass for two in the backward pass, and gradients are summed in
float32."""
MOVES: Mapping[Kind, int] = {"all_gather": 1, "all_to_all": 2}
"""Maps a kind of collective to how often the bytes of a tensor-parallel message are read or written
in memory, besides being sent."""
IN_LAYERS = ("tensor", "row", "depth")
"""Mesh dimensions whose collectives every layer waits for."""
SUMS = ("data", "expert_data", "expert_tensor")
"""Mesh dimensions over which gradients are summed after the backward pass, apart from IN_LAYERS."""
SHARDS = ("shard", "expert_shard")
"""Mesh dimensions along which ZeRO shards parameters."""


@dataclass(frozen=True)
class StepTime:
    """One step's estimated seconds and the components that add up to them; `hidden` is not one of
    these."""

    seconds: float
    compute: float
    """Forward, backward and recomputation; in a pipeline, the mean over its ranks."""
    bubble: float
    """Idle time in a pipeline, the mean over its ranks; 0 without one."""
    exposed: dict[str, float]
    """Communication that compute waits for, by mesh dimension or WORLD."""
    optimizer: float
    """The parameter update, and computing the gradient norm."""
    hidden: dict[str, float]
    """Communication overlapped with compute, by mesh dimension; not part of the step's seconds."""
    pipeline: PipelineTime | None = field(default=None, repr=False)
    """The pipeline ranks' simulated passes; None without a pipeline."""

    @property
    def bubble_fraction(self) -> float:
        """The pipeline ranks' idle time ÷ their busy time; 0 without a pipeline."""
        if self.pipeline is None:
            return 0.0
        return idle_fraction(self.pipeline.length, self.pipeline.length - self.bubble)

    @property
    def spans(self) -> Sequence[Sequence[Span]]:
        """The passes of each pipeline rank, with start and end in seconds. With many micro-batches
        only the first rounds are simulated."""
        return [] if self.pipeline is None else self.pipeline.spans


def step_time(
    step: Step, cluster: Cluster, traffic: Sequence[StepCommunication] | None = None
) -> StepTime:
    """Return the StepTime for a step on a cluster. `traffic` is the result from
    `communication_of_stages`, if already known. Raises ConfigError if the device's peak in the
    step's matmul precision is unknown."""
    return _StepOnCluster(step, cluster, traffic or communication_of_stages(step)).time()


class _Waiting(NamedTuple):
    """Seconds that the passes of one stage spend on communication, for one micro-batch. A named
    tuple."""

    hidden: dict[str, float]
    """Seconds overlapped with compute, by mesh dimension."""
    exposed: dict[str, float]
    """Seconds that compute waits, by mesh dimension."""
    passes: PassSeconds = PassSeconds(0.0, 0.0, 0.0)
    """The exposed seconds, by pass."""


class _Waits:
    """Estimates how long each stage's passes wait for tensor-, context- or expert-parallel
    communication, in seconds."""

    def __init__(
        self, compute: ComputeTime, links: Links, communication: Sequence[StepCommunication]
    ) -> None:
        self.step = compute.step
        self.compute = compute
        self.links = links
        self.communication = communication
        self._known: dict[int, Mapping[When, StepCommunication]] = {}
        self._waits: dict[object, _Waiting] = {}

    def of_stage(self, number: int) -> _Waiting:
        """Return the communication seconds in the passes of stage `number` for one micro-batch;
        equal stages share a cached result."""
        coordinate = self.step.layout.pipeline_rank_of_stage[number]
        layers = self.step.stages[number]
        key = id(self.communication[coordinate]), len(layers), self.compute.stage(layers)
        if key not in self._waits:
            self._waits[key] = self._waiting_of(layers, coordinate)
        return self._waits[key]

    def _fraction(self, layers: range, coordinate: int, counted: Callable[[int], bool]) -> float:
        """Return what fraction of a rank's work in a step is one micro-batch in `layers`. The rank
        is given by its `pipeline` `coordinate`. Only layers for which `counted(layer)` is True
        count, and all of them alike; 0 if the rank has none."""
        numbers = self.step.layout.stages_of(coordinate)
        n_local = sum(sum(map(counted, self.step.stages[number])) for number in numbers)
        n_counted = sum(map(counted, layers))
        return n_counted / n_local / self.step.n_micro_batches if n_counted else 0.0

    def _waiting_of(self, layers: range, coordinate: int) -> _Waiting:
        """Return the communication seconds in these layers' passes for one micro-batch, which the
        rank at `pipeline` coordinate `coordinate` computes."""
        fraction = self._fraction(layers, coordinate, lambda _: True)
        forward, backward, hidden = self._tensor(layers, coordinate, fraction)
        waiting = _Waiting({"tensor": hidden}, {"tensor": forward + backward})
        if self.step.layout.context > 1:
            context = fraction * self.links.total(self.communication[coordinate], "context")
            exposed = context
            if not self.step.layout.exchanges_heads:  # a ring's messages overlap with attention
                exposed = max(0.0, context - self.compute.attention(layers))
            waiting.hidden["context"] = context - exposed
            waiting.exposed["context"] = exposed
            forward += exposed * FORWARD_SHARE
            backward += exposed * (1 - FORWARD_SHARE)
        if self.step.layout.shards_experts:
            rows_forward, rows_backward, hidden = self._experts(layers, coordinate)
            waiting.hidden["expert"] = hidden
            waiting.exposed["expert"] = rows_forward + rows_backward
            forward += rows_forward
            backward += rows_backward
        return waiting._replace(passes=PassSeconds(forward, backward, 0.0))

    def _experts(self, layers: range, coordinate: int) -> tuple[float, float, float]:
        """Return (forward, backward, hidden): the seconds that these layers' forward and backward
        passes wait for counting and exchanging experts' rows in one micro-batch, and those of the
        exchange that overlap with the shared experts. Rows on their way back overlap with
        nothing."""
        has_experts = self.step.config.model.experts.are_in
        fraction = self._fraction(layers, coordinate, has_experts)
        exchange = fraction * self.links.total(self.communication[coordinate], "expert")
        exchange *= self.step.rows_over_mean  # all wait for the rank that gets the most rows
        counting = self.links.cluster.device.calibration.counts_seconds
        counting *= sum(map(has_experts, layers))
        passes = 3 if self.compute.recomputes_products else 2
        one_way = exchange / passes / 2  # to the experts, or back
        shared = self.compute.shared_experts(layers)
        if self.step.layout.tensor > 1:  # their own collectives take the links meanwhile
            shared = PassSeconds(0.0, 0.0, 0.0)
        gradients = shared.backward_input + shared.backward_weight
        hidden_forward = one_way - self.links.exposed_seconds(shared.forward, one_way)
        hidden_backward = one_way - self.links.exposed_seconds(gradients, one_way)
        hidden_backward += (passes - 2) * hidden_forward  # recomputed
        forward = counting + 2 * one_way - hidden_forward
        backward = exchange - 2 * one_way - hidden_backward
        return forward, backward, hidden_forward + hidden_backward

    def _tensor(
        self, layers: range, coordinate: int, fraction: float
    ) -> tuple[float, float, float]:
        """Return (forward, backward, hidden): the seconds that these layers' forward and backward
        passes wait for tensor-parallel or grid communication in one micro-batch, and those that
        overlap with compute. The rank at `coordinate` spends `fraction` of its communication in a
        step on them."""
        in_layers = fraction * self.links.total(self.communication[coordinate], *IN_LAYERS)
        if self.step.layout.is_grid or not in_layers:
            return FORWARD_SHARE * in_layers, (1 - FORWARD_SHARE) * in_layers, 0.0
        sent = self._matrix_communication(coordinate)
        seconds = {when: fraction * self.links.total(sent[when], "tensor") for when in sent}
        moved = {when: fraction * self._reordering(sent[when]) for when in sent}
        total, hidden = in_layers + sum(moved.values()), 0.0
        if "beside" in sent:
            # The input is gathered while its gradient's matmuls run, and that gradient is summed
            # while the weights' matmuls run.
            _, to_input, to_weight = self.compute.reading(layers)
            gathers = (
                fraction * self.links.seconds_and_calls(sent["beside"], "tensor", "all_gather")[0]
            )
            sums = seconds["beside"] - gathers
            hidden = gathers + sums - self.links.exposed_seconds(to_input, gathers)
            hidden -= self.links.exposed_seconds(to_weight, sums)
        forward = seconds["forward"] + moved["forward"]
        return forward, total - hidden - forward, hidden

    def _reordering(self, traffic: StepCommunication) -> float:
        """Return the seconds in which a rank reorders and sums sequence shards in memory, as
        `traffic` counts them: gathered shards arrive in rank order but are needed by sequence
        position, and shards that other ranks sent are added up."""
        moved = sum(MOVES.get(kind, 0) * each.n_bytes for (_, kind), each in traffic.items())
        return moved / self.links.cluster.memory_bandwidth

    def _matrix_communication(self, coordinate: int) -> Mapping[When, StepCommunication]:
        """Return a rank's communication in a step for tensor-parallel matrices, by when it is sent
        ("forward", "backward", "beside"); coordinates with equal stages share one result."""
        traffic = id(self.communication[coordinate])
        if traffic not in self._known:
            rank = self.step.layout.rank_of(pipeline=coordinate)
            self._known[traffic] = matrix_communication(self.step, rank)
        return self._known[traffic]


class _StepOnCluster:
    """Estimates the seconds of one step on a cluster, for the ranks with coordinate 0 along every
    mesh dimension except `pipeline`."""

    def __init__(
        self, step: Step, cluster: Cluster, communication: Sequence[StepCommunication]
    ) -> None:
        self.step = step
        self.layout, self.stages, self.rules = step.layout, step.stages, step.rules
        self.cluster = cluster
        self.n_micro_batches = step.n_micro_batches
        self.links = Links(step.layout, cluster)
        self.compute = ComputeTime(step, cluster)
        self.hidden: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.communication = communication
        self.waits = _Waits(self.compute, self.links, communication)

    def time(self) -> StepTime:
        """Return the step's StepTime. Call once: it adds to `hidden` and `exposed`."""
        computed, waiting = self._passes()
        pipeline, bubble = None, 0.0
        if self.layout.pipeline == 1:
            length = self._without_pipeline(computed[0], waiting[0])
            busy = self.n_micro_batches * sum(computed[0])
        else:
            pipeline, length, busy, bubble = self._pipeline(computed, waiting)
        numbers = self.links.total(self.communication[0], WORLD)
        optimizer = _update_seconds(self.step, self.cluster)
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
        """Return, for each stage, its pass times and the seconds that its passes wait for other
        ranks; add the latter to `hidden` and `exposed`."""
        computed = [self.compute.stage(layers) for layers in self.stages]
        waiting = [self.waits.of_stage(number) for number in range(len(self.stages))]
        # A stage's seconds times this, added up over the stages, are the mean over the ranks.
        passes_per_rank = self.n_micro_batches / self.layout.pipeline
        for each in waiting:
            for book, times in ((self.hidden, each.hidden), (self.exposed, each.exposed)):
                for name, seconds in times.items():
                    book[name] += seconds * passes_per_rank
        return computed, [each.passes for each in waiting]

    # -- without a pipeline -----------------------------------------------------------------------

    def _without_pipeline(self, computed: PassSeconds, waiting: PassSeconds) -> float:
        """Return the seconds that the passes of all micro-batches take without a pipeline,
        including gradient sums and ZeRO's gathers, which partly overlap with them.

        computed: seconds that the passes of one micro-batch compute.
        waiting: seconds that the passes of one micro-batch wait for other ranks.
        """
        traffic, M = self.communication[0], self.n_micro_batches
        forward = computed.forward + waiting.forward
        backward = sum(computed[1:]) + sum(waiting[1:])
        match self.step.sharding.data_sum:
            case "none" | "after_backward":
                for name in SUMS:
                    self.exposed[name] += self.links.total(traffic, name)
                return M * (forward + backward) + self.links.total(traffic, *SUMS)
            case "ddp":
                sums = self.links.total(traffic, "data")
                calls = sum(each.calls for key, each in traffic.items() if key[0] == "data")
                last = self._overlapped(backward, sums, calls, "data")
                return M * (forward + backward) - backward + last
            case "fsdp":
                return self._sharded(forward, backward)

    def _overlapped(
        self, compute: float, sent: float, calls: int, name: str, times: int = 1
    ) -> float:
        """Return the seconds that `compute` seconds of work take with communication that overlaps
        it: `sent` seconds in `calls` equal calls, of which the last one is not overlapped. The
        seconds that are waited for are added to `exposed`, those that overlap to `hidden`, each
        `times` times, under `name`, a mesh dimension."""
        last = sent / max(1, calls)
        time = compute + self.links.exposed_seconds(compute, sent - last) + last
        self.exposed[name] += times * (time - compute)
        self.hidden[name] += times * max(0.0, sent - (time - compute))
        return time

    def _sharded(self, forward: float, backward: float) -> float:
        """Return the seconds for a step with ZeRO, given the forward and backward seconds for one
        micro-batch. Weights are gathered once if they stay gathered over the step, else before each
        pass. Gradients are reduced in each micro-batch if `rules.reduces_each_micro_batch`, else in
        the last one only."""
        traffic, M = self.communication[0], self.n_micro_batches
        gathers, n_gathers = self._along(SHARDS, "all_gather")
        sums, n_sums = self._along(SHARDS, "reduce_scatter")
        gathers += self._copying(traffic, "all_gather")
        sums += self._copying(traffic, "reduce_scatter")
        replica_sums, n_replica_sums = self._along(SUMS, "all_reduce")
        n_reducing = M if self.rules.reduces_each_micro_batch else 1
        n_gathering = 2 * M if not self.rules.weights_stay_gathered else 1
        gather, calls = gathers / n_gathering, n_gathers // n_gathering
        reduction, n_reduced = sums / n_reducing, n_sums // n_reducing
        total = 0.0
        for number in sorted({0, min(1, M - 1), M - 1}):  # those between are as the second
            is_first, is_last = number == 0, number == M - 1
            gathers_anew = not self.rules.weights_stay_gathered
            repeated = M - 2 if number == 1 and not is_last else 1
            time = forward
            if is_first or gathers_anew:
                time = self._overlapped(forward, gather, calls, "shard", repeated)
            sent, n_calls = (gather, calls) if gathers_anew else (0.0, 0)
            if self.rules.reduces_each_micro_batch or is_last:
                sent, n_calls = sent + reduction, n_calls + n_reduced
            if is_last:
                sent, n_calls = sent + replica_sums, n_calls + n_replica_sums
            if sent:
                time += self._overlapped(backward, sent, n_calls, "shard", repeated)
            else:
                time += backward
            total += repeated * time
        return total

    def _along(self, dimensions: Sequence[str], kind: Kind) -> tuple[float, int]:
        """Return (seconds, number) of all calls of one kind of collective along the mesh dimensions
        `dimensions`."""
        each = [
            self.links.seconds_and_calls(self.communication[0], name, kind) for name in dimensions
        ]
        return sum(seconds for seconds, _ in each), sum(n_calls for _, n_calls in each)

    def _copying(self, traffic: StepCommunication, kind: Kind) -> float:
        """Return the seconds in which a CPU copies gathered weights out of their buffer, or
        gradients into one, in memory that the system allocates anew; 0 on a GPU."""
        fresh = self.cluster.device.calibration.fresh_bytes_per_second
        counted = [traffic[name, kind].n_bytes for name in SHARDS if (name, kind) in traffic]
        if fresh is None or not counted:
            return 0.0
        moved = 2 * sum(counted)
        return moved / self.cluster.memory_bandwidth + moved * self.cluster.sharing / fresh

    # -- pipelines ------------------------------------------------------------------------------

    def _pipeline(
        self, computed: list[PassSeconds], waiting: list[PassSeconds]
    ) -> tuple[PipelineTime, float, float, float]:
        """Return (simulated passes, length, compute, bubble), given each stage's pass times and
        waiting times for one micro-batch. Length is the step's seconds until all gradients are
        summed, without the optimizer; compute and bubble (idle) seconds are means over the
        pipeline's ranks."""
        both = [
            PassSeconds(*(a + b for a, b in zip(*pair, strict=True)))
            for pair in zip(computed, waiting, strict=True)
        ]
        p, M = self.layout.pipeline, self.n_micro_batches
        sent = ActivationBytes(self.step).message
        message = self.links.message_seconds(sent)
        time = pipeline_time(self.layout, M, both, message)
        compute = M * sum(map(sum, computed)) / p
        waited = M * sum(map(sum, waiting)) / p
        tails = [_after_passes(self.links, traffic) for traffic in self.communication]
        at_end = {name: max(tail.get(name, 0.0) for tail in tails) for name in tails[0]}
        for name, seconds in at_end.items():
            self.exposed[name] += seconds
        return time, time.length + sum(at_end.values()), compute, time.length - compute - waited


def _after_passes(links: Links, traffic: StepCommunication) -> dict[str, float]:
    """Return the seconds that a pipeline rank communicates outside its passes, by mesh dimension:
    weights gathered before the first pass, gradients summed after the last. `traffic` is its
    communication in a step."""
    return {
        **{name: links.total(traffic, name) for name in (*SUMS, *SHARDS)},
        "pipeline": links.seconds_and_calls(traffic, "pipeline", "all_reduce")[0],
    }


def _update_seconds(step: Step, cluster: Cluster) -> float:
    """Return the seconds for the optimizer's update on the fullest rank. Weights and optimizer
    state are read and written; gradients are read for their norm and for the update, scaled and
    zeroed. Frozen weights have neither state nor gradients."""
    most, config, layout = 0.0, step.config, step.layout
    elements = step.sharding.zero_elements
    for coordinate, *_ in alike_stages(config.model, layout, step.stages):
        tables = stage_tables(config, layout, step.stages, coordinate)
        trained = [spec for _, table in tables for spec in table if spec.is_trained]
        n_moved = sum(
            elements(spec) * (2 + 2 * optimizer_slots(config.optimizer, spec) + 4)
            for spec in trained
        )
        most = max(most, step.element_bytes * n_moved / cluster.memory_bandwidth)
    return most
