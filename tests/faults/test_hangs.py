"""A rank that hangs or dies is named, with the step and the collective that it did not reach."""

from __future__ import annotations

import pytest

from trials.faults.hangs import assert_named, hang_at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "where", "how", "named"),
    [
        ("data", "backward", "spin", "all-reduce along data of the gradients of token_embedding"),
        ("tensor", "forward", "stop", "all-reduce along tensor of blocks.1.attention.out in the f"),
        ("tensor", "backward", "sleep", "all-reduce along tensor of blocks.1.mlp.up in the back"),
        ("pipeline", "forward", "kill", "messages along pipeline of stage 0"),
        (
            "zero",
            "backward",
            "stop",
            "all-gather along shard of blocks.1.attention in the back",
        ),
        (
            "expert",
            "forward",
            "sleep",
            "all-to-all along expert of blocks.1.experts in the forw",
        ),
        ("data", "optimizer", "stop", "all-reduce over all ranks of agree"),
        ("data", "save", "sleep", "all-gather over all ranks of _plan"),
        ("data", "load", "spin", "all-gather over all ranks of _fill"),
    ],
)
def test_who_hangs_is_named_with_the_collective_that_it_did_not_reach(layout, where, how, named):
    left = hang_at(layout, where, how)
    assert_named(left)
    assert f"did not reach the {named}" in left.message
