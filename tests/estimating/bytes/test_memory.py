"""Bytes a process holds, against arithmetic; tests/parallel/test_zero_memory.py counts them."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pentameter.config.schema import Config
from pentameter.estimating.bytes.memory import state_bytes
from pentameter.estimating.bytes.plan_estimates import (
    plan_memory,
    plan_record,
    plan_state_bytes,
    step_of,
)
from pentameter.planning.plan import make_plan

T, D, L, B = 64, 32, 4, 16
N = 16 * T  # tokens of a micro-batch


def memory_of(parallel, *, model=None, optimizer=None, lora=None, **train):
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": 64,
                "context_length": T,
                "n_layers": L,
                "n_heads": 4,
                "d_model": D,
                **(model or {}),
            },
            "data": {"corpus": "grammar"},
            "train": {"batch_size": B, "precision": "fp32", **train},
            "optimizer": optimizer or {},
            "lora": lora or {},
            "parallel": parallel,
        }
    )
    plan = make_plan(config)
    return plan, plan_memory(plan)


def test_one_process_holds_four_numbers_for_each_weight():
    plan, memory = memory_of({})
    n_bytes = 4 * plan.n_parameters
    assert memory.weights_bytes == memory.gradients_bytes == n_bytes
    assert memory.optimizer_bytes == 2 * n_bytes
    _, double = memory_of({}, precision="fp64")
    assert double.weights_bytes == 2 * n_bytes


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1), ({"name": "adam"}, 2)],
)
def test_optimizers_keep_what_they_need(optimizer, slots):
    plan, memory = memory_of({}, optimizer=optimizer)
    assert memory.optimizer_bytes == slots * 4 * plan.n_parameters


def test_frozen_weights_have_neither_gradients_nor_state():
    plan, _ = memory_of({}, lora={"rank": 2})
    assert 0 < plan.n_trained < plan.n_parameters / 4
    held = state_bytes(step_of(plan), [plan.table])  # as for a custom model
    assert held.weights_bytes == 4 * (plan.n_parameters + plan.n_trained)
    assert held.gradients_bytes == 4 * plan.n_trained
    assert held.optimizer_bytes == 8 * plan.n_trained


def test_muon_keeps_one_number_for_the_matrices_of_blocks():
    plan, memory = memory_of({}, optimizer={"name": "muon"})
    assert memory.optimizer_bytes == 4 * (2 * plan.n_parameters - 12 * D * D * L)


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_zero_shares_out_more_with_each_stage(micro_batch_size):
    """Rajbhandari et al. 2020, figure 1; with accumulation, stage 1 adds up whole gradients."""
    by_stage = []
    for zero in range(4):
        plan, memory = memory_of({"data": 2, "zero": zero}, micro_batch_size=micro_batch_size)
        whole = 4 * plan.n_parameters
        assert memory.weights_bytes == whole // (2 if zero else 1)
        assert memory.optimizer_bytes == 2 * memory.weights_bytes
        shares = zero >= 2 or (zero == 1 and micro_batch_size == 8)
        assert memory.gradients_bytes == whole // (2 if shares else 1)
        by_stage.append(memory.total_bytes)
    assert by_stage == sorted(by_stage, reverse=True)


def test_shards_are_as_large_as_the_largest():
    """63 rows of the embedding over 4 processes: 16 each, the last one padded."""
    plan, memory = memory_of({"data": 4, "zero": 3}, model={"vocab_size": 63})
    assert memory.weights_bytes == (4 * (plan.n_parameters + D)) // 4


def test_copies_of_shards_hold_as_much_as_fewer_shards():
    _, copied = memory_of({"data": 4, "zero": 3, "replicate": 2}, batch_size=32)
    _, fewer = memory_of({"data": 2, "zero": 3}, batch_size=16)
    assert copied == fewer


def test_the_fullest_stage_counts():
    """Both ends of a pipeline hold the embedding where the head is tied; the last has more."""
    whole, _ = memory_of({})
    _, memory = memory_of({"pipeline": 2}, micro_batch_size=2)
    layers = 4 * (12 * D * D + 2 * D) * L // 2
    assert memory.weights_bytes in (
        layers + 4 * D * (64 + T),  # of the first: embeddings
        layers + 4 * D * (64 + 1),  # of the last: head and final norm
    )
    assert memory.total_bytes < plan_memory(whole).total_bytes


def test_activations_of_a_layer_are_those_of_the_formula():
    """Korthikanti et al. 2022, equation 1, is 34·s·b·h bytes in 16 bits without attention's own.
    Ours has an fp32 stream (4 more) and, here, no masks (2 less), whose matrices' roundings and
    sums of attention are not in it."""
    model = {"activation": "gelu"}
    _, deep = memory_of({}, model={**model, "n_layers": 8}, precision="bf16")
    _, flat = memory_of({}, model={**model, "n_layers": 7}, precision="bf16")
    rounded, sums = 2 * 12 * D * D, 4 * N * 4
    assert deep.activations_bytes - flat.activations_bytes == 36 * N * D + rounded + sums


def test_a_layer_computed_again_keeps_its_input_alone():
    settings = {"activation_checkpoint": "full", "precision": "bf16"}
    _, deep = memory_of({}, model={"n_layers": 8}, **settings)
    _, flat = memory_of({}, model={"n_layers": 7}, **settings)
    assert deep.activations_bytes - flat.activations_bytes == 4 * N * D


def test_less_is_kept_the_more_is_computed_again():
    kept = [
        memory_of({}, activation_checkpoint=how)[1].activations_bytes
        for how in (None, "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


def test_passes_under_way_hold_their_activations():
    """GPipe keeps all micro-batches, 1F1B as many as stages follow, interleaved some more."""
    kept = {
        schedule: memory_of(
            {"pipeline": 2, "schedule": schedule, "virtual_stages": virtual_stages},
            micro_batch_size=1,
        )[1].activations_bytes
        for schedule, virtual_stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
    }
    assert kept["1f1b"] < kept["interleaved"] < kept["gpipe"]
    assert kept["gpipe"] > 6 * kept["1f1b"]


def test_logits_come_in_chunks_where_they_are_many():
    """16 million tokens' logits are never there at once."""
    model = {"vocab_size": 50_000, "context_length": 4096}
    _, memory = memory_of({}, model=model)
    assert memory.activations_bytes < 4 * B * 4096 * 50_000


