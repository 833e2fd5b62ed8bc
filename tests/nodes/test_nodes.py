"""Runs on several nodes go on after any fault, and give what an undisturbed run gives.

`tests/processes/test_node_launch.py` has the launchers' part of it in the quick tier; `python -m
tests.nodes` makes many trials.
"""

from __future__ import annotations

import pytest
from network import reason_not_to
from trials import TRIALS, table, upper_bound


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRIALS)
def test_a_run_on_three_nodes_survives(kind, tmp_path):
    if (reason := reason_not_to()) is not None:
        pytest.skip(reason)
    trial = TRIALS[kind](7, tmp_path)
    assert not trial.problem, trial


def test_what_a_table_says_of_its_trials():
    """The bounds are those of the rule of three, and of a textbook's table."""
    assert upper_bound(0, 300) == pytest.approx(3 / 300, rel=0.01)
    assert upper_bound(2, 20) == pytest.approx(0.2826, abs=1e-4)
    assert table([]).splitlines()[-1] == "| all | 0 | 0 | 100% | – | – |"
