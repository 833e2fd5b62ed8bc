"""Every layout is one process: structures that share as little as presets can."""

import pytest
import torch

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.model.experts import Router
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import all_cases, chosen_cases
from pentameter.verify.compare import TOLERANCE, verify_layouts
from pentameter.verify.shrink import case_config, shrink, shrunk_cases
from pentameter.verify.steps import made_up_batch

COMPOSED = (
    "data=1,micro_batches=4;data=1,activation_checkpoint=full;data=2;data=2,zero=3;"
    "data=4,zero=3,replicate=2;tensor=2,sequence=1;tensor=2,pipeline=2,tied_head=true;"
    "pipeline=2,schedule=zero-bubble,virtual_stages=2;"
    "tensor=2,pipeline=2,schedule=zero-bubble-v,virtual_stages=2,tied_head=true;"
    "data=2,tensor=2,pipeline=2,schedule=interleaved,virtual_stages=2"
)

DIVIDED = (
    "context=2;context=2,context_mode=all-to-all;data=2,zero=3,context=2;"
    "tensor=2,sequence=1,context=2;pipeline=2,context=2;tensor=4,tensor_mode=2d;"
    "tensor=8,tensor_mode=2.5d;tensor=8,tensor_mode=3d;tensor=4,tensor_mode=2d,pipeline=2"
)


@pytest.mark.parametrize(
    ("preset", "layouts"),
    [
        # Norms first, learned positions, tied head, padded vocabulary.
        ("gpt2-124m", DIVIDED),
        pytest.param("gpt2-124m", "all", marks=pytest.mark.slow),
        # Rotary positions, shared and normed heads, gates.
        ("qwen3-0.6b", "tensor=2,sequence=1;data=2,zero=3,tensor=2;context=2;pipeline=2"),
        pytest.param("qwen3-0.6b", "all", marks=pytest.mark.slow),
        ("wikitext2-small", COMPOSED),  # norms last, sinusoidal positions, an untied head's bias
    ],
)
def test_every_layout_is_one_process(preset, layouts, workers):
    config = load_config(preset)
    cases = chosen_cases(config, layouts)
    small = shrink(config, cases)
    outcomes = list(verify_layouts(small, cases, workers, n_steps=2))
    assert [outcome.case for outcome in outcomes] == cases
    for outcome in outcomes:
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        assert outcome.worst.error <= TOLERANCE / 100  # nothing is near the edge


def test_adapters_on_every_layout_that_takes_them(workers):
    config = load_config("quickstart", {"lora.rank": 3, "lora.targets": ["qkv", "down"]})
    assert all(case.layout.tensor_mode == "1d" for case in chosen_cases(config, "all"))
    cases = chosen_cases(
        config, "data=2,zero=3,micro_batches=2;tensor=2,sequence=1;pipeline=2,context=2"
    )
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        assert outcome.worst.error <= TOLERANCE / 100


EXPERTS = {
    "bias": {
        "router": "sigmoid",
        "router_renormalize": True,
        "router_groups": 4,
        "router_open_groups": 2,
        "n_experts": 8,
        "balance_rate": 0.05,  # large enough to move a choice within three steps
    },
    "sequence": {"n_experts": 4, "balance_weight": 1.0, "dense_layers": 1},
    "batch": {
        "n_experts": 4,
        "balance_weight": 1.0,
        "router_z_loss": 0.1,
        "n_shared_experts": 1,
        "shared_expert_gate": True,
    },
}


@pytest.mark.parametrize("balance", EXPERTS)
def test_experts_and_their_balance_on_every_kind_of_layout(balance, workers):
    keys = {f"model.{key}": value for key, value in EXPERTS[balance].items()}
    config = load_config("qwen3-0.6b", {**keys, "model.router.balance": balance})
    cases = chosen_cases(
        config,
        "data=1,micro_batches=4,activation_checkpoint=full;data=2,zero=3,micro_batches=2;"
        "tensor=2,sequence=1,activation_checkpoint=selective;pipeline=2,context=2",
    )
    n_steps = 3 if balance == "bias" else 2  # a third moves a choice
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=n_steps):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        assert outcome.worst.error <= TOLERANCE / 100


def test_what_an_expert_has_room_for_is_the_same_on_every_layout(workers):
    """One process cuts the padding off rows whose losses are asked for, a pipeline does not."""
    config = load_config("qwen3-0.6b", {"model.experts.count": 4, "model.experts.capacity": 0.7})
    cases = chosen_cases(config, "data=2;tensor=2;pipeline=2;data=2,expert=2")
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=1):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"


SHARDED = "data=2,zero=3,expert=2,micro_batches=2;tensor=2,expert=2,idle_experts=true"


def test_experts_sharded_over_other_ranks_than_the_rest(workers):
    keys = {f"model.{key}": value for key, value in EXPERTS["batch"].items()}
    config = load_config(
        "qwen3-0.6b", {**keys, "model.router.balance": "batch", "model.bias": True}
    )
    cases = chosen_cases(config, SHARDED)
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        assert outcome.worst.error <= TOLERANCE / 100


RECOMPUTED = (
    "data=1,activation_checkpoint=full,compile=true;"
    "data=1,activation_checkpoint=selective,compile=true;"
    "data=2,zero=1,activation_checkpoint=full"
)
UNDROPPED = (
    "tensor=2,activation_checkpoint=full,compile=true,attention_dropout=false;"
    "tensor=2,sequence=1,activation_checkpoint=full,compile=true,attention_dropout=false"
)
REST = (
    "data=2,activation_checkpoint=full,compile=true;"
    "data=2,activation_checkpoint=selective,compile=true;"
    "tensor=2,activation_checkpoint=full,compile=true;"
    "tensor=2,activation_checkpoint=selective,compile=true;"
    "data=2,zero=3,activation_checkpoint=full,compile=true;"
    "data=2,zero=3,activation_checkpoint=selective,compile=true;"
    "data=2,expert=2,activation_checkpoint=full,compile=true;"
    "data=2,expert=2,activation_checkpoint=selective,compile=true;"
    "data=2,zero=2,activation_checkpoint=selective,compile=true"
)


