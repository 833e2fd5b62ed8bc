"""The search: what it finds fits, nothing legal is faster, and its bound is one."""

import pytest

from pentameter.config.load import load_config
from pentameter.planning import search as module
from pentameter.planning.cluster import parse_cluster
from pentameter.planning.memory import step_memory
from pentameter.planning.search import first_change, reasons, search, settings_that_fit
from pentameter.planning.step_time import step_time

SMALL = {
    "model.vocab_size": 50304,
    "model.n_layers": 8,
    "model.n_heads": 8,
    "model.d_model": 1024,
    "model.context_length": 1024,
    "train.batch_size": 32,
    "train.precision": "bf16",
}


@pytest.fixture(scope="module")
def small():
    return load_config("quickstart", SMALL), parse_cluster("a100-40gb:4x1")


def test_no_step_is_faster_than_its_bound(small):
    config, cluster = small
    plan = module._base(config, None, None)
    candidates = list(module._candidates(plan, cluster, "bf16"))
    assert len(candidates) > 100
    for each in candidates[::7]:
        parts = (each.config, each.layout, each.stages)
        took = step_time(*parts, cluster, "bf16").seconds
        assert each.bound <= took * (1 + 1e-9), each.layout


def test_it_finds_the_fastest_that_fits(small):
    config, cluster = small
    found = search(config, cluster, n_best=3, most_timed=10_000)
    assert found.is_complete
    assert all(each.fits for each in found.estimates)
    times = [each.time.seconds for each in found.estimates]
    assert times == sorted(times)
    plan = module._base(config, None, None)
    fastest = min(
        step_time(each.config, each.layout, each.stages, cluster, "bf16").seconds
        for each in module._candidates(plan, cluster, "bf16")
        if step_memory(each.config, each.layout, each.stages, "bf16").total_bytes
        <= cluster.usable_bytes
    )
    assert times[0] == pytest.approx(fastest)
    assert len({str(each.plan.layout) for each in found.estimates}) == 3
    assert reasons(found.estimates[0], found.estimates[2])


def test_what_may_not_be_is_left_out(small):
    config, cluster = small
    found = search(config, cluster, n_best=2, allowed=lambda each: each.layout.pipeline == 4)
    assert {each.plan.layout.pipeline for each in found.estimates} == {4}
    nothing = search(config, cluster, allowed=lambda each: False)
    assert nothing.estimates == ()


def test_settings_that_fit_are_those_of_a_command_line(small):
    config, cluster = small
    estimate = search(config, cluster, n_best=1).estimates[0]
    needed = estimate.memory.total_bytes
    options = settings_that_fit(estimate.plan, 0.8 * needed, "bf16")
    assert options
    changed = load_config(estimate.plan.portable_config, options[0].split())
    from pentameter.planning.plan import make_plan

    plan = make_plan(changed, world_size=4)
    assert plan.memory("bf16").total_bytes <= 0.8 * needed
    assert settings_that_fit(estimate.plan, 1.0, "bf16") == []


def test_the_first_change_is_faster(small):
    config, cluster = small
    slow = load_config(config, {"train.activation_checkpoint": "full"})
    from pentameter.planning.estimate import make_estimate

    found = make_estimate(slow, cluster)
    words, changed = first_change(found)
    assert words.startswith("--")
    assert changed.time.seconds < found.time.seconds
