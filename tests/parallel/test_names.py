"""Where a rank waits is told by the traceback of the collective that failed."""

from __future__ import annotations

import pytest
from measured import configuration, waits

EXPERTS = {"n_experts": 4, "experts_per_token": 2}
IN_ORDER = {
    "tensor=2": [
        "all-reduce over all ranks",
        "all-reduce along tensor of token_embedding in the forward pass",
        "all-reduce along tensor of blocks.0.attention.out in the forward pass",
    ],
    "pipeline=2": [
        "all-reduce over all ranks",
        "messages along pipeline of stage RANK",
    ],
    "data=2,zero=3": [
        "all-reduce over all ranks",
        "all-gather along shard of the parameters outside of blocks in the forward pass",
        "all-gather along shard of blocks.0.attention in the forward pass",
    ],
    "data=2,expert=2": [
        "all-reduce over all ranks",
        "all-to-all along expert of blocks.0.experts in the forward pass",
        "all-to-all along expert of blocks.0.experts in the forward pass",
    ],
}
IN_BACKWARD = {
    "tensor=2": (13, "all-reduce along tensor of blocks.3.mlp.up in the backward pass"),
    "data=2,zero=3": (13, "reduce-scatter along shard of blocks.3.mlp in the backward pass"),
    "data=2,expert=2": (
        13,
        "all-to-all along expert of blocks.3.experts.down in the backward",
    ),
}
"""A later collective: its number in the step, and its name."""


@pytest.mark.parametrize("layout", IN_ORDER)
def test_a_collective_is_named_with_its_layer(processes, layout):
    """The first collectives of a step, in order, and one of its backward pass."""
    config = configuration(layout, EXPERTS if "expert" in layout else {}, {"micro_batch_size": 2})
    told = dict(enumerate(IN_ORDER[layout]))
    if layout in IN_BACKWARD:
        number, name = IN_BACKWARD[layout]
        told[number] = name
    for rank, found in enumerate(processes.run(2, waits, config, list(told))):
        for wait, name in zip(found, told.values(), strict=True):
            assert str(wait).startswith(f"the {name.replace('RANK', str(rank))}")
            assert wait.ranks == ([] if "all ranks" in name else [0, 1])


def test_gradients_that_are_being_summed_are_named(processes):
    config = configuration("data=2", {}, {})
    for found in processes.run(2, waits, config, [0], True):
        (wait,) = found
        assert str(wait) == (
            "the all-reduce along data of the gradients of token_embedding.weight to head.bias in "
            "the backward pass"
        )
