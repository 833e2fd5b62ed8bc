"""Which rank is slow, and when that is said."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from pentameter.config.schema import Config
from pentameter.planning.layouts.layout import parse_layout
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World
from pentameter.record.events import RankMetrics
from pentameter.train.faults.pace import SLOW_STEPS, OwnTime, RankPace, SlowRank

TRAIN = {"steps": 100, "batch_size": 8, "precision": "fp32"}
MODEL = {"vocab_size": 13, "context_length": 8, "n_layers": 4, "n_heads": 2, "d_model": 8}


class Alone(World):
    """A world whose other ranks are on the machines `b`, `c`, …."""

    def all_gather(self, value):
        return [value, *"bcdefgh"[: self.size - 1]]


def pace(layout, size, **train):
    config = Config.model_validate(
        {
            "model": MODEL,
            "data": {"corpus": "grammar"},
            "train": TRAIN | train,
            "parallel": parse_layout(layout).to_json(),
        }
    )
    return RankPace(make_plan(config, world_size=size), Alone(0, size))


def test_a_rank_is_compared_with_the_median_of_the_others():
    ranks, own = pace("data=4", 4), OwnTime(0.1, 0.2, 10)
    assert ranks.numbers(own) == [100_000_000, 0, 0, 0]
    found = ranks.metrics(30, [100_000_000, 102_000_000, 150_000_000, 98_000_000], own)
    found = replace(found, time=0.0)  # was NaN, which from Python 3.13 on equals none here, either
    waited = pytest.approx(0.25)
    assert found == RankMetrics(30, 10, 2, "c", 0.15, 0.1, waited, True, time=0.0)
    assert ranks.metrics(30, [9, 5, 5, 5], own).host == socket.gethostname()
    assert ranks.metrics(30, [5, 5, 5, 5], own).waited == 0


def test_in_a_pipeline_a_rank_is_compared_with_its_stage():
    ranks, own = pace("data=2,pipeline=2", 4), OwnTime(0.1, 0.4, 10)
    found = ranks.metrics(10, [100, 110, 300, 400], own)
    assert (found.slowest, found.alike) == (3, True)
    assert found.own_seconds / found.others_seconds == pytest.approx(4 / 3)


def test_the_only_rank_of_a_stage_is_compared_with_what_the_plan_expects():
    ranks, own = pace("pipeline=2", 2), OwnTime(1e-7, 3e-7, 10)
    first, last = ranks._costs
    assert last > first  # it has the head
    found = ranks.metrics(10, [100, round(100 * last / first)], own)
    assert found.own_seconds == pytest.approx(found.others_seconds, rel=0.01)
    assert not found.alike
    assert ranks.metrics(10, [200, round(100 * last / first)], own).slowest == 0


def metrics(step, own, *, slowest=1, alike=True):
    return RankMetrics(step, 10, slowest, "b", own, 1.0, 0.2, alike)


def test_a_rank_that_is_slow_for_long_is_said_once():
    slow = SlowRank()
    said = [slow.warning(metrics(step, 1.25)) for step in range(10, 210, 10)]
    (warning,) = filter(None, said)
    assert said.index(warning) == SLOW_STEPS // 10 - 1
    assert warning.startswith(
        "rank 1 on b has taken 1.25 s of a step for itself, 25% more than the 1 s of the others, "
        "for 50 steps: they wait for it 20% of the time."
    )


def test_it_is_said_again_only_after_it_was_well_for_long():
    slow = SlowRank()

    def said(own, n_records):
        return [w for _ in range(n_records) if (w := slow.warning(metrics(0, own)))]

    assert len(said(1.3, 5)) == 1
    assert said(1.0, 1) == []
    assert said(1.3, 9) == []
    assert said(1.0, 5) == []
    assert len(said(1.3, 9)) == 1


def test_nothing_is_said_of_ranks_that_take_turns_nor_of_a_stage_that_the_plan_underrates():
    slow = SlowRank()
    for step in range(100):
        assert slow.warning(metrics(step, 1.5, slowest=step % 2)) is None
        assert slow.warning(metrics(step, 1.9, alike=False)) is None
