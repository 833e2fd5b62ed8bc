"""The order of a pipeline's passes over micro-batches, and the time it leaves processes idle.

The orders are those of PyTorch's schedules: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush,
Narayanan et al. 2021), its interleaved form (Megatron-LM, Narayanan et al. 2021) and zero-bubble
ZB1P (Qi et al. 2023), the latter two for any number of stages per process, and ZB-V (the same).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import Config
from pentameter.planning.costs import PassSeconds, pass_seconds
from pentameter.planning.layout import Layout

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


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


def pass_order(layout: Layout, n_micro_batches: int) -> list[list[Pass]]:
    """The passes that each process of the pipeline makes, in order."""
    return [_order(layout, n_micro_batches, place) for place in range(layout.pipeline)]


def _order(layout: Layout, n_micro_batches: int, place: int) -> list[Pass]:
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
    stages = layout.stages_of(place)
    seen: Counter[tuple[Kind, int]] = Counter()
    passes: list[Pass] = []

    def add(kind: Kind, number: int) -> None:
        turn = number // round_size % v
        stage = stages[turn if kind == "forward" else v - 1 - turn]
        passes.append(Pass(kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1

    for number in range(warm_up):
        add("forward", number)
    for number in range(v * m):
        if warm_up + number < v * m:
            add("forward", warm_up + number)
        add("backward_input" if split else "backward", number)
        if split and number >= place:
            add("backward_weight", number - place)
    if split:
        for number in range(max(0, v * m - place), v * m):
            add("backward_weight", number)
    return passes


def _order_of_a_v(layout: Layout, n_micro_batches: int, place: int) -> list[Pass]:
    """The passes of the process at `place` of a V of stages (ZB-V, Qi et al. 2023, section 6).

    The order is that of 2p - 1 micro-batches or more; of fewer those that do not exist drop out.
    """
    p = layout.pipeline
    there, back = layout.stages_of(place)
    m = max(2 * p - 1, n_micro_batches)
    seen: Counter[tuple[Kind, int]] = Counter()
    passes: list[Pass] = []

    def add(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            passes.append(Pass(kind, stage, seen[kind, stage]))
            seen[kind, stage] += 1

    for _ in range(2 * (p - place) - 1):
        add(there, "forward")
    for _ in range(place):
        add(back, "forward")
        add(there, "forward")
    for _ in range(p - place):
        add(back, "forward", "backward_input", "backward_weight")
    while seen["forward", back] < m:
        if seen["forward", there] < m:
            add(there, "forward")
        add(there, "backward_input", "backward_weight")
        add(back, "forward", "backward_input", "backward_weight")
    for _ in range(place):
        add(there, "backward_input")
        add(back, "backward_input")
    for _ in range(p - place):
        add(there, "backward_input", "backward_weight")
    for stage in (back, there):
        for _ in range(m - seen["backward_weight", stage]):
            add(stage, "backward_weight")
    return [one for one in passes if one.micro_batch < n_micro_batches]


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
    place_of = layout.place_of_stage
    waiting = [deque(passes) for passes in pass_order(layout, n_micro_batches)]
    made: list[list[Span]] = [[] for _ in waiting]
    there: dict[Pass, float] = {}  # when what a pass makes is where it is read
    sent = [0.0] * layout.pipeline
    while any(waiting):
        for place, (passes, spans) in enumerate(zip(waiting, made, strict=True)):
            while passes and (needs := _needs(passes[0], layout)) <= there.keys():
                one = passes.popleft()
                start = max([spans[-1].end if spans else 0.0, *(there[need] for need in needs)])
                end = start + _seconds(one, layout, seconds[one.stage])
                spans.append(Span(one, start, end))
                there[one] = end
                if place_of.get(_reading_stage(one), place) != place:
                    there[one] = sent[place] = max(end, sent[place]) + message_seconds
    return made


def waiting_messages(layout: Layout, passes: Sequence[Sequence[Pass]]) -> list[int]:
    """The most activations and gradients at a time that have come to each process, or may come, and
    that no pass has read yet.

    `passes` are those of `pass_order`. A receive is posted as soon as the pass that sends is made,
    where each process makes a pass in turn: so PyTorch orders them.
    """
    place_of = layout.place_of_stage
    queues = [deque(each) for each in passes]
    made: set[Pass] = set()
    waiting, most = [0] * layout.pipeline, [0] * layout.pipeline
    while any(queues):
        for place, queue in enumerate(queues):
            if not queue or not (needs := _needs(queue[0], layout)) <= made:
                continue
            one = queue.popleft()
            made.add(one)
            waiting[place] -= sum(place_of[need.stage] != place for need in needs)
            reader = place_of.get(_reading_stage(one), place)
            if reader != place:
                waiting[reader] += 1
                most[reader] = max(most[reader], waiting[reader])
    return most


def _reading_stage(one: Pass) -> int:
    """The stage that reads what a pass makes; there may be none of that number."""
    match one.kind:
        case "forward":
            return one.stage + 1
        case "backward" | "backward_input":
            return one.stage - 1
        case "backward_weight":
            return one.stage


def _needs(one: Pass, layout: Layout) -> set[Pass]:
    """Results of other stages that a pass starts from."""
    if one.kind == "forward":
        return {one._replace(stage=one.stage - 1)} if one.stage else set()
    if one.kind == "backward_weight" or one.stage == layout.n_stages - 1:
        return set()
    return {one._replace(stage=one.stage + 1)}


def _seconds(one: Pass, layout: Layout, seconds: PassSeconds) -> float:
    if one.kind == "forward":
        return seconds.forward
    both = seconds.backward_input + seconds.backward_weight
    if one.kind == "backward":
        return both
    if one.stage == 0:  # nobody waits for its input's gradient, and PyTorch does it all at once
        return both if one.kind == "backward_weight" else 0.0
    return seconds.backward_input if one.kind == "backward_input" else seconds.backward_weight


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
    return bubble_fraction(timeline(layout, n_micro_batches, pass_seconds(config, stages)))
