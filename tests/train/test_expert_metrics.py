"""The loads of experts during a run: when they are recorded, what is recorded, who is warned."""

import math
from types import SimpleNamespace

import pytest
from tiny_runs import config, events, fit

from pentameter.record.events import ExpertMetrics
from pentameter.train.run import records_loads
from pentameter.train.say.run_lines import RunLines

MIXTURE = {"n_experts": 4, "d_expert": 8, "n_layers": 2, "dense_layers": 1}


class Kept:
    def __init__(self):
        self.metrics = []

    def on_experts(self, run, metrics):
        self.metrics.append(metrics)


def test_logged_steps_have_an_event_for_each_layer_with_experts(tmp_path):
    hook = Kept()
    sections = {"model": MIXTURE, "log": {"interval": 5}}
    fit(tmp_path / "run", sections=sections, hooks=[hook])
    found = events(tmp_path / "run", "experts")
    assert [(each["step"], each["layer"]) for each in found] == [(s, 1) for s in (1, 5, 10, 12)]
    assert [list(each.loads) for each in hook.metrics] == [each["loads"] for each in found]
    for each in found:
        loads = each["loads"]
        assert sum(loads) == 4 * 16 * 2  # tokens of a step, each to two experts
        assert each["max_over_mean"] == max(loads) / 32
        assert each["idle"] == loads.count(0)
        shares = [load / 128 for load in loads if load]
        assert each["entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares))
        assert each["z"] > math.log(4) ** 2 / 2  # of four small logits it is about log(4)²
        assert 0 < each["logit_rms"] < 1
        assert each["exchanged_bytes"] == 0


def of_loads(step, layer, loads):
    return ExpertMetrics.of_totals(step, layer, [*loads, 12.0, 27.0, 5.0], n_chosen=2)


def test_sums_become_means():
    metrics = of_loads(1, 0, (4, 2, 0))  # three tokens
    assert (metrics.z, metrics.logit_rms) == (4.0, math.sqrt(3))
    assert metrics.exchanged_bytes == 5


def test_equal_loads_have_the_largest_entropy():
    metrics = of_loads(1, 0, (8,) * 5)
    assert (metrics.max_over_mean, metrics.idle) == (1.0, 0)
    assert metrics.entropy == pytest.approx(math.log(5))


def test_a_long_run_records_loads_less_often_than_it_logs():
    def recorded(**train):
        chosen = config(model=MIXTURE, train=train, log={"interval": 10})
        return [step for step in range(1, train["steps"] + 1) if records_loads(step, chosen)]

    assert recorded(steps=35) == [1, 10, 20, 30, 35]
    long = recorded(steps=20_001)
    assert long[:3] == [1, 110, 220]
    assert long[-1] == 20_001
    assert len(long) <= 202
    assert not any(records_loads(step, config(train={"steps": 10})) for step in range(1, 11))


def warnings(loads_by_step, **model):
    """What is said of one layer's loads, step → loads."""
    said = []
    run = SimpleNamespace(
        config=config(model={**MIXTURE, **model}), console=SimpleNamespace(say=said.append)
    )
    lines = RunLines()
    for step, loads in loads_by_step.items():
        lines.on_experts(run, of_loads(step, 1, loads))
    return said


def test_experts_that_are_idle_for_long_are_told_once():
    (said,) = warnings(dict.fromkeys(range(100, 400, 20), (3, 0, 5, 0)))
    assert said == (
        "warning: step 200: experts 1, 3 of layer 1 had no token in any step recorded since step "
        "100, and learnt nothing; model.router.balance spreads tokens over them"
    )
    (said,) = warnings(dict.fromkeys(range(1, 2000, 200), (3, 0, 5, 1)), balance="bias")
    assert "step 801: expert 1 of layer 1" in said
    assert "a larger model.router.balance_rate spreads" in said


def test_an_expert_that_has_a_token_now_and_then_is_not_told():
    assert not warnings({step: (3, step % 80 == 0, 5, 1) for step in range(100, 900, 20)})
    assert not warnings(dict.fromkeys(range(1, 99), (3, 0, 5, 1)))
