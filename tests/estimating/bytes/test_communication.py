"""The traffic of a step, against the textbooks' count; tests/parallel/test_ledger.py counts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.estimating.bytes.communication import (
    Communication,
    busiest,
    by_dimension,
    matrix_communication,
    step_communication,
)
from pentameter.estimating.bytes.plan_estimates import plan_record, step_of
from pentameter.planning.buckets import SUM_BUCKET_BYTES, filled_buckets
from pentameter.planning.layouts.layout import MESH_DIMENSIONS
from pentameter.planning.plan import make_plan

T, D, L, V, B = 16, 32, 4, 64, 8  # context, width, layers, vocabulary, sequences of a step
MICRO = 2
STREAM_BYTES = 4 * MICRO * T * D


def plan_of(parallel, *, precision="fp32", **model):
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": V,
                "context_length": T,
                "n_layers": L,
                "n_heads": 4,
                "d_model": D,
                **model,
            },
            "data": {"corpus": "grammar"},
            "train": {"batch_size": B, "micro_batch_size": MICRO, "precision": precision},
            "parallel": parallel,
        }
    )
    return make_plan(config)


def plan_communication(plan, rank=0):
    return step_communication(step_of(plan), rank)


def test_one_process_sends_nothing():
    assert plan_communication(plan_of({})) == {}


def test_copies_reduce_each_gradient_once():
    plan = plan_of({"data": 2})
    assert plan_communication(plan)["data", "all_reduce"] == Communication(1, 4 * plan.n_parameters)
    assert plan_communication(plan)["world", "all_reduce"] == Communication(3, 24)


@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_zero_gathers_and_reduces(zero, gathers, reductions):
    """Of a step with two micro-batches; a layer is two units, embeddings, norms and head a last."""
    plan = plan_of({"data": 2, "zero": zero})
    n_bytes, units = 4 * plan.n_parameters, 2 * L + 1
    assert plan_communication(plan)["shard", "all_gather"] == Communication(
        gathers * units, gathers * n_bytes
    )
    reduced = Communication(reductions * units, reductions * n_bytes)
    assert plan_communication(plan)["shard", "reduce_scatter"] == reduced


def test_copies_of_shards_reduce_a_shard_of_each_gradient_once():
    plan = plan_of({"data": 4, "zero": 3, "replicate": 2})
    copies = Communication(2 * L + 1, 4 * plan.n_parameters // 2)
    assert plan_communication(plan)["data", "all_reduce"] == copies


def test_low_precision_halves_what_is_gathered_for_products_and_nothing_that_is_reduced():
    full, low = (
        plan_communication(plan_of({"data": 2, "zero": 1}, precision=name))
        for name in ("fp32", "bf16")
    )
    in_blocks = 12 * D * D * L
    difference = full["shard", "all_gather"].n_bytes - low["shard", "all_gather"].n_bytes
    assert difference == 2 * in_blocks
    assert full["shard", "reduce_scatter"] == low["shard", "reduce_scatter"]


def test_tensor_parallel_reduces_four_streams_of_each_layer():
    """Shoeybi et al. 2019, figure 4; and one each for embedding and head, and the loss's rows."""
    traffic = plan_communication(plan_of({"tensor": 2}))["tensor", "all_reduce"]
    n_micro = B // MICRO
    streams, rows = 4 * L + 2, 4 * MICRO * T
    assert traffic == Communication(
        n_micro * (streams + 2), n_micro * (streams * STREAM_BYTES + 3 * rows)
    )


