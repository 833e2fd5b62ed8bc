"""The order of a pipeline's passes over micro-batches, and the time it leaves processes idle.

The orders are those of PyTorch's schedules: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush,
Narayanan et al. 2021), its interleaved form (Megatron-LM, Narayanan et al. 2021) and zero-bubble
ZB1P (Qi et al. 2023), the latter two for any number of stages per process, and ZB-V (the same).

A search plans many layouts whose pipelines run alike, so what follows from the order alone is kept
for the next one. There a pass is a number: (kind · stages + stage) · micro-batches + micro-batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import Config
from pentameter.planning.costs import PassSeconds, pass_seconds
from pentameter.planning.layout import Layout

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
"""The kinds as numbers."""

SIMULATED_ROUNDS = 4
"""Times a pipeline is filled in a simulation; each round more takes as long as the last of these,
which neither fills nor drains it, and has no more under way."""


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage.

    Zero-bubble schedules split the backward pass into the gradient of the stage's input, for which
    the stage before is waiting, and those of its weights, for which nobody is.
    """

    kind: Kind
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """A pass and when it runs."""

    done: Pass
    start: float
    end: float


class UnderWay(NamedTuple):
    """The passes of a process that are under way when many are.

    A row counts, of each stage that the process holds, the micro-batches between forward and
    backward pass, and then those between the two halves of a backward pass.
    """

    ever: np.ndarray
    later: np.ndarray
    """After the first backward pass."""

    def peaks(self, of_each: Sequence[int]) -> tuple[int, int]:
        """The most that passes under way hold, ever and later, each as much as `of_each` says."""
        ever, later = (
            max((counts @ np.array(of_each, dtype=counts.dtype)).tolist(), default=0)
            for counts in self
        )
        return ever, later


class _Passes(NamedTuple):
    """The passes of all processes, each after the one that it reads from, and of each pass: its
    process, its kind and stage as a number, where the one that it reads from stands (-1: nowhere),
    and whether another process reads what it makes."""

    numbers: array[int]
    places: array[int]
    rows: array[int]
    needs: array[int]
    sends: bytes


def pass_order(layout: Layout, n_micro_batches: int) -> list[list[Pass]]:
    """The passes that each process of the pipeline makes, in order."""
    as_pass = _reader(layout, n_micro_batches)
    return [
        list(map(as_pass, numbers)) for numbers in _orders(_pipeline_of(layout), n_micro_batches)
    ]


def simulated_micro_batches(layout: Layout, n_micro_batches: int) -> int:
    """Micro-batches of a step that stands for one of `n_micro_batches`: some rounds, and as many
    more as are over; all of them where they are few, or where stages take turns in rounds of
    another length."""
    p, M = layout.pipeline, n_micro_batches
    turns = layout.virtual_stages > 1 and not layout.turns_back
    if (SIMULATED_ROUNDS + 2) * p >= M or (turns and M % p):
        return M
    return SIMULATED_ROUNDS * p + M % p


def _pipeline_of(layout: Layout) -> Layout:
    """What the order of the passes depends on."""
    return Layout(
        pipeline=layout.pipeline,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
    )


def _reader(layout: Layout, n_micro_batches: int) -> Callable[[int], Pass]:
    def as_pass(number: int) -> Pass:
        row, micro_batch = divmod(number, n_micro_batches)
        kind, stage = divmod(row, layout.n_stages)
        return Pass(KINDS[kind], stage, micro_batch)

    return as_pass


class _Order:
    """The passes of one process as they are added, by kind and stage."""

    def __init__(self, layout: Layout, n_micro_batches: int) -> None:
        self.numbers = array("l")
        self.seen = [0] * (len(KINDS) * layout.n_stages)
        self._n_stages, self._n_micro_batches = layout.n_stages, n_micro_batches

    def add(self, stage: int, *kinds: int) -> None:
        """Append the next micro-batch of a stage, if there is one more."""
        for kind in kinds:
            row = kind * self._n_stages + stage
            if self.seen[row] < self._n_micro_batches:
                self.numbers.append(row * self._n_micro_batches + self.seen[row])
            self.seen[row] += 1


@lru_cache(maxsize=64)
def _orders(pipeline: Layout, n_micro_batches: int) -> tuple[array[int], ...]:
    """The passes of each process in order, as numbers."""
    return tuple(_order(pipeline, n_micro_batches, place) for place in range(pipeline.pipeline))


