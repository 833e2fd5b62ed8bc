"""A link between two nodes that is cut for good: both sides leave, and say whom they lost."""

from __future__ import annotations

import pytest

from trials.faults.two_nodes import cut_while_training, reason_not_to

TIMEOUT_SECONDS = 5.0


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "environment"])
def test_both_sides_of_a_cut_link_leave(tmp_path, launcher):
    if (reason := reason_not_to()) is not None:
        pytest.skip(reason)
    near, far = cut_while_training(tmp_path, launcher, TIMEOUT_SECONDS)
    for side, other in ((near, "rank 1"), (far, "rank 0")):
        assert side.seconds is not None, "it never leaves"
        assert side.seconds < TIMEOUT_SECONDS + 10
        assert side.code == (1 if launcher == "torchrun" else 70)  # torchrun's own; it prints 70
        assert f"{other} did not answer within 5 s (parallel.timeout_seconds)" in side.said
    assert "neither does the store at 10.77.0.1:29477: the network to that machine" in far.said