def test_sequence_parallel_moves_the_same_bytes_in_halves():
    """Korthikanti et al. 2022, section 4.2.2: an all-reduce is a sum to parts and a gather; and
    what a sub-layer reads is gathered once more, as only a part of it is kept."""
    traffic = plan_communication(plan_of({"tensor": 2, "sequence": True}))
    n = (B // MICRO) * (4 * L + 2)
    assert traffic["tensor", "all_to_all"] == Communication(n, n * STREAM_BYTES)
    n += (B // MICRO) * 2 * L
    assert traffic["tensor", "all_gather"] == Communication(n, n * STREAM_BYTES)


def test_what_backward_sends_beside_products_is_told_apart():
    """Of a layer's two sub-layers: forward a gather and a sum each, backward a gather of the
    result's gradient, and beside the products the gather and the sum of what was read."""
    plan = plan_of({"tensor": 2, "sequence": True})
    sent = matrix_communication(step_of(plan), 0)
    M = B // MICRO
    counts = {(when, key[1]): each.calls for when in sent for key, each in sent[when].items()}
    assert counts == {
        ("forward", "all_gather"): M * (2 * L + 1),  # and the head's
        ("forward", "all_to_all"): M * (2 * L + 1),  # and the embedding's
        ("backward", "all_gather"): M * (2 * L + 1),
        ("backward", "all_to_all"): M,
        ("beside", "all_gather"): M * 2 * L,
        ("beside", "all_to_all"): M * 2 * L,
    }
    split = plan_of({"tensor": 2, "pipeline": 2, "schedule": "zero-bubble"})
    assert "beside" not in matrix_communication(step_of(split), 0)


@pytest.mark.parametrize(("virtual_stages", "schedule"), [(1, "1f1b"), (2, "interleaved")])
def test_stages_send_the_stream_over_each_boundary_and_its_gradient_back(virtual_stages, schedule):
    parallel = {"pipeline": 2, "virtual_stages": virtual_stages, "schedule": schedule}
    plan = plan_of(parallel)
    n = (2 * virtual_stages - 1) * (B // MICRO)
    for rank in range(2):
        for kind in ("send", "receive"):
            assert plan_communication(plan, rank)["pipeline", kind] == Communication(
                n, n * STREAM_BYTES
            )
        assert plan_communication(plan, rank)["pipeline", "all_reduce"] == Communication(
            1, 4 * V * D
        )  # tied
    untied = plan_communication(plan_of(parallel, tied_head=False))
    assert ("pipeline", "all_reduce") not in untied


@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2, 3]),
    st.booleans(),
)
def test_what_is_sent_is_received_and_collectives_meet(data, tensor, pipeline, zero, sequence):
    plan = plan_of(
        {
            "data": data,
            "tensor": tensor,
            "pipeline": pipeline,
            "zero": zero,
            "sequence": sequence and tensor > 1,
            "schedule": "gpipe",
        },
        vocab_size=63,
    )
    each = [plan_communication(plan, rank) for rank in range(plan.layout.world_size)]
    nothing = Communication(0, 0)
    sent, received = (
        sum(ledger.get(("pipeline", kind), nothing).n_bytes for ledger in each)
        for kind in ("send", "receive")
    )
    assert sent == received
    for dimension in MESH_DIMENSIONS:
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for rank, ledger in enumerate(each):
                places = plan.layout.coordinates(rank)
                others = [
                    each[other].get((dimension, kind), nothing)
                    for other in range(plan.layout.world_size)
                    if all(
                        place == places[name]
                        for name, place in plan.layout.coordinates(other).items()
                        if name != dimension
                    )
                ]
                # Stages of a pipeline meet only over tied weights, its ends.
                if dimension != "pipeline":
                    assert {other.calls for other in others} == {others[0].calls}
                    assert ledger.get((dimension, kind), nothing) in others


def test_messages_hold_what_fits_in_order():
    some = SUM_BUCKET_BYTES // 2
    sizes = [some, some, 1, 3 * some, 5, some]
    assert filled_buckets(sizes) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
    assert filled_buckets([]) == []


def test_the_plan_prints_the_process_that_sends_most():
    plan = plan_of({"pipeline": 4, "schedule": "gpipe"}, tied_head=False)
    traffic = busiest(step_of(plan))
    assert (
        traffic
        == plan_communication(plan, 1)
        == plan_communication(plan, 2)
        != plan_communication(plan, 0)
    )
    assert plan_record(plan)["communication"] == by_dimension(traffic)
    assert by_dimension(traffic)["pipeline"]["send"] == {
        "calls": 8,
        "bytes": 8 * STREAM_BYTES,
    }


def test_the_largest_preset_is_planned():
    config = load_config("gpt3-175b")
    plan = make_plan(config, vocab_size=config.model.vocab_size or 50257)
    assert {dimension for dimension, _ in plan_communication(plan)} >= {"tensor", "pipeline"}
