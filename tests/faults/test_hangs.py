"""A rank that hangs or dies is named, with the step and the collective that it did not reach."""

from __future__ import annotations

import pytest
from hangs import STEP, TIMEOUT_SECONDS, hang_at

SLACK_SECONDS = 10.0


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
    assert left.exit_code == 70, left.said
    assert left.seconds < TIMEOUT_SECONDS + SLACK_SECONDS
    assert "rank 1" in left.message.removeprefix("pentameter: ")[:8], left.said
    assert f"did not reach the {named}" in left.message
    if where not in ("save", "load"):
        assert f"in step {STEP} (training)" in left.message
    if how != "kill":
        assert "rank 0 waited at" in left.said
        assert "in _hang" in left.said  # of rank 1's stack
