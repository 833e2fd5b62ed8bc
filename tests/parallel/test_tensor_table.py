"""The modules that tensor parallelism cuts, against the axes that it divides."""

import functools
from typing import Any

import pytest

from pentameter.config.schema import ModelConfig
from pentameter.model.gpt import GPT
from pentameter.parallel import tensor_parallel
from pentameter.planning.architecture import Operation, operations
from pentameter.planning.layout import AXIS_DIMENSIONS

MODELS: list[dict[str, Any]] = [
    {},
    {"tied_head": False},
    {"norm_position": "post"},
    {"n_kv_heads": 2, "activation": "swiglu", "qk_norm": "head"},
    {"n_kv_heads": 1, "qk_norm": "head"},
    {"n_kv_heads": 2, "qk_norm": "width"},
]


def style_of(operation: Operation) -> str | None:
    """How a module with this operation's parameters must be cut: by what its matrix sums over, or
    by what it makes."""
    made = operation.result.axes[1]
    if operation.kind == "head":
        return "_divide_logits"
    if operation.kind == "look_up":
        return "_divide_look_up" if "vocab" in operation.parameters[0].axes else None
    if operation.kind == "norm":
        return "_divide_norm_of_heads" if made in ("heads", "kv_heads") else None
    if AXIS_DIMENSIONS.get(operation.contracts) == ("tensor",):
        return "_divide_columns"
    if made == "kv_heads":
        return "_divide_keys_and_values"
    return "_divide_rows" if AXIS_DIMENSIONS.get(made) == ("tensor",) else None


def name_of(style: Any) -> str:
    """The name of the function that a style is."""
    return style.func.__name__ if isinstance(style, functools.partial) else style.__name__


@pytest.mark.parametrize("changed", MODELS, ids=str)
def test_the_table_cuts_what_the_axes_divide(changed):
    model = ModelConfig(
        vocab_size=19, context_length=8, n_layers=2, n_heads=4, d_model=8, **changed
    )
    table = {path: name_of(style) for path, style in tensor_parallel.tensor_table().items()}
    modules = dict(GPT(model).named_modules())
    cut = {}
    for operation in operations(model):
        path = operation.name.replace(".0.", ".*.").replace(".1.", ".*.")
        path = path.replace(".q_norm", ".?_norm").replace(".k_norm", ".?_norm")
        style = style_of(operation) if operation.parameters else None
        if style is not None:
            cut[path] = style
            assert operation.name in modules
    assert cut.items() <= table.items()
    reading = {path for path, style in table.items() if style == "_read_together"}
    assert reading == {"blocks.*.attention", "blocks.*.mlp"}
    others = table.keys() - cut.keys() - reading - {"head_loss"}
    assert not any(path.replace("*", "0").replace("?", "q") in modules for path in others)