def test_attention_without_dropout_is_recomputed_and_compiled_beside_sharded_weights(workers):
    """PyTorch takes it for random, and lost the order of what it saves."""
    config = load_config("gpt2-124m")
    cases = chosen_cases(config, UNDROPPED)
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        assert outcome.worst.error <= TOLERANCE / 100


@pytest.mark.parametrize("layouts", [RECOMPUTED, pytest.param(REST, marks=pytest.mark.slow)])
def test_experts_are_recomputed_and_compiled(layouts, workers):
    keys = {f"model.{key}": value for key, value in EXPERTS["batch"].items()}
    config = load_config("qwen3-0.6b", {**keys, "model.router.balance": "batch"})
    cases = chosen_cases(config, layouts)
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        assert outcome.worst.error <= TOLERANCE / 100


@pytest.mark.parametrize(
    "layouts",
    [
        "tensor=2,expert=2,sequence=1;context=2,activation_checkpoint=full",
        pytest.param("all", marks=pytest.mark.slow),
    ],
)
def test_sinks_windows_and_biases_of_experts_on_every_kind_of_layout(layouts, workers):
    config = load_config("gpt-oss-20b")
    cases = chosen_cases(config, layouts)
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
        # The widest of 116 layouts was 1.5e-12, a gradient of queries.
        assert outcome.worst.error <= TOLERANCE / 20


BY_LAYER = {
    "model.norm_position": "both",
    "model.window_rope_theta": 100.0,
    "model.nope_layers": (1,),
    "model.rope_scaling.type": "linear",
    "model.attention.score_size": 24,
    "model.attention.sliding_window": 64,
    "model.attention.sliding_window_pattern": (2,),
    "model.attention.out_bias": True,
    "model.feed_forward.activation": "geglu_tanh",
}


@pytest.mark.parametrize(
    "layouts",
    [
        "tensor=2,sequence=1;context=2;data=2,zero=3,activation_checkpoint=selective",
        pytest.param("all", marks=pytest.mark.slow),
    ],
)
def test_norms_on_both_sides_and_rotations_by_layer(layouts, workers):
    config = load_config("qwen3-0.6b", BY_LAYER)
    cases = chosen_cases(config, layouts)
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"


def test_a_grid_takes_no_sinks():
    config = load_config("qwen3-0.6b", {"model.attention.sinks": True})
    with pytest.raises(ConfigError, match=r"attention.sinks=true is not possible with .*'2d'"):
        shrunk_cases(config, "tensor=4,tensor_mode=2d")


def test_all_layouts_shard_experts_if_there_are_any():
    config = load_config("qwen3-0.6b", {"model.experts.count": 4})
    cases = [each for each in chosen_cases(config, "all") if each.layout.shards_experts]
    shards = [
        each
        for each in map(str, all_cases()["experts"])
        if "expert=" in each or "expert_tensor=" in each
    ]
    assert len(cases) == len(shards) >= 40
    dense = chosen_cases(load_config("qwen3-0.6b"), "all")
    assert not any(each.layout.shards_experts for each in dense)


def test_idle_experts_get_no_token():
    """With as many ranks as experts, their ranks get none either."""
    config = load_config("qwen3-0.6b", {"model.experts.count": 4})
    (case,) = chosen_cases(config, "data=4,expert=4,idle_experts=true")
    plan = make_plan(case_config(shrink(config, [case]), case.alone))
    engine = assemble(plan, torch.device("cpu"), "fp64", compiled=False)
    for step in range(2):
        engine.forward_backward(made_up_batch(plan, step), step)
        routers = [each for each in engine.model.modules() if isinstance(each, Router)]
        idle = [int((router.counts == 0).sum()) for router in routers]
        engine.router_balance.move()
    assert min(idle) > 0


def test_a_grid_takes_no_experts():
    config = load_config("qwen3-0.6b", {"model.experts.count": 4})
    assert all(case.layout.tensor_mode == "1d" for case in chosen_cases(config, "all"))
    with pytest.raises(ConfigError, match="the width of the residual stream that a router reads"):
        shrunk_cases(config, "tensor=4,tensor_mode=2d")


@pytest.mark.slow
@pytest.mark.parametrize("balance", EXPERTS)
def test_experts_on_all_layouts(balance, workers):
    keys = {f"model.{key}": value for key, value in EXPERTS[balance].items()}
    config = load_config("qwen3-0.6b", {**keys, "model.router.balance": balance})
    cases = chosen_cases(config, "all")
    outcomes = list(verify_layouts(shrink(config, cases), cases, workers, n_steps=3))
    assert all(outcome.passed for outcome in outcomes)


@pytest.mark.parametrize(("optimizer", "n_experts"), [("muon", None), ("muon", 3), ("adam", None)])
def test_other_update_rules(optimizer, n_experts, workers):
    """Of three experts ZeRO's two ranks hold two and one."""
    keys = {"optimizer.name": optimizer, "model.experts.count": n_experts}
    config = load_config("quickstart", keys)
    cases = chosen_cases(config, "data=2;tensor=2;data=2,zero=3")
    for outcome in verify_layouts(shrink(config, cases), cases, workers, n_steps=2):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}\n{outcome.worker_traceback}"
