"""Pipeline timelines: PyTorch's own orders, the textbook's bubbles."""

import itertools
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.costs import PassSeconds
from pentameter.estimating.bytes.plan_estimates import plan_record
from pentameter.estimating.seconds.timeline import (
    idle_fraction,
    passes_under_way,
    pipeline_time,
    timeline,
    waiting_messages,
)
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.plan import make_plan

TORCHS = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}
LETTERS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
CASES = [
    (name, p, v, m)
    for name in TORCHS
    for p in (2, 3, 4)
    for v in (1, 2, 3)
    for m in (2, 4, 6, 12)
    if (v == 2 if name == "zero-bubble-v" else m % max(1, m // p) == 0)
]


def layout(name, p, v=1):
    return Layout(pipeline=p, schedule=name, virtual_stages=v)


def pass_order(where, m):
    """Return, for each pipeline rank, its passes in the order in which the schedule runs them."""
    spans = timeline(where, m, [PassSeconds(1.0, 1.0, 1.0)] * where.n_stages)
    return [[span.done for span in process] for process in spans]


def bubble_fraction(spans):
    """Return the ranks' idle time ÷ their compute time over a whole step."""
    busy = sum(span.end - span.start for process in spans for span in process)
    length = max(span.end for process in spans for span in process)
    return idle_fraction(length, busy / len(spans))


def bubble(name, p, m, v=1, seconds=(1.0, 1.0, 1.0)):
    where = layout(name, p, v)
    return bubble_fraction(timeline(where, m, [PassSeconds(*seconds)] * where.n_stages))


def torchs(name, p, v, m):
    stages = [
        SimpleNamespace(
            group_size=p, group_rank=0, num_stages=p * v, stage_index=number, submod=None
        )
        for number in layout(name, p, v).stages_of(0)
    ]
    return TORCHS[name](stages, m)


@pytest.mark.parametrize(("name", "p", "v", "m"), CASES)
def test_the_order_is_torchs(name, p, v, m):
    theirs = torchs(name, p, v, m).pipeline_order
    for place, passes in enumerate(pass_order(layout(name, p, v), m)):
        assert [tuple(one) for one in passes] == [
            (LETTERS[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in theirs[place]
            if action is not None
        ]


@pytest.mark.parametrize(("name", "p", "v", "m"), CASES)
def test_as_many_messages_wait_as_in_torchs_lists(name, p, v, m):
    """Torch's have idle turns in them, for which one more may be asked for ahead."""
    theirs = torchs(name, p, v, m).pipeline_order_with_comms
    planned = waiting_messages(layout(name, p, v), m)
    for place, actions in theirs.items():
        waiting = most = 0
        for stage, kind, *_ in actions:
            place_of = layout(name, p, v).pipeline_rank_of_stage
            received, returned = (place_of.get(n, place) != place for n in (stage - 1, stage + 1))
            waiting += kind.value in ("RECV_F", "RECV_B")
            waiting -= (kind.value == "F" and received) or (kind.value in "BI" and returned)
            most = max(most, waiting)
        assert waiting == 0
        assert planned[place] <= most <= planned[place] + 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_few_messages_wait_where_a_process_has_one_stage(name):
    for p in (2, 3, 4):
        for m in (p, 4 * p):
            assert max(waiting_messages(layout(name, p), m)) <= 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_each(name):
    """GPipe waits as long as 1F1B does, which only holds fewer micro-batches."""
    for p, m in ((2, 2), (2, 8), (4, 4), (4, 16)):
        assert bubble(name, p, m) == pytest.approx((p - 1) / m)


def test_1f1b_holds_fewer_micro_batches():
    def held(name):
        (first, *_) = pass_order(layout(name, 4), 16)
        steps = [1 if one.kind == "forward" else -1 for one in first]
        return max(sum(steps[: i + 1]) for i in range(len(steps)))

    assert held("gpipe") == 16
    assert held("1f1b") == 4


def test_several_stages_each_wait_less():
    for p, m, v in ((2, 2, 2), (2, 8, 4), (4, 8, 2)):
        assert bubble("interleaved", p, m, v) == pytest.approx((p - 1) / (v * m))


def test_splitting_the_backward_pass_leaves_a_third():
    for p, m in ((2, 2), (2, 8), (4, 8)):
        assert bubble("zero-bubble", p, m) == pytest.approx((p - 1) / (3 * m))


def test_a_v_waits_as_little_as_zero_bubble_and_holds_as_little_as_1f1b():
    """Each of its stages is half as deep. Where all three passes take as long, nobody waits but at
    the two ends."""

    def held(name, p, m):
        steps = {"forward": 1, "backward_weight": -1}
        each = (
            [steps.get(one.kind, 0) for one in own] for own in pass_order(layout(name, p, 2), m)
        )
        return max(max(itertools.accumulate(own)) for own in each)

    for p, m in ((2, 4), (2, 12), (4, 12)):
        assert bubble("zero-bubble-v", p, m, 2) == pytest.approx((p - 1) / (3 * 2 * m))
        assert held("zero-bubble-v", p, m) == 2 * p <= held("zero-bubble", p, m)


def test_uneven_stages_wait_for_the_slowest():
    seconds = [PassSeconds(1, 1, 1), PassSeconds(2, 2, 2)]
    spans = timeline(layout("gpipe", 2), 8, seconds)
    # the slow stage is idle for the others' first forward and last backward pass alone
    assert bubble_fraction(spans) == pytest.approx(2 * (8 * 6 + 3) / (8 * 9) - 1)


def test_the_plan_has_it():
    values = {"model.vocab_size": 64, "train.micro_batch_size": 8}
    config = load_config("shakespeare-char", values)
    assert plan_record(make_plan(config))["time"]["bubble_fraction"] == 0
    config = load_config("shakespeare-char", {**values, "parallel.pipeline": 2})
    plan = make_plan(config, world_size=2)
    # 8 micro-batches, and the head, 0.4 % of the last stage's work, for which both wait
    assert plan_record(plan)["time"]["bubble_fraction"] == pytest.approx(1 / 8, rel=0.05)
    full = {**values, "parallel.pipeline": 2, "train.activation_checkpoint": "full"}
    again = make_plan(load_config("shakespeare-char", full), world_size=2)
    assert plan_record(again)["time"]["bubble_fraction"] == pytest.approx(1 / 8, rel=0.05)


def test_messages_of_a_process_wait_for_one_another():
    """GPipe's forward passes of 1 s, whose messages take 3: the last of four arrives after all."""
    spans = timeline(layout("gpipe", 2), 4, [PassSeconds(1.0, 1.0, 1.0)] * 2, 3.0)
    starts = [span.start for span in spans[1] if span.done.kind == "forward"]
    assert starts == [4.0, 7.0, 10.0, 13.0]


def test_a_pipeline_that_is_too_deep_is_refused_before_it_is_simulated():
    deep = {"model.vocab_size": 64, "model.n_layers": 10_000, "train.batch_size": 40_000}
    config = load_config("shakespeare-char", {**deep, "parallel.pipeline": 10_000})
    with pytest.raises(ConfigError, match=r"of 10000 stages.*parallel\.pipeline=256"):
        make_plan(config, world_size=10_000)


def test_many_micro_batches_are_not_simulated_one_by_one():
    seconds = [PassSeconds(1.0, 1.0, 1.0)] * 4
    long = pipeline_time(layout("1f1b", 4), 1_000_001, seconds)
    assert long.n_simulated < 30
    assert long.length == pytest.approx(3 * (1_000_001 + 3))
    (every,) = {each.ever.tolist()[0][0] for each in passes_under_way(layout("gpipe", 4), 10**9)}
    assert every == 10**9


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "zero-bubble-v"])
def test_rounds_of_another_length_are_simulated_whole(name):
    """63 micro-batches of 8 processes go in rounds of nine."""
    where, seconds = layout(name, 8, 2), [PassSeconds(1.0, 1.0, 1.0)] * 16
    spans = timeline(where, 63, seconds)
    assert pipeline_time(where, 63, seconds).length == pytest.approx(
        max(span.end for process in spans for span in process), rel=0.01
    )


@pytest.mark.parametrize(("name", "p", "v", "m"), CASES)
def test_what_is_under_way_is_counted_as_the_passes_go(name, p, v, m):
    where = layout(name, p, v)
    sizes = [3, 5, 7, 2, 4, 6][: 2 * v]
    for place, passes in enumerate(pass_order(where, m)):
        own = where.stages_of(place)
        held = ever = later = 0
        for one in passes:
            index = own.index(one.stage)
            if one.kind == "forward":
                held += sizes[index]
            elif one.kind == "backward_input":
                held += sizes[v + index]
            else:
                held -= sizes[index] + (sizes[v + index] if one.kind == "backward_weight" else 0)
            ever = max(ever, held)
            has_gradients = later or one.kind in ("backward", "backward_weight")
            later = max(later, held, 1) if has_gradients else 0
        found = passes_under_way(where, m)[place].peaks(sizes)
        assert (found[0], max(found[1], 1)) == (ever, later)


def test_more_bytes_than_64_bits_hold_do_not_wrap_around():
    order = Layout(pipeline=4)
    (few, *_), (first, *_) = (passes_under_way(order, m) for m in (2, 8))
    assert first.peaks([2**61, 0])[0] == 4 * 2**61
    assert first.peaks([2**70, 0])[0] == 4 * 2**70
    assert few.peaks([2**61, 0])[0] == 2 * 2**61
