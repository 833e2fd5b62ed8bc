"""The search: what it finds fits, nothing legal is faster, and its bound is one."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.changes import settings_that_fit
from pentameter.estimating.bytes.fit import MEMORY_MARGIN, memory_verdict
from pentameter.estimating.bytes.memory import step_memory
from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.estimating.search.candidates import Candidates
from pentameter.estimating.search.search import (
    first_change,
    reasons,
    search,
    why_nothing_fits,
)
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.estimating.seconds.estimate import make_estimate
from pentameter.estimating.seconds.step_time import step_time
from pentameter.planning.plan import make_plan
from pentameter.report.plan.plan_text import plan_text

SMALL = {
    "model.vocab_size": 50304,
    "model.n_layers": 8,
    "model.attention.n_heads": 8,
    "model.d_model": 1024,
    "model.context_length": 1024,
    "train.batch_size": 32,
    "train.precision": "bf16",
}


@pytest.fixture(scope="module")
def small():
    return load_config("quickstart", SMALL), parse_cluster("a100-40gb:4x1")


def candidates(config, cluster):
    return Candidates(make_plan(config, world_size=1), cluster, "bf16")


def with_memory(cluster, n_bytes):
    device = cluster.device.model_copy(update={"memory_bytes": float(n_bytes)})
    return cluster.model_copy(update={"device": device})


def test_no_step_is_faster_than_its_bound(small):
    config, cluster = small
    every = list(candidates(config, cluster))
    assert len(every) > 100
    for each in every[::17]:
        took = step_time(each.step, cluster).seconds
        assert each.bound <= took * (1 + 1e-9), each.step.layout


def test_it_finds_the_fastest_that_fits(small):
    config, cluster = small
    found = search(config, cluster, n_best=3, most_timed=10_000)
    assert found.is_complete
    assert all(each.fits for each in found.estimates)
    times = [each.time.seconds for each in found.estimates]
    assert times == sorted(times)
    fastest = min(
        step_time(each.step, cluster).seconds
        for each in candidates(config, cluster)
        if each.bound < 2 * times[0]
        and memory_verdict(step_memory(each.step).total_bytes, cluster.usable_bytes) == "fits"
    )
    assert times[0] == pytest.approx(fastest)
    assert len({str(each.plan.layout) for each in found.estimates}) == 3
    assert reasons(found.estimates[0], found.estimates[2])


def test_all_that_fits_is_a_candidate_wherever_the_experts_are(small):
    config, cluster = small
    sizes = {"n_layers": 4, "n_experts": 4, "d_expert": 64, "dense_layers": [0, 3], "d_ff": 32768}
    config = load_config(config, {"model": sizes})
    every = {
        (each.step.layout, each.step.config.train): each for each in candidates(config, cluster)
    }
    memory = {key: step_memory(each.step).total_bytes for key, each in every.items()}
    smaller = with_memory(cluster, sorted(memory.values())[len(memory) // 2] + 1.5e9)
    fitting = {key for key, n_bytes in memory.items() if n_bytes <= smaller.usable_bytes}
    listed = {(each.step.layout, each.step.config.train) for each in candidates(config, smaller)}
    assert fitting <= listed


def test_what_is_tight_ranks_below_what_fits(small):
    config, cluster = small
    least = {}
    for each in candidates(config, cluster):
        needed = step_memory(each.step).total_bytes
        least[each.degrees] = min(needed, least.get(each.degrees, needed))
    most = max(least.values())  # of a mesh whose smallest layout is to be tight
    assert min(least.values()) * (1 + MEMORY_MARGIN) < most
    narrow = with_memory(cluster, 1.05 * most + 1.5e9)
    found = search(config, narrow, n_best=50, most_timed=10_000)
    verdicts = [each.verdict for each in found.estimates]
    assert set(verdicts) == {"fits", "tight"}
    assert verdicts == sorted(verdicts)  # all that fit, then all that are tight
    for verdict in ("fits", "tight"):
        times = [each.time.seconds for each in found.estimates if each.verdict == verdict]
        assert times == sorted(times)
    assert {each.verdict for each in search(config, narrow, n_best=1).estimates} == {"fits"}
    (only,) = search(config, narrow, allowed=lambda each: least[each.degrees] == most).estimates
    assert only.verdict == "tight"


def test_what_is_tight_alone_is_found_and_said(small):
    config, cluster = small
    found = search(config, cluster, n_best=1)
    least = min(step_memory(each.step).total_bytes for each in candidates(config, cluster))
    tiny = with_memory(cluster, least + 1.5e9 + 1)
    (only, *_) = search(config, tiny).estimates
    assert only.verdict == "tight"
    assert not only.fits
    assert any(line.startswith("tight: 0.0 GB of") for line in only.warnings())
    assert found.estimates[0].verdict == "fits"
    assert not any(line.startswith("tight") for line in found.estimates[0].warnings())


@pytest.mark.parametrize(
    ("planned", "verdict"),
    [(100, "fits"), (100 + 1e-6, "tight"), (110, "tight"), (110.1, "does not fit")],
)
def test_a_verdict_leaves_the_margin(planned, verdict):
    assert memory_verdict(planned, 100 * (1 + MEMORY_MARGIN)) == verdict


def test_what_may_not_be_is_left_out(small):
    config, cluster = small
    found = search(config, cluster, n_best=2, allowed=lambda each: each.step.layout.pipeline == 4)
    assert {each.plan.layout.pipeline for each in found.estimates} == {4}
    nothing = search(config, cluster, allowed=lambda each: False)
    assert nothing.estimates == ()


def test_settings_that_fit_are_those_of_a_command_line(small):
    config, cluster = small
    estimate = search(config, cluster, n_best=1).estimates[0]
    needed = estimate.memory.total_bytes
    ways = settings_that_fit(estimate.plan, 0.8 * needed, "bf16")
    assert [verdict for _, verdict in ways] == sorted(verdict for _, verdict in ways)
    for options, verdict in ways:
        changed = load_config(estimate.plan.portable_config, options.split())
        took = plan_memory(make_plan(changed, world_size=4), "bf16").total_bytes
        assert memory_verdict(took, 0.8 * needed) == verdict != "does not fit"
    assert settings_that_fit(estimate.plan, 1.0, "bf16") == []


def test_the_first_change_is_faster(small):
    config, cluster = small
    slow = load_config(config, {"train.activation_checkpoint": "full"})
    found = make_estimate(slow, cluster)
    words, changed = first_change(found)
    assert words.startswith("--")
    assert changed.time.seconds < found.time.seconds


@functools.cache
def fastest_with(memory_bytes):
    config, cluster = load_config("quickstart", SMALL), parse_cluster("a100-40gb:4x1")
    found = search(config, with_memory(cluster, memory_bytes))
    assert found.is_complete
    return found.estimates[0].time.seconds if found.estimates else None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_no_layout_by_hand_that_fits_is_faster(data):
    """In devices of several sizes, of which the smallest holds few layouts."""
    memory = data.draw(st.sampled_from([2.8e9, 3.6e9, 6e9, 42.4e9]), "bytes")
    tensor, pipeline = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]))
    schedules = ["1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v"]
    schedule = data.draw(st.sampled_from(schedules), "schedule") if pipeline > 1 else "1f1b"
    stages = {"interleaved": [2, 4 // pipeline * 2], "zero-bubble": [1, 2], "zero-bubble-v": [2]}
    v = data.draw(st.sampled_from(stages.get(schedule, [1])), "stages")
    zero = data.draw(st.integers(0, 3), "zero")
    sequence = tensor > 1 and data.draw(st.booleans(), "sequence")
    layout = f"tensor={tensor},pipeline={pipeline},schedule={schedule},virtual_stages={v}"
    layout += f",zero={zero},sequence={sequence}"
    by_hand = {
        "train.micro_batch_size": data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]), "micro"),
        "train.activation_checkpoint": data.draw(st.sampled_from([None, "selective", "full"])),
    }
    cluster = with_memory(parse_cluster("a100-40gb:4x1"), memory)
    try:
        estimate = make_estimate(
            load_config("quickstart", {**SMALL, **by_hand}), cluster, layout=layout
        )
    except ConfigError:
        return  # not legal
    if estimate.fits:
        fastest = fastest_with(memory)
        assert fastest is not None
        assert fastest <= estimate.time.seconds * (1 + 1e-9), str(estimate.plan.layout)


def test_what_does_not_fit_is_not_counted_among_the_timed():
    """Of llama3-8b's hundreds of candidates on four small devices, the fastest of which are too
    large, a few fit."""
    config, cluster = load_config("llama3-8b"), parse_cluster("a100-40gb:4x1")
    found = search(config, cluster, most_timed=20)
    assert found.estimates
    assert found.n_too_large > 60
    assert found.is_complete
    by_hand = load_config(config, SMALLEST)
    for layout in ("tensor=4,sequence=true", "zero=3"):
        estimate = make_estimate(by_hand, cluster, layout=layout)
        if estimate.fits:
            assert found.estimates[0].time.seconds <= estimate.time.seconds


SMALLEST = {"train.micro_batch_size": 1, "train.activation_checkpoint": "full"}


def test_where_nothing_fits_the_nearest_is_named(small):
    config, cluster = small
    tiny = with_memory(cluster, 2.3e9)
    found = search(config, tiny)
    assert found.estimates == ()
    assert not found.nearest.fits
    said = why_nothing_fits(config, tiny, found)
    assert str(found.nearest.plan.layout) in said
    assert "GB more than the 0.8 GB of a device" in said
    odd = load_config(
        config, {"train.batch_size": 1, "model.attention.n_heads": 1, "model.n_layers": 1}
    )
    nothing = search(odd, cluster)
    assert "raise train.batch_size" in why_nothing_fits(odd, cluster, nothing)


def test_adapters_need_room_for_their_own_gradients_alone(small):
    """A frozen model has neither gradients nor an optimizer's state."""
    config, cluster = small
    adapted = load_config(config, {"lora.rank": 4})
    found = search(adapted, with_memory(cluster.resized(1), 3.2e9), n_best=1)
    assert found.estimates[0].fits
    assert search(config, with_memory(cluster.resized(1), 3.2e9)).estimates == ()


def test_an_offloaded_state_takes_no_room_in_the_device(small):
    config, cluster = small
    one = with_memory(cluster.resized(1), 3.5e9)
    offloaded = load_config(config, {"train.offload": True, "parallel.zero": 1})
    found = search(offloaded, one, n_best=1)
    assert found.estimates[0].plan.config.train.offload
    assert found.estimates[0].plan.layout.zero > 0
    assert found.estimates[0].fits
    assert search(config, one).estimates == ()


def test_layouts_that_take_the_same_time_do_not_beat_each_other(small):
    found = search(*small, n_best=2)
    first, second = found.estimates
    told = " ".join(map(str, plan_text(first, found, None)))
    assert (
        f"The first beats the second by {second.time.seconds / first.time.seconds - 1:.1%}" in told
    )
    same = replace(found, estimates=(first, first))
    told = " ".join(map(str, plan_text(first, same, None)))
    assert "The first and the second take the same time." in told
    assert "beats" not in told
