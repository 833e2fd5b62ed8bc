"""The battery itself: its bounds, its end of what is left, and mistakes that it must catch.

The quick tier of each class is a test somewhere; benchmarks/measurements/faults.md names them. Here
is that of the classes which no other test covers.
"""

from __future__ import annotations

import random
import sys

import pytest

from trials.faults import kills
from trials.faults.battery import FaultClass, Record, Result, failure_bound, markdown, run_trials
from trials.faults.mistakes import MISTAKES, catch
from trials.faults.power import a_power_loss
from trials.faults.table import CLASSES
from trials.faults.trial import Trial


@pytest.mark.parametrize(
    ("n_trials", "n_failures", "bound"),
    [(1, 0, 0.95), (20, 0, 1 - 0.05**0.05), (300, 0, 0.00994), (10, 1, 0.3942), (5, 5, 1.0)],
)
def test_the_bound_is_that_of_clopper_and_pearson(n_trials, n_failures, bound):
    assert failure_bound(n_trials, n_failures) == pytest.approx(bound, rel=1e-3)


def leave_a_process(trial: Trial) -> str:
    import subprocess

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    return "nothing wrong"


def never_hold(trial: Trial) -> str:
    raise AssertionError(f"drawn: {trial.draw.random()}")


@pytest.fixture
def quick_end(monkeypatch):
    monkeypatch.setattr("trials.faults.battery.GRACE_SECONDS", 0.2)


def run_one(trial, shared, seed=0):
    (result,) = run_trials(FaultClass("Z", "", "", 1, trial), seed, [0], shared)
    return result


def test_a_failure_says_what_and_is_drawn_again_from_the_same_seed(tmp_path, quick_end):
    one, again, other = (run_one(never_hold, tmp_path, seed) for seed in (0, 0, 1))
    assert not one.held
    assert one.seen.startswith("AssertionError in never_hold, at `raise AssertionError(")
    assert one.seen == again.seen != other.seen


def test_results_are_kept_and_shown(tmp_path):
    record = Record(tmp_path / "results.jsonl", seed=3)
    record.add(Result("C2", 0, True, "x", 1.0))
    record.add(Result("C2", 1, False, "y", 3.0))
    again = Record(tmp_path / "results.jsonl", seed=3)
    assert again.results == record.results
    assert Record(tmp_path / "results.jsonl", seed=4).results == []
    (row,) = [line for line in markdown(CLASSES, again).splitlines() if line.startswith("| C2")]
    assert "| 300 | 2 | 1 | 97 % | 3.0 |" in row


TESTS = """
import pytest

def test_passing(): pass
def test_failing(): assert 1 + 1 == 3, "a sum"
@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_slow(n): pass
@pytest.mark.skip
def test_skipping(): pass
"""


def test_each_case_of_existing_tests_is_a_trial(tmp_path, quick_end):
    (tmp_path / "test_some.py").write_text(TESTS)

    def trials(name, numbers=None):
        tests = FaultClass("Z", "", "", tests=[f"{tmp_path}/test_some.py{name}"])
        return [*run_trials(tests, 0, numbers, tmp_path)]

    found = trials("", numbers=[0, 1, 2])
    assert [(each.number, each.held) for each in found] == [
        (0, True), (1, False), (2, True),
    ]  # fmt: skip
    assert [each.seen for each in found] == [
        "test_passing", "test_failing: AssertionError: a sum\nassert (1 + 1) == 3",
        "test_slow[1]",
    ]  # fmt: skip
    assert trials("::test_skipping") == []
    (missing,) = trials("::test_gone")
    assert not missing.held
    assert "test_some.py::test_gone" in missing.seen


def trial_of(number, tmp_path_factory):
    shared = tmp_path_factory.getbasetemp() / "undisturbed"
    return Trial(number, random.Random(number), tmp_path_factory.mktemp("trial"), shared)


@pytest.mark.parametrize(
    "act", [a_power_loss, kills.segfault, kills.out_of_memory], ids=lambda act: act.__name__
)
def test_a_run_survives(act, tmp_path_factory):
    if act is kills.out_of_memory and (why := kills.no_memory_limit()) is not None:
        pytest.skip(why)
    act(trial_of(0, tmp_path_factory))


@pytest.mark.slow
@pytest.mark.parametrize("fault_class", CLASSES, ids=lambda each: each.id)
def test_every_class_holds(fault_class, tmp_path_factory):
    """An eighth of its trials or fewer; of classes of existing tests, those run by themselves."""
    if (why := fault_class.obstacle()) is not None:
        pytest.skip(why)
    numbers = range(min(3, fault_class.n_trials))
    shared = tmp_path_factory.getbasetemp() / "undisturbed"
    for result in run_trials(fault_class, 1, numbers, shared) if numbers else ():
        assert result.held, f"{result.number}: {result.seen}"


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_a_planted_mistake_is_caught(mistake, tmp_path_factory):
    shared = tmp_path_factory.getbasetemp() / "undisturbed"
    assert catch(mistake, shared, seed=0) is not None