def _order(layout: Layout, n_micro_batches: int, place: int) -> array[int]:
    """The passes of the process at `place` of the pipeline.

    First only forward passes, to fill the pipeline; then forward and backward in turn; then what
    is left of the backward passes. A process with several stages gives a round of micro-batches
    to one stage, then to the next.
    """
    p, v, m = layout.pipeline, layout.virtual_stages, n_micro_batches
    round_size = m // max(1, m // p)
    hops = p - 1 - place
    split = layout.splits_backward
    match layout.schedule:
        case "gpipe":
            warm_up = m
        case "1f1b":
            warm_up = min(m, hops)
        case "interleaved":
            warm_up = min((v - 1) * round_size + 2 * hops, v * m)
        case "zero-bubble":
            warm_up = min((v - 1) * round_size + hops, v * m)
        case "zero-bubble-v":
            return _order_of_a_v(layout, n_micro_batches, place)
        case unknown:
            refuse_unknown(unknown, "parallel.schedule", "the timeline")
    there = layout.stages_of(place)
    back = there[::-1]
    order = _Order(layout, m)
    add = order.add
    for number in range(warm_up):
        add(there[number // round_size % v], FORWARD)
    for number in range(v * m):
        if warm_up + number < v * m:
            add(there[(warm_up + number) // round_size % v], FORWARD)
        add(back[number // round_size % v], BACKWARD_INPUT if split else BACKWARD)
        if split and number >= place:
            add(back[(number - place) // round_size % v], BACKWARD_WEIGHT)
    if split:
        for number in range(max(0, v * m - place), v * m):
            add(back[number // round_size % v], BACKWARD_WEIGHT)
    return order.numbers


def _order_of_a_v(layout: Layout, n_micro_batches: int, place: int) -> array[int]:
    """The passes of the process at `place` of a V of stages (ZB-V, Qi et al. 2023, section 6).

    The order is that of 2p - 1 micro-batches or more; of fewer those that do not exist drop out.
    """
    p, n_stages = layout.pipeline, layout.n_stages
    there, back = layout.stages_of(place)
    m = max(2 * p - 1, n_micro_batches)
    order = _Order(layout, n_micro_batches)
    add, seen = order.add, order.seen
    forward_there, forward_back = (FORWARD * n_stages + stage for stage in (there, back))
    for _ in range(2 * (p - place) - 1):
        add(there, FORWARD)
    for _ in range(place):
        add(back, FORWARD)
        add(there, FORWARD)
    for _ in range(p - place):
        add(back, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    while seen[forward_back] < m:
        if seen[forward_there] < m:
            add(there, FORWARD)
        add(there, BACKWARD_INPUT, BACKWARD_WEIGHT)
        add(back, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for _ in range(place):
        add(there, BACKWARD_INPUT)
        add(back, BACKWARD_INPUT)
    for _ in range(p - place):
        add(there, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for stage in (back, there):
        for _ in range(m - seen[BACKWARD_WEIGHT * n_stages + stage]):
            add(stage, BACKWARD_WEIGHT)
    return order.numbers


# -- what follows from the order alone ----------------------------------------------------------


def _needs_by_row(layout: Layout) -> list[int]:
    """Of each kind and stage how many stages on the one stands that it reads from; 0 for none."""
    n = layout.n_stages
    steps = {FORWARD: -1, BACKWARD: 1, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 0}
    return [step if 0 <= stage + step < n else 0 for step in steps.values() for stage in range(n)]


def _readers_by_row(layout: Layout) -> list[int]:
    """Of each kind and stage the process that reads what a pass makes; its own for none."""
    place_of, n = layout.place_of_stage, layout.n_stages
    steps = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: -1, BACKWARD_WEIGHT: 0}
    return [
        place_of.get(stage + step, place_of[stage]) for step in steps.values() for stage in range(n)
    ]


@lru_cache(maxsize=64)
def _passes(pipeline: Layout, n_micro_batches: int) -> _Passes:
    """The passes of all processes, in an order in which they can run."""
    m, orders = n_micro_batches, _orders(pipeline, n_micro_batches)
    needs_of, readers = _needs_by_row(pipeline), _readers_by_row(pipeline)
    stands = array("l", [-1]) * (len(KINDS) * pipeline.n_stages * m)
    found = _Passes(array("l"), array("l"), array("l"), array("l"), b"")
    sends = bytearray()
    done = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        for place, own in enumerate(orders):
            first = index = done[place]
            while index < len(own):
                number = own[index]
                row = number // m
                step = needs_of[row]
                need = stands[number + step * m] if step else -1
                if step and need < 0:
                    break
                stands[number] = len(sends)
                found.numbers.append(number)
                found.places.append(place)
                found.rows.append(row)
                found.needs.append(need)
                sends.append(readers[row] != place)
                index += 1
            done[place] = index
            left -= index - first
    return found._replace(sends=bytes(sends))


@lru_cache(maxsize=256)
def _under_way(pipeline: Layout, n_micro_batches: int) -> tuple[UnderWay, ...]:
    m, n = n_micro_batches, pipeline.n_stages
    found = []
    for place, numbers in enumerate(_orders(pipeline, n_micro_batches)):
        own = {stage: index for index, stage in enumerate(pipeline.stages_of(place))}
        counts = [0] * (2 * len(own))
        before: set[tuple[int, ...]] = set()
        later: set[tuple[int, ...]] = set()
        for number in numbers:
            kind, stage = divmod(number // m, n)
            index = own[stage]
            if kind == FORWARD:
                counts[index] += 1
            elif kind == BACKWARD_INPUT:
                counts[len(own) + index] += 1
            else:
                (later if later else before).add(tuple(counts))  # until then they only grow
                counts[index] -= 1
                counts[len(own) + index] -= kind == BACKWARD_WEIGHT
                later.add(tuple(counts))
        ever, after = (
            np.array(sorted(rows), dtype=int).reshape(-1, len(counts))
            for rows in (before | later, later)
        )
        found.append(UnderWay(ever, after))
    return tuple(found)


def passes_under_way(layout: Layout, n_micro_batches: int) -> tuple[UnderWay, ...]:
    """The UnderWay of each process of the pipeline. GPipe keeps all micro-batches; of the others
    many rounds have no more under way than some."""
    if layout.schedule == "gpipe":
        ever, later = (
            np.array([[n, 0]], dtype=object) for n in (n_micro_batches, n_micro_batches - 1)
        )
        return (UnderWay(ever, later),) * layout.pipeline
    few = simulated_micro_batches(layout, n_micro_batches)
    return _under_way(_pipeline_of(layout), few)


def waiting_messages(layout: Layout, n_micro_batches: int) -> tuple[int, ...]:
    """The most activations and gradients at a time that have come to each process, or may come, and
    that no pass has read yet.

    A receive is posted as soon as the pass that sends is made, where each process makes a pass in
    turn: so PyTorch orders them.
    """
    few = simulated_micro_batches(layout, n_micro_batches)
    return _waiting_messages(_pipeline_of(layout), few)


@lru_cache(maxsize=256)
def _waiting_messages(pipeline: Layout, n_micro_batches: int) -> tuple[int, ...]:
    m, orders = n_micro_batches, _orders(pipeline, n_micro_batches)
    needs_of, readers = _needs_by_row(pipeline), _readers_by_row(pipeline)
    place_of, n = pipeline.place_of_stage, pipeline.n_stages
    made = bytearray(len(KINDS) * n * m)
    done, waiting, most = ([0] * len(orders) for _ in range(3))
    left = sum(map(len, orders))
    while left:
        for place, own in enumerate(orders):
            if done[place] == len(own):
                continue
            number = own[done[place]]
            row = number // m
            step = needs_of[row]
            if step and not made[number + step * m]:
                continue
            done[place] += 1
            left -= 1
            made[number] = True
            if step and place_of[row % n + step] != place:
                waiting[place] -= 1
            reader = readers[row]
            if reader != place:
                waiting[reader] += 1
                most[reader] = max(most[reader], waiting[reader])
    return tuple(most)


# -- with the times of the passes ---------------------------------------------------------------


@dataclass(frozen=True)
class PipelineTime:
    """How long the passes of a pipeline's step take."""

    layout: Layout
    seconds: tuple[PassSeconds, ...]
    """The times of each stage."""
    message_seconds: float
    n_simulated: int
    """Micro-batches that are simulated, of a step that may have more."""
    length: float
    """Seconds from the first pass to the last one."""

    @cached_property
    def spans(self) -> list[list[Span]]:
        """The passes of each process, of the micro-batches that are simulated."""
        return timeline(self.layout, self.n_simulated, self.seconds, self.message_seconds)


def pipeline_time(
    layout: Layout,
    n_micro_batches: int,
    seconds: Sequence[PassSeconds],
    message_seconds: float = 0.0,
) -> PipelineTime:
    """The PipelineTime of a step; the arguments are `timeline`'s. Of many rounds some are simulated
    and each that is left out takes what the last of them adds."""
    n = simulated_micro_batches(layout, n_micro_batches)
    _, ends = _simulated(layout, n, seconds, message_seconds)
    length = max(ends)
    if n < n_micro_batches:
        p = layout.pipeline
        _, ends = _simulated(layout, n - p, seconds, message_seconds)
        length += (n_micro_batches - n) / p * (length - max(ends))
    return PipelineTime(layout, tuple(seconds), message_seconds, n, length)


def timeline(
    layout: Layout,
    n_micro_batches: int,
    seconds: Sequence[PassSeconds],
    message_seconds: float = 0.0,
) -> list[list[Span]]:
    """Each process's passes with their starts and ends.

    `seconds` holds the times of each stage. A pass starts once its process is free and what it
    needs has been computed, and has come from another process: a message takes `message_seconds`,
    after those that its process sent before.
    """
    passes = _passes(_pipeline_of(layout), n_micro_batches)
    starts, ends = _simulated(layout, n_micro_batches, seconds, message_seconds)
    as_pass = _reader(layout, n_micro_batches)
    made: list[list[Span]] = [[] for _ in range(layout.pipeline)]
    for place, number, start, end in zip(passes.places, passes.numbers, starts, ends, strict=True):
        made[place].append(Span(as_pass(number), start, end))
    return made


def _simulated(
    layout: Layout, n_micro_batches: int, seconds: Sequence[PassSeconds], message_seconds: float
) -> tuple[list[float], list[float]]:
    """Start and end of each of `_passes`."""
    passes = _passes(_pipeline_of(layout), n_micro_batches)
    takes = _seconds_by_row(seconds)
    free, sent = [0.0] * layout.pipeline, [0.0] * layout.pipeline
    starts: list[float] = []
    ends: list[float] = []
    there: list[float] = []  # when what a pass makes is where it is read
    columns = (passes.places, passes.rows, passes.needs, passes.sends)
    for place, row, need, sends in zip(*columns, strict=True):
        start = free[place]
        if need >= 0 and there[need] > start:
            start = there[need]
        end = free[place] = start + takes[row]
        starts.append(start)
        ends.append(end)
        if sends:
            end = sent[place] = max(end, sent[place]) + message_seconds
        there.append(end)
    return starts, ends


def _seconds_by_row(seconds: Sequence[PassSeconds]) -> list[float]:
    """The time of each kind of pass of each stage. Nobody waits for the gradient of the first
    stage's input, and PyTorch computes it with those of the weights."""
    both = [each.backward_input + each.backward_weight for each in seconds]
    return [
        *(each.forward for each in seconds),
        *both,
        0.0,
        *(each.backward_input for each in seconds[1:]),
        both[0],
        *(each.backward_weight for each in seconds[1:]),
    ]


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """Idle time of the processes ÷ the time they compute, over a whole step.

    With stages of equal times this is (p-1)/m for GPipe and 1F1B and (p-1)/(v·m) for the
    interleaved schedule, p processes with v stages each and m micro-batches; where stages differ
    it holds the wait for the slowest too.
    """
    busy = sum(span.end - span.start for process in spans for span in process)
    length = max(span.end for process in spans for span in process)
    return length * len(spans) / busy - 1


def planned_bubble(
    config: Config, layout: Layout, stages: Sequence[range], n_micro_batches: int
) -> float:
    """The bubble fraction of a step of a resolved `config`, whose passes take as long as their
    matrix products count; 0 without a pipeline."""
    if layout.pipeline == 1:
        return 0.0
    seconds = pass_seconds(config, stages)
    busy = n_micro_batches * sum(map(sum, seconds))
    length = pipeline_time(layout, n_micro_batches, seconds).length
    return length * layout.pipeline / busy - 1
