"""Tensor modes of several dimensions in the Plan: who has which part, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_state_bytes
from pentameter.planning.layouts.layout import Layout, parse_layout
from pentameter.planning.plan import make_plan

GRIDS = ["tensor=4,tensor_mode=2d", "tensor=8,tensor_mode=2.5d", "tensor=8,tensor_mode=3d"]


def config(parallel: Layout, **changes) -> Config:
    base = Config.model_validate(
        {
            "model": {
                "context_length": 8,
                "n_layers": 2,
                "n_heads": 4,
                "d_model": 16,
                "bias": True,
            },
            "data": {"corpus": "grammar"},
            "train": {"batch_size": 8, "steps": 1, "precision": "fp32"},
            "parallel": parallel.to_json(),
        }
    )
    return load_config(base, changes)


@pytest.mark.parametrize(
    ("text", "sizes", "of_parameters"),
    [
        ("tensor=9,tensor_mode=2d", (1, 3, 3), (1, 3, 3)),
        ("tensor=8,tensor_mode=2.5d", (2, 2, 2), (2, 2, 2)),
        ("tensor=16,tensor_mode=2.5d,tensor_depth=4", (4, 2, 2), (4, 2, 2)),
        ("tensor=27,tensor_mode=2.5d", (3, 3, 3), (3, 3, 3)),
        ("tensor=27,tensor_mode=3d", (3, 3, 3), (1, 9, 3)),
    ],
)
def test_the_number_of_processes_makes_up_a_grid(text, sizes, of_parameters):
    layout = parse_layout(text)
    assert tuple(layout.sizes[name] for name in ("depth", "row", "tensor")) == sizes
    found = tuple(layout.parameter_sizes[name] for name in ("data", "row", "tensor"))
    assert found == of_parameters
    assert parse_layout(str(layout)) == layout
    assert layout.world_size == layout.tensor


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor=6,tensor_mode=2d", "tensor=6 must be q · q .* nearest possible: 4, 9"),
        ("tensor=9,tensor_mode=2.5d", "must be d · q · q .* nearest possible: 8, 12"),
        ("tensor=12,tensor_mode=2.5d,tensor_depth=2", "must be 2 · q · q .* possible: 8, 18"),
        ("tensor=9,tensor_mode=3d", "must be l · l · l .* nearest possible: 8, 27"),
        ("tensor=3001,tensor_mode=2d", "nearest possible: 2916, 3025"),
        ("tensor=3001,tensor_mode=2.5d", "nearest possible: 3000, 3004"),
        ("tensor=1000000007,tensor_mode=2.5d", "nearest possible: 1000000004, 1000000008"),
        ("tensor=1000000007,tensor_mode=3d", "nearest possible: 1000000000, 1003003001"),
        ("tensor=2,tensor_mode=2d", "nearest possible: 4"),
        ("tensor=2,tensor_mode=2.5d", "nearest possible: 8"),
        ("tensor=4,tensor_mode=2d,sequence=1", "divides the stream already"),
        ("tensor=4,tensor_mode=2d,tensor_depth=2", "tensor_depth=2 is the depth of"),
    ],
)
def test_what_is_no_grid_is_refused_with_what_is(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_layout(text)


def test_the_nearest_grids_are_those_of_a_search_through_all():
    edges = range(2, 40)
    grids = {
        "2d": {q * q for q in edges},
        "2.5d": {d * q * q for d in range(2, 200) for q in edges},
        "3d": {edge**3 for edge in edges},
    }
    for mode, possible in grids.items():
        for n in range(2, 150):
            if n in possible:
                assert parse_layout(f"tensor={n},tensor_mode={mode}").tensor == n
                continue
            near = [
                *[max((each for each in possible if each < n), default=0)],
                min(possible - {*range(n)}),
            ]
            with pytest.raises(ConfigError) as refused:
                parse_layout(f"tensor={n},tensor_mode={mode}")
            listed = ", ".join(str(each) for each in near if each)
            assert str(refused.value).endswith(f"nearest possible: {listed}")


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        (
            GRIDS[0],
            {"model.attention.n_heads": 1},
            "divides model.attention.n_heads=1 by 2; possible: 2",
        ),
        (
            GRIDS[2],
            {"model.attention.n_heads": 2, "model.d_model": 18},
            "model.d_model=18 by 4; possible: 16, 20",
        ),
        (
            GRIDS[2],
            {"model.feed_forward.width": 30},
            "divides model.feed_forward.width=30 by 4; possible: 28, 32",
        ),
        (
            GRIDS[0],
            {"train.batch_size": 7},
            "data=1 × 2 of parallel.tensor_mode='2d' must divide the 7",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(text, changes, said):
    with pytest.raises(ConfigError, match=said):
        make_plan(config(parse_layout(text), **changes), vocab_size=10)


def test_a_vocabulary_that_leaves_a_process_nothing_is_to_be_padded():
    few = config(parse_layout(GRIDS[2]))
    with pytest.raises(ConfigError, match=r"leaves the last of 4 none; pad it: .*-multiple 4"):
        make_plan(few, vocab_size=9)
    make_plan(load_config(few, {"model.vocab_multiple": 4}), vocab_size=9)


@pytest.mark.parametrize("text", GRIDS)
def test_every_row_has_a_process_and_every_parameter_is_there_once(text):
    layout = parse_layout(text)
    plan = make_plan(config(layout), vocab_size=13)
    ranks = range(layout.world_size)
    for rows in (layout.rows, layout.attention_rows):
        held = [row for rank in ranks for row in rows(rank, 8)]
        copies = layout.world_size // layout.n_batch_shards
        assert sorted(held) == sorted(list(range(8)) * copies)
    for spec in plan.table:
        sharding_names = list(itertools.chain(*plan.placements[spec.name].sharded_by))
        parts = {}
        for rank in ranks:
            places = layout.parameter_coordinates(rank)
            shape = plan.sharding.parameter_shape(spec, places)
            parts[tuple(places[name] for name in sharding_names)] = math.prod(shape)
        assert sum(parts.values()) == spec.n_elements


def test_matrices_and_activations_shrink_with_each_dimension():
    """Of a model whose vectors are few: a process of 2d has a quarter, one of 3d an eighth."""
    wide = {"model.d_model": 256, "train.batch_size": 16}
    alone, two, deep, three = (
        make_plan(config(parse_layout(text), **wide), vocab_size=512) for text in ("data=1", *GRIDS)
    )
    weights = [plan_state_bytes(plan).weights_bytes for plan in (alone, two, deep, three)]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=0.01)
    assert weights[2] == weights[1]
    assert weights[3] == pytest.approx(weights[0] / 8, rel=0.02)
    assert deep.micro_batch_size == two.micro_batch_size // 2
