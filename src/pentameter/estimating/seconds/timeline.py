"""The order of a pipeline's passes over micro-batches, and the idle time on its ranks.

The orders are those in PyTorch's schedules: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush,
Narayanan et al. 2021), interleaved 1F1B (Megatron-LM, Narayanan et al. 2021) and zero-bubble ZB1P
(Qi et al. 2023), the latter two for any number of stages per rank, and ZB-V (the same).

A search plans many layouts whose pipelines run alike, so results that follow from the order alone
are cached. In them a pass is a number: (kind · stages + stage) · micro-batches + micro-batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from pentameter.config.choices import refuse_unknown
from pentameter.estimating.bytes.costs import PassSeconds, Step, pass_seconds
from pentameter.planning.layouts.layout import Layout

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
"""The indices in KINDS."""

SIMULATED_ROUNDS = 4
"""Number of rounds for which a simulation fills the pipeline; a round is as many micro-batches as
pipeline ranks. Each further round takes as long as the last simulated one that neither fills nor
drains the pipeline, and adds no passes in flight."""


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage.

    Zero-bubble schedules split the backward pass into the gradient for the stage's input, which the
    previous stage waits for, and the gradients for its weights, which no rank waits for.
    """

    kind: Kind
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """A pass with its start and end in seconds."""

    done: Pass
    start: float
    end: float


class UnderWay(NamedTuple):
    """The number of micro-batches of each stage that are in flight on one pipeline rank, at the
    moments when many are. Each row is one moment. For S stages on the rank there are 2 · S columns:
    the first S count micro-batches between their forward and backward pass, the others those
    between the two halves of a split backward pass."""

    ever: np.ndarray
    later: np.ndarray
    """The rows after the first backward pass; `ever` holds those of the whole step."""

    def peaks(self, per_pass: Sequence[int]) -> tuple[int, int]:
        """Return the largest total held by passes in flight, over the step and after the first
        backward pass (0 if none is). `per_pass` is how much one pass holds, per column."""
        largest = sum(per_pass) * int(self.ever.max(initial=0))
        dtype = object if largest >= 2**63 else self.ever.dtype  # which would wrap around
        ever, later = (
            max((counts @ np.array(per_pass, dtype=dtype)).tolist(), default=0) for counts in self
        )
        return ever, later


class _Passes(NamedTuple):
    """The passes of all pipeline ranks, in an order in which they can run, as parallel arrays: a
    pass's number, its `pipeline` coordinate, its kind · stages + stage, the index of the pass whose
    result it reads (-1: none), and whether another rank reads its own result."""

    numbers: array[int]
    coordinates: array[int]
    rows: array[int]
    needs: array[int]
    sends: bytes


def simulated_micro_batches(layout: Layout, n_micro_batches: int) -> int:
    """Return how many micro-batches to simulate for a step with `n_micro_batches`. It is
    SIMULATED_ROUNDS full rounds (of one micro-batch per pipeline rank) plus the remainder. All are
    simulated if there are at most SIMULATED_ROUNDS + 2 rounds. All are, too, if there is a
    remainder and ranks alternate between several stages, except in a V schedule."""
    p, M = layout.pipeline, n_micro_batches
    turns = layout.virtual_stages > 1 and not layout.turns_back
    if (SIMULATED_ROUNDS + 2) * p >= M or (turns and M % p):
        return M
    return SIMULATED_ROUNDS * p + M % p


def _order_settings(layout: Layout) -> Layout:
    """Return a Layout with only the settings that determine the pass order, as a cache key."""
    return Layout(
        pipeline=layout.pipeline, schedule=layout.schedule, virtual_stages=layout.virtual_stages
    )


class _Order:
    """Builds the order in which one pipeline rank makes its passes. `seen` counts the passes added
    so far, by kind and stage."""

    def __init__(self, layout: Layout, n_micro_batches: int) -> None:
        self.numbers = array("l")
        self.seen = [0] * (len(KINDS) * layout.n_stages)
        self._n_stages, self._n_micro_batches = layout.n_stages, n_micro_batches

    def add(self, stage: int, *kinds: int) -> None:
        """Append, for each kind in turn, the stage's pass for its next micro-batch; passes beyond
        the last micro-batch are counted in `seen` but not appended."""
        for kind in kinds:
            row = kind * self._n_stages + stage
            if self.seen[row] < self._n_micro_batches:
                self.numbers.append(row * self._n_micro_batches + self.seen[row])
            self.seen[row] += 1


