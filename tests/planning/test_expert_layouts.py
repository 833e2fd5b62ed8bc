"""Experts over the ranks of data × context × tensor: who holds what, and what is refused."""

import math

import pytest

from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.layouts.layout import (
    Layout,
    exchange_ranks,
    make_layout,
    parse_layout,
    placement_ranks,
)
from pentameter.planning.plan import Plan, make_plan

MODEL = {"n_experts": 4, "d_expert": 6, "n_layers": 2, "d_model": 8, "n_heads": 2, "vocab_size": 13}


def planned(layout: str, **model: object) -> Plan:
    """The plan of a small mixture of experts on a layout."""
    return make_plan(
        Config.model_validate(
            {
                "model": {**MODEL, "context_length": 8, "bias": True, **model},
                "data": {"corpus": "grammar"},
                "train": {"batch_size": 16},
                "parallel": parse_layout(layout).to_json(),
            }
        )
    )


def elements(plan: Plan, spec: ParameterSpec) -> int:
    """How many elements of a parameter all ranks hold together."""
    ranks = map(plan.layout.parameter_coordinates, range(plan.layout.world_size))
    return sum(plan.sharding.zero_elements(spec, coordinates) for coordinates in ranks)


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        ("data=2,expert=2", 1),
        ("data=4,expert=2", 2),
        ("data=4,expert_tensor=2", 2),
        ("data=2,context=2,tensor=2,expert=4,expert_tensor=2", 1),
        ("data=4,zero=1,expert=2", 1),
        ("data=4,zero=3,replicate=2,expert=2", 2),
        ("data=4,zero=3,replicate=2,expert=4", 1),
        ("data=8,zero=3,expert_tensor=2", 1),
        ("data=4,zero=2,tensor=2,sequence=1,expert=2,expert_tensor=2", 1),
    ],
)
def test_the_ranks_of_a_stage_hold_each_expert_as_often_as_planned(layout, copies):
    plan = planned(layout)
    spec = next(each for each in plan.table if each.name.endswith("experts.up.weight"))
    assert elements(plan, spec) == copies * spec.n_elements
    placement = plan.sharding.placement(spec)
    summed = (*placement.summed_over, *placement.fsdp_over)
    sizes = plan.layout.placement_sizes
    ways = math.prod(sizes[name] for each in placement.sharded_by for name in each)
    # Whoever does not shard the experts gets other tokens.
    n_ranks = plan.layout.world_size // plan.layout.pipeline
    assert math.prod(sizes[name] for name in summed) * ways == n_ranks


def test_a_router_and_shared_experts_stay_where_they_were():
    with_experts, without = (
        planned(layout, n_shared_experts=1)
        for layout in ("data=2,zero=1,tensor=2,expert=4", "data=2,zero=1,tensor=2")
    )
    for name in ("router.weight", "shared.up.weight", "shared.down.bias"):
        path = f"blocks.1.experts.{name}"
        assert with_experts.placements[path] == without.placements[path]


def test_one_rank_of_a_split_expert_adds_its_bias():
    plan = planned("data=2,expert_tensor=2")
    assert plan.placements["blocks.0.experts.down.bias"].summed_over == ("expert_tensor",)
    assert plan.placements["blocks.0.experts.up.bias"].sharded_by == ((), ("expert_tensor",))


def test_as_many_processes_as_experts_need():
    assert make_layout(ParallelConfig(expert=4, expert_tensor=2, tensor=2)).world_size == 8
    assert make_layout(ParallelConfig(expert=4), 8).data == 8
    assert exchange_ranks(Layout(data=8, expert=2, expert_tensor=2), 5) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, data=2, zero=3, tensor=2),
        Layout(data=4, zero=3, context=2, expert=2, expert_tensor=2),
        Layout(tensor=8, tensor_mode="3d"),
    ],
    ids=str,
)
def test_ranks_along_a_placement_dimension_differ_in_nothing_else(layout):
    coordinates = [layout.parameter_coordinates(rank) for rank in range(layout.world_size)]
    for rank, own in enumerate(coordinates):
        meshes = placement_ranks(layout, rank)
        assert len(meshes) == 1 + layout.shards_experts
        for names in meshes:
            for name, ranks in names.items():
                alike = {each: own[each] for each in names if each != name}
                assert ranks == sorted(
                    (other for other, at in enumerate(coordinates) if alike.items() <= at.items()),
                    key=lambda other: coordinates[other][name],
                )


@pytest.mark.parametrize(
    ("layout", "model", "reason"),
    [
        ("data=4,expert=3", {}, r"parallel.expert=3 must divide the 4 processes of .*: 1, 2, 4,"),
        (
            "data=2,expert=2,expert_tensor=2",
            {},
            r"parallel.expert=2 × parallel.expert_tensor=2 must divide the 2 processes",
        ),
        ("data=8,expert=8", {}, r"parallel.expert=8 must divide model.experts.count=4; .* 1, 2, 4"),
        (
            "data=4,expert_tensor=4",
            {},
            r"parallel.expert_tensor=4 must divide model.experts.width=6; possible: 1, 2, 3, 6",
        ),
        (
            "data=2,expert=2",
            {"n_experts": None, "d_expert": None},
            r"model.experts.count is not set, which .* parallel.expert=2, which shards experts",
        ),
        ("tensor=4,tensor_mode=2d,expert=2", {}, r"tensor_mode='2d'.*use '1d'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(layout, model, reason):
    with pytest.raises(ConfigError, match=reason):
        planned(layout, **model)


def test_zero_shards_the_matrices_of_fewer_experts_than_ranks():
    plan = planned("data=8,zero=3", d_expert=8)
    up = next(each for each in plan.table if each.name.endswith("experts.up.weight"))
    assert plan.sharding.n_zero_shards(up) == 8
    assert plan.sharding.zero_index(up) == 1  # (4, 8, 8): four of eight ranks would have none
    assert {plan.sharding.zero_elements(up, {"shard": rank}) for rank in range(8)} == {32}
