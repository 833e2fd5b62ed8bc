"""What each process sends in a step, counted, is what the Plan says: every call and every byte."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ledger import Ledger
from measured import configuration, constants, sent

from pentameter.estimating.bytes.communication import Communication, step_communication
from pentameter.estimating.bytes.plan_estimates import step_of
from pentameter.parallel.mesh import build_mesh
from pentameter.planning.layouts.layout import Layout, parse_layout
from pentameter.planning.plan import make_plan

PLAN = "pentameter.estimating.bytes.communication."
SMALL_BUCKETS = {
    PLAN + "COPIES_BUCKET_BYTES": 700,
    "pentameter.parallel.data_parallel.COPIES_BUCKET_BYTES": 700,
    "pentameter.planning.buckets.SUM_BUCKET_BYTES": 700,
}
# Parts of 7 and 6 columns: on its own each process would take another number of rows at a time.
SMALL_CHUNKS = {
    "pentameter.estimating.bytes.operation_communication.MAX_LOGITS": 26,
    "pentameter.estimating.bytes.grid_communication.MAX_LOGITS": 26,
    "pentameter.model.loss.MAX_LOGITS": 26,
}
BF16 = {"precision": "bf16"}
STREAM = {**BF16, "stream": "bf16"}
UNTIED = {"tied_head": False}
PLAIN = {"bias": False, "qkv_bias": False, "norm": "rmsnorm", "positions": "sinusoidal"}

LLAMA = {
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_size": 4,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "qkv_bias": False,
}
QWEN = {**LLAMA, "qk_norm": "head"}
ONE_KV_HEAD = {**QWEN, "n_kv_heads": 1}
OLMO = {**LLAMA, "qk_norm": "width", "norm_position": "output"}
OLMO_ALONE = {**OLMO, "n_kv_heads": 4}  # one matrix makes queries, keys and values

LATENT = {
    **LLAMA,
    "n_kv_heads": None,
    "attention": "latent",
    "kv_rank": 7,
    "q_rank": 5,
    "rope_head_size": 2,
    "v_head_size": 3,
}
LATENT_KEYS_ALONE = {**LATENT, "q_rank": None}

TWO_D = "tensor=4,tensor_mode=2d"
TWO_AND_A_HALF_D = "tensor=8,tensor_mode=2.5d"
THREE_D = "tensor=8,tensor_mode=3d"
EVEN = {"d_ff": 16, "n_layers": 2}

LONG = partial(pytest.param, marks=pytest.mark.slow)
"""A case of the long tier: many processes, or a variation of another."""
CASES = [
    # layout, of the model, of the training (micro-batches of 2 rows out of 8), constants
    ("data=2", {}, {}, {}),
    ("data=2", UNTIED, {}, SMALL_BUCKETS),
    ("data=2", {"norm_position": "post"}, BF16, SMALL_BUCKETS),
    ("data=2,zero=1", {}, {}, {}),
    ("data=2,zero=2", {}, BF16, {}),
    ("data=2,zero=3", UNTIED, {}, {}),
    ("data=2,zero=3", {}, {**BF16, "activation_checkpoint": "full"}, {}),
    ("data=4,zero=2,replicate=2", {}, {"micro_batch_size": 1}, {}),
    ("data=4,zero=3,replicate=4", {}, {}, {}),
    ("tensor=2", {}, {}, SMALL_CHUNKS),
    ("tensor=2", UNTIED, BF16, {}),
    ("tensor=2", {"dropout": 0.0}, {"activation_checkpoint": "full"}, {}),
    ("tensor=2,sequence=1", {}, BF16, SMALL_BUCKETS),
    ("tensor=2,sequence=1", UNTIED, {"activation_checkpoint": "selective"}, {}),
    ("pipeline=2,schedule=gpipe", {}, {}, {}),
    ("pipeline=2", UNTIED, BF16, {}),
    ("pipeline=2", UNTIED, STREAM, {}),
    ("pipeline=2,schedule=interleaved,virtual_stages=2", {}, {}, {}),
    ("pipeline=2,schedule=zero-bubble", {}, {}, {}),
    ("pipeline=2,schedule=zero-bubble-v,virtual_stages=2", {}, {}, {}),
    ("data=2,pipeline=2,schedule=zero-bubble-v,virtual_stages=2", UNTIED, BF16, {}),
    ("data=2,tensor=2", {}, {}, SMALL_BUCKETS),
    ("data=2,tensor=2,zero=3,sequence=1", {}, BF16, {}),
    ("data=2,pipeline=2", {}, {}, {}),
    ("data=2,pipeline=2,zero=2", {}, {}, {}),
    ("tensor=2,pipeline=2", PLAIN, {}, {}),
    ("data=2,tensor=2,pipeline=2", {}, {}, {}),
    ("tensor=2,pipeline=2,schedule=zero-bubble-v,virtual_stages=2", UNTIED, {}, {}),
    ("tensor=2,pipeline=2,sequence=1", {"norm_position": "post"}, STREAM, {}),
    ("data=2,tensor=2,pipeline=2", {}, STREAM, {}),
    ("tensor=2,pipeline=2", {"context_length": 9}, {}, {}),  # messages of 9 tokens stay whole
    ("data=2,tensor=2,pipeline=2,zero=3", {}, BF16, {}),
    ("context=2", {}, {}, SMALL_BUCKETS),
    ("context=4", {"attention_dropout": 0.1, "context_length": 16}, BF16, {}),
    ("context=2", UNTIED, {"activation_checkpoint": "full"}, {}),
    ("context=2", {}, {**BF16, "activation_checkpoint": "selective"}, {}),
    ("context=2,context_mode=all-to-all", {}, BF16, {}),
    ("context=2,context_mode=all-to-all", {}, {"activation_checkpoint": "full"}, {}),
    ("context=2,context_mode=all-to-all", {}, {"activation_checkpoint": "selective"}, {}),
    ("data=2,context=2", {}, {}, {}),
    ("data=2,zero=3,context=2", {}, BF16, {}),
    LONG("data=4,zero=2,replicate=2,context=2", {}, {"micro_batch_size": 1}, {}),
    ("tensor=2,sequence=1,context=2", {}, {}, SMALL_CHUNKS),
    ("pipeline=2,context=2", {}, BF16, {}),
    (TWO_D, {}, {}, SMALL_CHUNKS),
    LONG(TWO_D, UNTIED, BF16, SMALL_BUCKETS),
    (TWO_D, PLAIN, {"activation_checkpoint": "full"}, {}),
    LONG(TWO_D, {"dropout": 0.0}, {"activation_checkpoint": "full"}, {}),
    LONG(TWO_D, {"norm_position": "post"}, {"activation_checkpoint": "selective"}, {}),
    LONG("data=2,zero=1," + TWO_D, {}, BF16, {}),
    ("pipeline=2," + TWO_D, {}, {}, {}),
    (TWO_AND_A_HALF_D, {}, {}, {}),
    (THREE_D, EVEN, {}, SMALL_CHUNKS),
    LONG(THREE_D, {**EVEN, **UNTIED}, {**BF16, "activation_checkpoint": "selective"}, {}),
    LONG(THREE_D, {**EVEN, **PLAIN, "head_bias": False}, {"activation_checkpoint": "full"}, {}),
    ("tensor=2", LLAMA, {"activation_checkpoint": "full"}, {}),
    ("tensor=2,sequence=1", QWEN, BF16, SMALL_BUCKETS),
    ("tensor=2", OLMO_ALONE, {"activation_checkpoint": "full"}, {}),
    LONG("tensor=4", QWEN, {}, {}),
    ("data=2,tensor=2,zero=2", ONE_KV_HEAD, BF16, {}),
    ("data=2,zero=3", QWEN, BF16, {}),
    ("tensor=2,pipeline=2", ONE_KV_HEAD, {}, {}),
    ("context=2", QWEN, BF16, {}),
    ("context=2", OLMO_ALONE, {}, {}),
    ("context=2,context_mode=all-to-all", LLAMA, {}, {}),
    ("tensor=2", LATENT_KEYS_ALONE, {"activation_checkpoint": "full"}, {}),
    ("data=2,tensor=2,zero=3,sequence=1", LATENT, BF16, SMALL_BUCKETS),
    ("context=2,context_mode=all-to-all", LATENT, {}, {}),
    LONG(TWO_D, OLMO, {"activation_checkpoint": "selective"}, {}),
    LONG(TWO_D, QWEN, BF16, {}),
    LONG(THREE_D, {**OLMO_ALONE, **EVEN}, {}, {}),
]


ADAPTED = [
    # layout, of the training, modules with adapters
    ("data=2", {}, []),
    ("data=2,zero=2", BF16, ["up"]),
    ("data=2,zero=3", BF16, []),
    ("tensor=2", {}, ["up", "out"]),
    ("tensor=2", {"activation_checkpoint": "full"}, []),
    ("tensor=2,sequence=1", BF16, []),
    ("tensor=2,sequence=1", {}, ["down"]),
    ("data=2,tensor=2", {}, []),
    ("data=2,tensor=2,zero=3", BF16, ["qkv", "down"]),
    ("tensor=2,pipeline=2", {}, ["up"]),
    ("context=2", {}, ["down"]),
    ("context=2,context_mode=all-to-all", {}, ["up"]),
]


@pytest.mark.parametrize(("layout", "model", "train", "changed"), CASES)
def test_counted_is_planned(processes, layout, model, train, changed):
    compare(processes, configuration(layout, model, {**rows(layout), **train}), changed)


@pytest.mark.parametrize(("layout", "train", "targets"), ADAPTED)
def test_adapters_are_planned(processes, layout, train, targets):
    lora = {"rank": 3, "targets": targets}
    compare(processes, configuration(layout, {}, {**rows(layout), **train}, lora), {})


EXPERTS = {"n_experts": 4, "d_expert": 6, "activation": "swiglu", "dropout": 0.1}
SHARED = {**EXPERTS, "n_shared_experts": 1, "shared_expert_gate": True}
OF_EXPERTS = [
    ("data=4,expert=2", EXPERTS, {}),
    ("data=2,expert=2", SHARED, {**BF16, "activation_checkpoint": "full"}),
    ("tensor=2,expert=2", {**EXPERTS, "dropout": 0.0}, {"activation_checkpoint": "full"}),
    ("data=2,tensor=2,zero=3,expert=2", SHARED, BF16),
    ("data=2,tensor=2,zero=3,expert=2", SHARED, STREAM),
    LONG("data=4,zero=1,replicate=2,expert_tensor=2", SHARED, {}),
    LONG("tensor=2,sequence=1,expert=2", EXPERTS, {"activation_checkpoint": "selective"}),
    LONG("tensor=2,expert_tensor=2", EXPERTS, {**BF16, "activation_checkpoint": "selective"}),
    LONG("data=2,pipeline=2,zero=1,expert=2", SHARED, {}),
    LONG("context=2,expert=2", EXPERTS, BF16),
]


@pytest.mark.parametrize(("layout", "model", "train"), OF_EXPERTS)
def test_exchanges_of_experts_are_planned(processes, layout, model, train):
    """How many rows a rank gets, and sends back, depends on the routing: all ranks together send
    what is planned for as many mean ones."""
    config = configuration(layout, model, {**rows(layout), **train})
    size = make_plan(config).layout.world_size
    counted = processes.run(size, sent, config, {})
    plan = make_plan(config, world_size=size)
    planned = [step_communication(step_of(plan), rank) for rank in range(size)]
    assert total(counted) == total(planned)
    assert {("expert", "all_to_all")} <= total(counted).keys()


def total(ranks):
    """Calls and bytes of all ranks, by kind, and by dimension if only one mesh has it: some groups
    of both meshes are the same."""
    found = {}
    for (dimension, kind), each in itertools.chain(*(rank.items() for rank in ranks)):
        key = dimension if dimension in ("expert", "pipeline", "world") else "", kind
        calls, n_bytes = found.get(key, (0, 0))
        found[key] = calls + each.calls, n_bytes + each.n_bytes
    return found


def rows(layout):
    return {"micro_batch_size": 2 if parse_layout(layout).n_batch_shards < 4 else 1}


def compare(processes, config, changed):
    size = make_plan(config).layout.world_size
    counted = processes.run(size, sent, config, changed)
    plan = make_plan(config, world_size=size)
    with constants(changed):
        planned = [dict(step_communication(step_of(plan), rank)) for rank in range(size)]
    assert counted == planned


def test_groups_of_one_process_count_nothing_and_the_unknown_is_refused(processes):
    traffic, error = processes.run(1, count_alone)[0]
    assert traffic == {}
    assert "does not know the collective gather_" in error


def count_alone(world):
    layout = Layout(zero=1)
    ledger = Ledger(layout, build_mesh(layout, "cpu", world).parameters)
    with ledger:
        dist.all_reduce(torch.ones(3))
    error = ""
    try:
        with ledger:
            dist.gather(torch.ones(3), [torch.empty(3)])
    except NotImplementedError as caught:
        error = str(caught)
    return dict(ledger.traffic), error


def test_numbers_are_told_from_tensors_of_the_same_group(processes):
    for traffic in processes.run(2, count_both):
        assert traffic == {
            ("data", "all_reduce"): Communication(1, 12),
            ("world", "all_reduce"): Communication(1, 8),
        }


def count_both(world):
    layout = Layout(data=2)
    with Ledger(layout, build_mesh(layout, "cpu", world).parameters) as ledger:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.tensor(1.0, dtype=torch.float64))
    return dict(ledger.traffic)
