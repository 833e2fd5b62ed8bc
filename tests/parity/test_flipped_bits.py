"""A flipped bit is found within `train.check_every` steps, and nothing of it is saved."""

import pytest

from trials.faults.flipped_bits import FAULTS, trials

AT_REST = ("weight", "moment")


@pytest.mark.parametrize(
    ("layout", "faults"),
    [("data=2", FAULTS), ("data=2,zero=2", ("weight", "processor")), ("tensor=2", AT_REST)],
)
def test_a_flipped_bit_is_found_and_not_saved(runs, layout, faults):
    found = trials(runs, layout, [(fault, 1) for fault in faults])
    assert [each.fault for each in found] == [*faults]
    for each in found:
        assert each.outcome != "missed", each
        assert each.outcome == "found" or each.fault == "message", each  # a loss's last bits
        if each.fault in AT_REST:
            assert each.names_rank, each


def test_one_of_three_copies_that_computes_otherwise_is_named(runs):
    (found,) = trials(runs, "data=3", [("processor", 2)])
    assert found.outcome == "found"
    assert found.names_rank
    assert "the gradients that rank" in found.said
