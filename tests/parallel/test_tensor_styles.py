"""The styles of tensor parallelism, against the axes of operations and of their parameters."""

from typing import Any, get_args

import pytest

from pentameter.config.schema import ModelConfig
from pentameter.model.gpt import GPT
from pentameter.parallel.grid.tensor_grid import Grid
from pentameter.parallel.tensor.tensor_parallel import TensorParallelContext
from pentameter.planning.architecture import Role
from pentameter.planning.gpt import operations
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import sharding_of

MODELS: list[dict[str, Any]] = [
    {},
    {"tied_head": False},
    {"norm_position": "post"},
    {"n_kv_heads": 2, "activation": "swiglu", "qk_norm": "head"},
    {"n_kv_heads": 1, "qk_norm": "head"},
    {"n_kv_heads": 2, "qk_norm": "width"},
    {"n_kv_heads": 2, "attention_sinks": True},
    {"norm_position": "both", "attention": {"out_bias": True}},
]


@pytest.mark.parametrize("changed", MODELS, ids=str)
def test_each_sharded_parameter_is_of_a_module_with_a_style(changed):
    model = ModelConfig(
        vocab_size=19, context_length=8, n_layers=2, n_heads=4, d_model=8, **changed
    )
    modules = dict(GPT(model).named_modules())
    sharding = sharding_of(Layout(tensor=2), model)
    styled = set()
    for op in operations(model):
        if not op.parameters:
            assert op.role is None
            continue
        assert op.name in modules
        is_sharded = any(not sharding.placement(spec).is_whole for spec in op.parameters)
        if is_sharded:
            assert op.role in TensorParallelContext.styles, op.name
        if op.role in TensorParallelContext.styles:
            styled.add(op.role)
    assert styled >= {"token_embedding", "column_parallel", "row_parallel", "head"}


def test_a_grid_has_a_style_for_every_role():
    roles = set(get_args(Role))
    assert set(Grid.styles) == roles - {"sinks"}  # with which a layout of grids is refused
    assert set(TensorParallelContext.styles) == roles - {"norm", "position_embedding"}
