"""The hook that moves the end of a run of `train --time`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_runs

from pentameter.planning.plan import make_plan
from pentameter.record.events import StepMetrics
from pentameter.train.timed.time_kept import TimeKept

STEPS, WARM_UP, COOL_DOWN = 100, 5, 40


class Run:
    """A run of STEPS steps, as far as the hook reads it."""

    def __init__(self, begun_at: int = 0, **schedule) -> None:
        schedule = {"name": "wsd", "warmup_steps": WARM_UP, "cooldown_steps": COOL_DOWN} | schedule
        config = tiny_runs.config(train={"steps": STEPS, "eval_interval": None}, schedule=schedule)
        self.plan = make_plan(config, 16)
        self.config = self.plan.config
        self.state = SimpleNamespace(step=begun_at)
        self.reasons: list[str] = []
        self.stop = self.reasons.append


def moved(run: Run, step_seconds: float, asked: float, *, is_moved: bool = False):
    """The end that the hook moves to while steps take `step_seconds`, and the step of the stop."""
    budget = SimpleNamespace(seconds=asked, left=asked, closing_seconds=0.0)
    kept = TimeKept(budget, is_moved=is_moved)
    kept.on_start(run)
    kept._starting_seconds = 0.0
    for step in range(1, STEPS + 1):
        budget.left -= step_seconds
        kept.on_step(run, StepMetrics(step, 0, 0, 1.0, 1e-3, 1.0, step_seconds, 1.0, None, 0, 0.0))
        if kept.moved is not None:
            return kept.moved, step
    return None, STEPS


def test_a_slower_machine_cools_down_earlier():
    run = Run()
    end, step = moved(run, 2.0, asked=150.0)
    assert step == 35  # the rate falls for 40 steps of 2 s
    assert end.steps == 75
    assert end.cooldown_steps == COOL_DOWN
    assert "slower" in run.reasons[0]


def test_a_faster_machine_goes_on():
    run = Run()
    end, step = moved(run, 0.5, asked=100.0)
    assert step == STEPS - COOL_DOWN
    assert end.steps == 200
    assert end.cooldown_steps == COOL_DOWN
    assert "faster" in run.reasons[0]


@pytest.mark.parametrize("step_seconds", [0.96, 1.0, 1.04])
def test_a_small_difference_moves_nothing(step_seconds):
    assert moved(Run(), step_seconds, asked=100.0) == (None, STEPS)


def test_what_is_hopelessly_late_still_cools_down_after_its_warm_up():
    end, step = moved(Run(), 100.0, asked=100.0)
    assert step == 11  # ten steps say how slow it is
    assert WARM_UP + end.cooldown_steps <= end.steps == step + 1


def test_a_run_that_goes_on_shortly_before_its_cool_down_is_corrected_there():
    run, begun = Run(begun_at=STEPS - COOL_DOWN - 3), STEPS - COOL_DOWN - 3
    budget = SimpleNamespace(seconds=100.0, left=100.0, closing_seconds=0.0)
    kept = TimeKept(budget, begins_at=begun)
    kept.on_start(run)
    kept._starting_seconds = 0.0
    for step in range(begun + 1, begun + 4):
        assert kept.moved is None
        budget.left -= 0.5
        kept.on_step(run, StepMetrics(step, 0, 0, 1.0, 1e-3, 1.0, 0.5, 1.0, None, 0, 0.0))
    assert kept.moved.steps == begun + 3 + 197
    assert kept.moved.cooldown_steps == COOL_DOWN


def test_other_schedules_and_runs_begun_before_keep_their_end():
    assert moved(Run(name="cosine", cooldown_steps=None), 2.0, asked=100.0) == (None, STEPS)
    assert moved(Run(begun_at=3), 2.0, asked=100.0) == (None, STEPS)
    assert moved(Run(), 2.0, asked=100.0, is_moved=True) == (None, STEPS)
