"""Messages to neighbours, timed and checked in each group."""

from __future__ import annotations

import pytest
from measured import configuration, health


def test_every_group_is_measured(processes):
    config = configuration("data=2,tensor=2", {}, {})
    for seconds, faults in processes.run(4, health, config, None):
        assert seconds.keys() == {"data", "tensor"}
        assert all(0 < each < 5 for each in seconds.values())
        assert faults == []


@pytest.mark.parametrize("liar", [0, 1])
def test_a_link_that_changes_a_bit_is_named_by_who_receives(processes, liar):
    config = configuration("data=2", {}, {})
    found = processes.run(2, health, config, liar)
    assert found[liar][1] == []
    assert found[1 - liar][1] == [
        f"receives other words from rank {liar} along data than it sent: 1 of 131,072 differ"
    ]