@lru_cache(maxsize=64)
def _orders(pipeline: Layout, n_micro_batches: int) -> tuple[array[int], ...]:
    """Return each pipeline rank's passes in order, as pass numbers: (kind · stages + stage) ·
    micro-batches + micro-batch."""
    return tuple(
        _order(pipeline, n_micro_batches, coordinate) for coordinate in range(pipeline.pipeline)
    )


def _order(layout: Layout, n_micro_batches: int, coordinate: int) -> array[int]:
    """Return the pass numbers, in order, for the rank at this `pipeline` coordinate.

    First come only forward passes, to fill the pipeline; then forward and backward passes in
    alternation; then the remaining backward passes. A rank with several stages runs a round of
    micro-batches through one stage, then through the next.
    """
    p, v, m = layout.pipeline, layout.virtual_stages, n_micro_batches
    round_size = m // max(1, m // p)
    hops = p - 1 - coordinate
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
            return _v_order(layout, n_micro_batches, coordinate)
        case unknown:
            refuse_unknown(unknown, "parallel.schedule", "the timeline")
    forward_stages = layout.stages_of(coordinate)
    backward_stages = forward_stages[::-1]
    order = _Order(layout, m)
    add = order.add
    for number in range(warm_up):
        add(forward_stages[number // round_size % v], FORWARD)
    for number in range(v * m):
        if warm_up + number < v * m:
            add(forward_stages[(warm_up + number) // round_size % v], FORWARD)
        add(backward_stages[number // round_size % v], BACKWARD_INPUT if split else BACKWARD)
        if split and number >= coordinate:
            add(backward_stages[(number - coordinate) // round_size % v], BACKWARD_WEIGHT)
    if split:
        for number in range(max(0, v * m - coordinate), v * m):
            add(backward_stages[number // round_size % v], BACKWARD_WEIGHT)
    return order.numbers


def _v_order(layout: Layout, n_micro_batches: int, coordinate: int) -> array[int]:
    """Return the pass numbers, in order, for one rank in a V schedule (ZB-V, Qi et al. 2023,
    section 6).

    The order is that for 2p - 1 micro-batches or more on p ranks; with fewer, the passes for
    missing ones are dropped.
    """
    p, n_stages = layout.pipeline, layout.n_stages
    down, up = layout.stages_of(coordinate)
    m = max(2 * p - 1, n_micro_batches)
    order = _Order(layout, n_micro_batches)
    add, seen = order.add, order.seen
    forward_down, forward_up = (FORWARD * n_stages + stage for stage in (down, up))
    for _ in range(2 * (p - coordinate) - 1):
        add(down, FORWARD)
    for _ in range(coordinate):
        add(up, FORWARD)
        add(down, FORWARD)
    for _ in range(p - coordinate):
        add(up, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    while seen[forward_up] < m:
        if seen[forward_down] < m:
            add(down, FORWARD)
        add(down, BACKWARD_INPUT, BACKWARD_WEIGHT)
        add(up, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for _ in range(coordinate):
        add(down, BACKWARD_INPUT)
        add(up, BACKWARD_INPUT)
    for _ in range(p - coordinate):
        add(down, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for stage in (up, down):
        for _ in range(m - seen[BACKWARD_WEIGHT * n_stages + stage]):
            add(stage, BACKWARD_WEIGHT)
    return order.numbers


# -- results that follow from the order alone ---------------------------------------------------


def _needs_by_row(layout: Layout) -> list[int]:
    """Return a list that says, for a pass of each kind and stage (at index kind · stages + stage),
    whose result it reads: the number to add to its stage to get the other stage; 0 if it reads
    none."""
    n = layout.n_stages
    steps = {FORWARD: -1, BACKWARD: 1, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 0}
    return [step if 0 <= stage + step < n else 0 for step in steps.values() for stage in range(n)]


def _readers_by_row(layout: Layout) -> list[int]:
    """Return, at index kind · stages + stage, the `pipeline` coordinate of the rank that reads a
    pass's result; the pass's own rank if no other stage reads it."""
    place_of, n = layout.pipeline_rank_of_stage, layout.n_stages
    steps = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: -1, BACKWARD_WEIGHT: 0}
    return [
        place_of.get(stage + step, place_of[stage]) for step in steps.values() for stage in range(n)
    ]


@lru_cache(maxsize=64)
def _passes(pipeline: Layout, n_micro_batches: int) -> _Passes:
    """Return the passes of all pipeline ranks in one order in which they can run: each comes after
    the pass whose result it reads. `pipeline` is a layout reduced to the settings that matter here,
    by `_order_settings`."""
    m, orders = n_micro_batches, _orders(pipeline, n_micro_batches)
    needs_of, readers = _needs_by_row(pipeline), _readers_by_row(pipeline)
    index_of = array("l", [-1]) * (len(KINDS) * pipeline.n_stages * m)
    found = _Passes(array("l"), array("l"), array("l"), array("l"), b"")
    sends = bytearray()
    done = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        for coordinate, order in enumerate(orders):
            first = index = done[coordinate]
            while index < len(order):
                number = order[index]
                row = number // m
                step = needs_of[row]
                need = index_of[number + step * m] if step else -1
                if step and need < 0:
                    break
                index_of[number] = len(sends)
                found.numbers.append(number)
                found.coordinates.append(coordinate)
                found.rows.append(row)
                found.needs.append(need)
                sends.append(readers[row] != coordinate)
                index += 1
            done[coordinate] = index
            left -= index - first
    return found._replace(sends=bytes(sends))


@lru_cache(maxsize=256)
def _under_way(pipeline: Layout, n_micro_batches: int) -> tuple[UnderWay, ...]:
    m, n = n_micro_batches, pipeline.n_stages
    found = []
    for coordinate, numbers in enumerate(_orders(pipeline, n_micro_batches)):
        local_index = {stage: index for index, stage in enumerate(pipeline.stages_of(coordinate))}
        counts = [0] * (2 * len(local_index))
        before: set[tuple[int, ...]] = set()
        later: set[tuple[int, ...]] = set()
        for number in numbers:
            kind, stage = divmod(number // m, n)
            index = local_index[stage]
            if kind == FORWARD:
                counts[index] += 1
            elif kind == BACKWARD_INPUT:
                counts[len(local_index) + index] += 1
            else:
                (later if later else before).add(tuple(counts))  # until then the counts only grow
                counts[index] -= 1
                counts[len(local_index) + index] -= kind == BACKWARD_WEIGHT
                later.add(tuple(counts))
        ever, after = (
            np.array(sorted(rows), dtype=int).reshape(-1, len(counts))
            for rows in (before | later, later)
        )
        found.append(UnderWay(ever, after))
    return tuple(found)


def passes_under_way(layout: Layout, n_micro_batches: int) -> tuple[UnderWay, ...]:
    """Return the counts of passes in flight, for each pipeline rank. GPipe keeps all micro-batches
    in flight; in the other schedules many rounds have no more in flight than a few, so only a few
    are counted."""
    if layout.schedule == "gpipe":
        ever, later = (
            np.array([[n, 0]], dtype=object) for n in (n_micro_batches, n_micro_batches - 1)
        )
        return (UnderWay(ever, later),) * layout.pipeline
    few = simulated_micro_batches(layout, n_micro_batches)
    return _under_way(_order_settings(layout), few)


def waiting_messages(layout: Layout, n_micro_batches: int) -> tuple[int, ...]:
    """Return, for each pipeline rank, the largest number of activations and gradients from other
    stages that have arrived, or may have, and that no pass has read yet. A receive is posted as
    soon as the sending pass has run; ranks take turns pass by pass, as in PyTorch's schedules."""
    few = simulated_micro_batches(layout, n_micro_batches)
    return _waiting_messages(_order_settings(layout), few)


@lru_cache(maxsize=256)
def _waiting_messages(pipeline: Layout, n_micro_batches: int) -> tuple[int, ...]:
    m, orders = n_micro_batches, _orders(pipeline, n_micro_batches)
    needs_of, readers = _needs_by_row(pipeline), _readers_by_row(pipeline)
    place_of, n = pipeline.pipeline_rank_of_stage, pipeline.n_stages
    made = bytearray(len(KINDS) * n * m)
    done, waiting, most = ([0] * len(orders) for _ in range(3))
    left = sum(map(len, orders))
    while left:
        for coordinate, order in enumerate(orders):
            if done[coordinate] == len(order):
                continue
            number = order[done[coordinate]]
            row = number // m
            step = needs_of[row]
            if step and not made[number + step * m]:
                continue
            done[coordinate] += 1
            left -= 1
            made[number] = True
            if step and place_of[row % n + step] != coordinate:
                waiting[coordinate] -= 1
            reader = readers[row]
            if reader != coordinate:
                waiting[reader] += 1
                most[reader] = max(most[reader], waiting[reader])
    return tuple(most)


# -- results that need pass times ---------------------------------------------------------------


@dataclass(frozen=True)
class PipelineTime:
    """The duration of a pipeline's step, simulated from pass times and message times in seconds."""

    layout: Layout
    seconds: tuple[PassSeconds, ...]
    """Pass times for each stage."""
    message_seconds: float
    n_simulated: int
    """Micro-batches that were simulated; the step may have more."""
    length: float
    """Seconds from the first pass's start to the last one's end, for all micro-batches."""

    @cached_property
    def spans(self) -> list[list[Span]]:
        """The passes of each rank, with start and end, for the simulated micro-batches."""
        return timeline(self.layout, self.n_simulated, self.seconds, self.message_seconds)


def pipeline_time(
    layout: Layout,
    n_micro_batches: int,
    seconds: Sequence[PassSeconds],
    message_seconds: float = 0.0,
) -> PipelineTime:
    """Return a step's PipelineTime. `seconds` holds each stage's pass times for one micro-batch,
    `message_seconds` the time for a message between ranks. With many micro-batches only some rounds
    are simulated (`simulated_micro_batches`), and each omitted round adds as much time as the last
    simulated one."""
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
    """Simulate a pipeline's step; return each rank's passes with start and end in seconds.

    `seconds` holds the pass times for each stage. A pass starts once its rank is free and its input
    has been computed and has arrived from another rank. A message takes `message_seconds`, and
    starts after those that its rank sent before.
    """
    passes = _passes(_order_settings(layout), n_micro_batches)
    starts, ends = _simulated(layout, n_micro_batches, seconds, message_seconds)
    made: list[list[Span]] = [[] for _ in range(layout.pipeline)]
    for coordinate, number, start, end in zip(
        passes.coordinates, passes.numbers, starts, ends, strict=True
    ):
        row, micro_batch = divmod(number, n_micro_batches)
        kind, stage = divmod(row, layout.n_stages)
        made[coordinate].append(Span(Pass(KINDS[kind], stage, micro_batch), start, end))
    return made


def _simulated(
    layout: Layout, n_micro_batches: int, seconds: Sequence[PassSeconds], message_seconds: float
) -> tuple[list[float], list[float]]:
    """Return two lists, the start and the end in seconds for each pass, in the order of
    `_passes`."""
    passes = _passes(_order_settings(layout), n_micro_batches)
    takes = _seconds_by_row(seconds)
    free, sent = [0.0] * layout.pipeline, [0.0] * layout.pipeline
    starts: list[float] = []
    ends: list[float] = []
    arrived: list[float] = []  # when a pass's result has reached its reader
    columns = (passes.coordinates, passes.rows, passes.needs, passes.sends)
    for coordinate, row, need, sends in zip(*columns, strict=True):
        start = free[coordinate]
        if need >= 0 and arrived[need] > start:
            start = arrived[need]
        end = free[coordinate] = start + takes[row]
        starts.append(start)
        ends.append(end)
        if sends:
            end = sent[coordinate] = max(end, sent[coordinate]) + message_seconds
        arrived.append(end)
    return starts, ends


def _seconds_by_row(seconds: Sequence[PassSeconds]) -> list[float]:
    """Return each pass's seconds as one list: all stages' forward passes, whole backward passes,
    backward passes for inputs, and backward passes for weights, so that a pass is at index
    kind · stages + stage. The first stage has no backward pass for its input (0 s): nobody waits
    for that gradient, and PyTorch computes it with those for the weights."""
    both = [each.backward_input + each.backward_weight for each in seconds]
    inputs = [0.0, *(each.backward_input for each in seconds[1:])]
    weights = [both[0], *(each.backward_weight for each in seconds[1:])]
    return [*(each.forward for each in seconds), *both, *inputs, *weights]


def idle_fraction(length: float, busy: float) -> float:
    """Return idle time ÷ busy time for a pipeline's mean rank, which computes for `busy` seconds in
    a step that takes `length` seconds."""
    return length / busy - 1


def planned_bubble(step: Step) -> float:
    """Return the pipeline's idle time ÷ busy time in a step of several stages. It is simulated
    without a cluster: a pass takes time in proportion to its multiplications per token, and
    messages take none."""
    layout, n_micro_batches = step.layout, step.n_micro_batches
    seconds = pass_seconds(step)
    busy = n_micro_batches * sum(map(sum, seconds))
    length = pipeline_time(layout, n_micro_batches, seconds).length
    return idle_fraction(length, busy / layout.pipeline)
