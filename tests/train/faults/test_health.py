"""What is said of the ranks before the first step."""

from __future__ import annotations

from pentameter.machine.health import Health
from pentameter.train.faults.health import _better, _outliers

WELL = Health(1e11, 1e10, {"data": 0.001})


def outliers(*every):
    return list(_outliers([f"node-{rank}" for rank in range(len(every))], every))


def test_ranks_that_are_alike_are_no_outliers():
    assert outliers(WELL, Health(0.6e11, 1.9e10, {"data": 0.0019}), WELL) == []


def test_outliers_are_named_with_their_value_and_that_of_the_others():
    assert outliers(WELL, WELL, Health(4e10, 1e10, {"data": 0.008}), WELL) == [
        "rank 2 on node-2 multiplies at 40 GFLOP/s, the others at a median of 100 GFLOP/s: each "
        "step waits for it",
        "rank 2 on node-2 exchanges 1 MiB along data in 8 ms, the others at a median of 1 ms: each "
        "step waits for it",
    ]
    (memory,) = outliers(WELL, Health(1e11, 2e9, {"data": 0.001}))
    assert memory.startswith("rank 1 on node-1 copies memory at 2 GB/s, the others at a median of")


def test_the_best_of_two_measurements_counts():
    busy = Health(1e10, 2e10, {"data": 0.01})
    assert _better(WELL, busy) == Health(1e11, 2e10, {"data": 0.001})
