"""`benchmarks/quality.py`: where a race ends, and what an estimate of one is made of."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("quality")


class Run:
    """A run that evaluates until it is stopped, and remembers why it was."""

    def __init__(self, race, clock, losses, split="val"):
        self.reason = None
        for index, loss in enumerate(losses):
            if self.reason is None:
                clock.now += 10.0
                race.on_eval(self, SimpleNamespace(split=split, step=50 * index, loss=loss))

    def stop(self, reason):
        self.reason = reason


@pytest.fixture
def clock(quality, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(quality.time, "perf_counter", lambda: clock.now)
    return clock


def test_a_race_ends_at_the_target(quality, clock):
    race = quality.Race(1.5)
    run = Run(race, clock, [4.0, 1.6, 1.5, 1.4])
    assert (race.steps, race.seconds, run.reason) == (100, 30.0, "target reached")


def test_losses_of_the_training_split_win_no_race(quality, clock):
    race = quality.Race(1.5)
    assert Run(race, clock, [4.0, 1.4], split="train").reason is None
    assert (race.steps, race.losses) == (None, {})


def test_an_estimate_pays_the_start_once(quality, clock):
    sample = quality.Sample()
    run = Run(sample, clock, [4.0])  # of the untrained model
    for seconds in (50.0, 2.0, 9.0, 2.0):  # compiles; one is disturbed
        clock.now += seconds
        sample.on_step(run, None)
    Run(sample, clock, [3.0])
    assert sample.times() == {"first": 60.0, "step": 2.0, "evaluation": 10.0}
    assert run.reason is None
    assert quality.race_seconds(500, 50, sample.times()) == 60 + 499 * 2 + 10 * 10