def test_the_peak_is_at_most_the_sum_and_printed():
    plan, memory = memory_of({"data": 2, "zero": 2}, micro_batch_size=2)
    assert memory.total_bytes <= sum(asdict(memory).values()) - memory.total_bytes
    assert memory.total_bytes >= memory.weights_bytes + memory.optimizer_bytes
    printed = plan_record(plan)["memory"]
    assert printed["total_bytes"] == memory.total_bytes
    held = plan_state_bytes(plan)
    assert printed["weights_bytes"] == held.weights_bytes == memory.weights_bytes
    assert printed["gradients_bytes"] == held.gradients_bytes == memory.gradients_bytes
    assert printed["optimizer_bytes"] == held.optimizer_bytes == memory.optimizer_bytes


@pytest.mark.parametrize("how", [None, "selective", "full"])
def test_weights_that_kernels_drop_are_not_kept(how):
    """What is held is what a model without dropout of them holds."""
    _, without = memory_of({}, activation_checkpoint=how)
    plan, written = memory_of({}, model={"attention_dropout": 0.2}, activation_checkpoint=how)
    fused = plan_memory(plan, "fp32", drops_by_blocks=True)
    assert fused == without
    assert fused.activations_bytes < written.activations_bytes
    if how is None:
        weights = (4 + 1 + 4) * 4 * T * N  # of 4 heads: softmax, mask, and what is left
        queries, sums = 4 * D * N, 4 * 4 * N  # the result is kept for the product after it
        more = weights + queries - sums
        assert written.activations_bytes - fused.activations_bytes == L * more


def test_a_stage_of_whole_windows_counts_where_it_is_the_fullest():
    """With sinks a layer without a window keeps a mask of T · (T + 1): here the third stage's."""
    model = {"n_layers": 16, "context_length": 512, "attention_sinks": True, "sliding_window": 8}
    parallel = {"pipeline": 8}
    _, windows = memory_of(parallel, model=model, micro_batch_size=1)
    model["sliding_window_pattern"] = 5  # layers 5, 10 and 15 of 16
    _, mixed = memory_of(parallel, model=model, micro_batch_size=1)
    masks = 6 * 512 * 513 * 4  # of the micro-batches under way in the third stage
    assert mixed.activations_bytes > masks
    assert mixed.total_bytes > windows.total_bytes


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_what_is_offloaded_leaves_the_activations_where_they_are(zero, micro_batch_size):
    """Gradients that are not there yet at the peak free nothing either."""
    layout, train = {"zero": zero, "data": 2}, {"micro_batch_size": micro_batch_size}
    _, held = memory_of(layout, **train)
    _, offloaded = memory_of(layout, offload=True, **train)
    assert held.device_bytes == held.total_bytes == offloaded.total_bytes
    assert offloaded.activations_bytes < offloaded.device_bytes
    on_host = held.weights_bytes + held.optimizer_bytes
    shards = held.weights_bytes  # of gradients
    assert on_host <= held.total_bytes - offloaded.device_bytes <= on_host + shards
