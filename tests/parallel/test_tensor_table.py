"""The modules that tensor parallelism cuts, against the axes that it divides."""

from typing import Any

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pentameter.config.schema import ModelConfig
from pentameter.parallel.tensor_parallel import VocabularyParallel, tensor_table
from pentameter.planning.architecture import Operation, operations
from pentameter.planning.layout import AXIS_DIMENSIONS

MODELS: list[dict[str, Any]] = [{}, {"tied_head": False}, {"norm_position": "post"}]


def style_of(operation: Operation) -> type | None:
    """How a module with this operation's parameters must be cut: by what its matrix sums over, or
    by what it makes."""
    if operation.kind == "head":
        return VocabularyParallel
    if AXIS_DIMENSIONS.get(operation.contracts) == ("tensor",):
        return RowwiseParallel
    made = operation.result.axes[1]
    return ColwiseParallel if AXIS_DIMENSIONS.get(made) == ("tensor",) else None


@pytest.mark.parametrize("changed", MODELS, ids=str)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_table_cuts_what_the_axes_divide(changed, sequence):
    model = ModelConfig(
        vocab_size=19, context_length=8, n_layers=2, n_heads=2, d_model=8, **changed
    )
    table = tensor_table(sequence)
    found = {
        operation.name.replace(".0.", ".*.").replace(".1.", ".*."): style_of(operation)
        for operation in operations(model)
        if operation.parameters and operation.kind != "norm"
    }
    cut = {name: style for name, style in found.items() if style is not None}
    assert cut == {name: type(style) for name, style in table.items() if name != "head_loss"}
