"""The step time and memory of mixtures of experts: what exchange, experts' sizes and imbalance
cost, and that the search finds their degrees."""

import pytest

from pentameter.config.files.load import load_config
from pentameter.estimating.bytes.communication import communication_of_stages
from pentameter.estimating.bytes.plan_estimates import step_of
from pentameter.estimating.search.candidates import Candidates
from pentameter.estimating.search.search import search
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.estimating.seconds.estimate import make_estimate
from pentameter.estimating.seconds.step_time import step_time
from pentameter.planning.plan import make_plan

MIXTURE = {
    "model.vocab_size": 50304,
    "model.n_layers": 8,
    "model.attention.n_heads": 16,
    "model.d_model": 2048,
    "model.context_length": 2048,
    "model.experts.count": 16,
    "model.experts.per_token": 4,
    "model.experts.width": 1024,
    "train.batch_size": 64,
    "train.micro_batch_size": 1,
    "train.precision": "bf16",
}


def estimate(layout, cluster="h100-80gb:8x2", *, imbalance=1.0, **changes):
    config = load_config("quickstart", {**MIXTURE, **changes})
    return make_estimate(config, parse_cluster(cluster), layout=layout, imbalance=imbalance)


@pytest.mark.parametrize(
    "layout",
    [
        "data=16,expert=8",
        "data=8,tensor=2,sequence=true,zero=1,expert=4,expert_tensor=2",
        "data=4,pipeline=4,zero=1,expert=4,schedule=interleaved,virtual_stages=2",
    ],
)
def test_the_parts_of_a_step_add_up(layout):
    time = estimate(layout).time
    parts = time.compute + time.bubble + sum(time.exposed.values()) + time.optimizer
    assert parts == pytest.approx(time.seconds, rel=1e-6)
    assert time.exposed["expert"] > 0


def test_an_exchange_between_nodes_takes_longer():
    inside, between = estimate("data=16,expert=8"), estimate("data=16,expert=16")
    assert inside.links()["expert"] == "inside a node"
    assert between.links()["expert"] == "between nodes"
    waits = [found.time.exposed["expert"] for found in (inside, between)]
    counting = 4 * 8 * inside.cluster.device.calibration.counts_seconds
    assert waits[1] - counting > 3 * (waits[0] - counting) > 0


def test_shared_experts_hide_the_way_to_the_others():
    """Two of the four ways are hidden (rows and gradients, there and back), less what is slowed."""
    layout, width = "data=16,expert=16", {"model.experts.n_shared": 64}
    bare, beside = estimate(layout).time, estimate(layout, **width).time
    assert "expert" not in bare.hidden
    assert beside.hidden["expert"] + beside.exposed["expert"] == pytest.approx(
        bare.exposed["expert"], rel=1e-6
    )
    calibration = parse_cluster("h100-80gb:8x2").device.calibration
    sent = bare.exposed["expert"] - 4 * 8 * calibration.counts_seconds
    hidden = sent / 2 * (1 - calibration.interference_share)
    assert beside.hidden["expert"] == pytest.approx(hidden, rel=1e-6)
    less = estimate(layout, **{"model.experts.n_shared": 1}).time
    assert 0 < less.hidden["expert"] < beside.hidden["expert"]
    # Their own collectives take the links, with tensor parallelism.
    tensor = estimate("data=8,tensor=2,sequence=true,zero=1,expert=4", **width).time
    assert "expert" not in tensor.hidden


def test_few_tokens_for_each_of_many_experts_multiply_slowly():
    """The same arithmetic: half as wide experts, twice as many and twice as many chosen."""
    wide = estimate("data=16,expert=8").time.compute
    narrow = {"model.experts.count": 32, "model.experts.per_token": 8, "model.experts.width": 512}
    assert estimate("data=16,expert=8", **narrow).time.compute > 1.1 * wide


def test_the_busiest_rank_is_waited_for_and_filled():
    even, uneven = (estimate("data=16,expert=8", imbalance=n) for n in (1.0, 1.5))
    assert uneven.time.compute > even.time.compute
    assert uneven.time.exposed["expert"] > even.time.exposed["expert"]
    assert uneven.memory.activations_bytes > even.memory.activations_bytes
    assert even.to_json()["imbalance"] == 1.0
    # No rank gets more than all rows, and alone none gets more than another.
    most, beyond = (estimate("data=16,expert=2", imbalance=n).time.seconds for n in (2.0, 9.0))
    assert most == beyond
    whole, same = (estimate("data=16", imbalance=n).time.seconds for n in (1.0, 1.5))
    assert whole == same


def test_first_layers_without_experts_are_a_stage_of_their_own_kind():
    found = estimate("data=4,pipeline=4,expert=4", **{"model.experts.dense_layers": 3})
    of_stages = communication_of_stages(step_of(found.plan, "bf16"))
    exchanged = [sent.get(("expert", "all_to_all")) for sent in of_stages]
    assert exchanged[0] is None  # layers 0 and 1
    assert [each.calls for each in exchanged[1:]] == [found.plan.n_micro_batches * n
                                                      for n in (5, 10, 10)]  # fmt: skip


def test_no_step_with_experts_is_faster_than_its_bound():
    config = load_config("quickstart", {**MIXTURE, "model.experts.dense_layers": 1})
    cluster = parse_cluster("h100-80gb:4x1")
    every = list(Candidates(make_plan(config, world_size=1), cluster, "bf16"))
    assert {each.step.layout.expert for each in every} == {1, 2, 4}
    for each in every[::97]:
        took = step_time(each.step, cluster).seconds
        assert each.bound <= took * (1 + 1e-9), each.step.layout


def test_a_search_finds_expert_degrees():
    config, cluster = load_config("quickstart", MIXTURE), parse_cluster("h100-80gb:8x1")
    best = search(config, cluster, n_best=1).estimates[0]
    by_hand = estimate("data=8,expert=8,zero=1", "h100-80gb:8x1", **{"train.micro_batch_size": 8})
    assert by_hand.fits
    assert best.time.seconds <= by_hand.time.seconds
