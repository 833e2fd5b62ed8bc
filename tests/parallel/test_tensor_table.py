"""The modules that tensor parallelism cuts, against the axes that it divides."""

from typing import Any

import pytest
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from pentameter.config.schema import ModelConfig
from pentameter.model.gpt import GPT
from pentameter.parallel.tensor_parallel import (
    NormOfAllHeads,
    NormOfOwnHeads,
    OwnRows,
    VocabularyParallel,
    tensor_table,
)
from pentameter.planning.architecture import Operation, operations
from pentameter.planning.layout import AXIS_DIMENSIONS, Layout

MODELS: list[dict[str, Any]] = [
    {},
    {"tied_head": False},
    {"norm_position": "post"},
    {"n_kv_heads": 2, "activation": "swiglu", "qk_norm": "head"},
    {"n_kv_heads": 1, "qk_norm": "head"},
    {"n_kv_heads": 2, "qk_norm": "width"},
]


def style_of(operation: Operation, layout: Layout) -> type | None:
    """How a module with this operation's parameters must be cut: by what its matrix sums over, or
    by what it makes."""
    if operation.kind == "head":
        return VocabularyParallel
    made = operation.result.axes[1]
    if operation.kind == "norm":
        by_head = operation.parameters[0].axes == ("head",)
        of_heads = NormOfOwnHeads if by_head else NormOfAllHeads
        return of_heads if made in ("heads", "kv_heads") else None
    if AXIS_DIMENSIONS.get(operation.contracts) == ("tensor",):
        return RowwiseParallel
    if made == "kv_heads" and layout.kv_copies > 1:
        return OwnRows
    return ColwiseParallel if AXIS_DIMENSIONS.get(made) == ("tensor",) else None


@pytest.mark.parametrize("changed", MODELS, ids=str)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_table_cuts_what_the_axes_divide(changed, sequence):
    model = ModelConfig(
        vocab_size=19, context_length=8, n_layers=2, n_heads=4, d_model=8, **changed
    )
    layout = Layout(tensor=2, sequence=sequence).for_model(model)
    table = tensor_table(model, layout)
    found = {
        operation.name.replace(".0.", ".*.").replace(".1.", ".*."): style_of(operation, layout)
        for operation in operations(model)
        if operation.parameters
    }
    cut = {name: style for name, style in found.items() if style is not None}
    assert cut == {name: type(table[name]) for name in cut}
    inputs = {name for name, style in table.items() if isinstance(style, PrepareModuleInput)}
    assert inputs == {"blocks.*.attention", "blocks.*.mlp"}
    modules = dict(GPT(model).named_modules())
    unused = table.keys() - cut.keys() - inputs - {"head_loss"}
    assert not any(name.replace("*", "0") in modules for name in unused)
