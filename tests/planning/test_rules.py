"""Who sums gradients and when, for each kind of layout; tests/parallel shows that engines obey."""

from __future__ import annotations

import pytest

from pentameter.planning.architecture import Init, ParameterSpec
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import Sharding
from pentameter.planning.rules import LayoutRules


@pytest.mark.parametrize(
    ("layout", "data_sum"),
    [
        (Layout(), "none"),
        (Layout(tensor=2, pipeline=2), "none"),
        (Layout(data=2), "ddp"),
        (Layout(data=2, tensor=2), "after_backward"),
        (Layout(data=2, pipeline=2), "after_backward"),
        (Layout(data=2, zero=1), "fsdp"),
        (Layout(data=1, zero=3), "fsdp"),
        (Layout(data=2, zero=2, tensor=2, pipeline=2), "fsdp"),
    ],
)
def test_one_of_four_sums_over_data(layout, data_sum):
    assert Sharding(layout, n_kv_heads=4).data_sum == data_sum


def test_messages_are_cut_where_processes_would_send_the_same():
    assert Sharding(Layout(tensor=2, pipeline=2), n_kv_heads=4).shards_messages(8)
    assert Sharding(Layout(tensor=2, pipeline=2, context=2), n_kv_heads=4).shards_messages(8)
    assert not Sharding(Layout(tensor=2, pipeline=2), n_kv_heads=4).shards_messages(9)
    assert not Sharding(Layout(tensor=2, pipeline=2, sequence=True), n_kv_heads=4).shards_messages(
        8
    )
    assert not Sharding(
        Layout(tensor=4, tensor_mode="2d", pipeline=2), n_kv_heads=4
    ).shards_messages(8)
    assert not Sharding(Layout(tensor=2), n_kv_heads=4).shards_messages(8)


@pytest.mark.parametrize(
    ("zero", "pipeline", "each_micro_batch", "stay_gathered", "whole"),
    [
        (0, 1, False, True, True),
        (1, 1, False, True, True),
        (2, 1, True, True, False),
        (3, 1, True, False, False),
        (3, 2, False, True, True),
    ],
)
def test_zero_reduces_and_gives_up_as_its_stage_says(
    zero, pipeline, each_micro_batch, stay_gathered, whole
):
    rules = LayoutRules(Layout(data=2, zero=zero, pipeline=pipeline))
    assert rules.reduces_each_micro_batch == each_micro_batch
    assert rules.weights_stay_gathered == stay_gathered
    assert rules.keeps_whole_gradients(n_micro_batches=2) == whole
    assert rules.keeps_whole_gradients(n_micro_batches=1) == (zero == 0 or pipeline > 1)


def test_copies_of_shards_are_summed_where_there_are_some():
    spec = ParameterSpec("weight", (4, 4), ("mlp", "embed"), Init("zeros"), True)

    def placement(**degrees):
        return Sharding(Layout(**degrees), n_kv_heads=4).placement(spec)

    assert placement(data=4, zero=1, replicate=2).fsdp_over == ("data", "shard")
    assert placement(data=4, zero=1).fsdp_over == ("shard",)
    assert placement(data=4).ddp_over == ("data",)
    assert placement(data=2, tensor=2).summed_over == ("data",)
