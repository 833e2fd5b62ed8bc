"""The learning rate at the steps the workloads publish, and its shape in general."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.config.schema import OptimizerConfig, ScheduleConfig
from pentameter.optim.schedule import learning_rate


def test_cosine_gives_the_published_rates_of_the_token_budget_recipe():
    optimizer = OptimizerConfig(learning_rate=6e-4)
    schedule = ScheduleConfig(
        name="cosine", warmup_steps=10, decay_steps=50, min_learning_rate=6e-5
    )
    rates = {step: learning_rate(step, optimizer, schedule) for step in (0, 9, 10, 30, 50, 80)}
    assert rates[0] == pytest.approx(6e-5, rel=1e-12)
    assert rates[9] == pytest.approx(6e-4, rel=1e-12)
    assert rates[10] == pytest.approx(6e-4, rel=1e-12)
    assert rates[30] == pytest.approx(3.3e-4, rel=1e-12)
    assert rates[50] == rates[80] == pytest.approx(6e-5, rel=1e-12)


def test_step_decay_multiplies_at_each_interval():
    optimizer = OptimizerConfig(learning_rate=5.0)
    schedule = ScheduleConfig(name="step", gamma=0.95, decay_interval=50)
    assert learning_rate(49, optimizer, schedule) == 5.0
    assert learning_rate(50, optimizer, schedule) == pytest.approx(4.75)
    assert learning_rate(149, optimizer, schedule) == pytest.approx(5.0 * 0.95**2)


def test_constant_is_constant():
    optimizer = OptimizerConfig(learning_rate=3e-4)
    schedule = ScheduleConfig(name="constant")
    assert {learning_rate(step, optimizer, schedule) for step in range(100)} == {3e-4}


@given(
    warmup=st.integers(0, 50),
    decay=st.integers(1, 200),
    step=st.integers(0, 400),
    low=st.floats(0, 1e-3),
)
def test_cosine_stays_between_its_ends_after_warmup(warmup, decay, step, low):
    optimizer = OptimizerConfig(learning_rate=1e-3)
    schedule = ScheduleConfig(
        name="cosine", warmup_steps=warmup, decay_steps=decay, min_learning_rate=low
    )
    rate = learning_rate(step, optimizer, schedule)
    assert 0 < rate <= 1e-3 * (1 + 1e-12) or (rate == 0 and low == 0)
    if step >= warmup:
        assert rate >= low * (1 - 1e-12)
        assert learning_rate(step + 1, optimizer, schedule) <= rate


def test_linear_and_wsd_by_hand():
    optimizer = OptimizerConfig(learning_rate=1.0)
    shape = {"warmup_steps": 2, "decay_steps": 12, "min_learning_rate": 0.5}
    linear = ScheduleConfig(name="linear", **shape)
    rates = [learning_rate(step, optimizer, linear) for step in range(14)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == 0.75
    assert rates[12:] == [0.5, 0.5]
    wsd = ScheduleConfig(name="wsd", cooldown_steps=4, **shape)
    rates = [learning_rate(step, optimizer, wsd) for step in range(14)]
    assert rates[:9] == [0.5] + [1.0] * 8
    assert rates[9:] == [0.875, 0.75, 0.625, 0.5, 0.5]


@given(
    name=st.sampled_from(["cosine", "linear", "wsd"]),
    warmup=st.integers(1, 50),
    decay=st.integers(1, 200),
    cooldown=st.integers(1, 250),
    low=st.floats(0, 1e-3),
)
def test_every_decay_begins_at_its_peak_and_ends_at_its_floor(name, warmup, decay, cooldown, low):
    peak = 1e-3
    schedule = ScheduleConfig(
        name=name,
        warmup_steps=warmup,
        decay_steps=decay,
        cooldown_steps=cooldown,
        min_learning_rate=low,
    )

    def rate(step):
        return learning_rate(step, OptimizerConfig(learning_rate=peak), schedule)

    assert rate(0) == pytest.approx(peak / warmup, rel=1e-12)
    assert rate(warmup - 1) == pytest.approx(peak, rel=1e-12)
    assert rate(warmup) == pytest.approx(peak, rel=1e-12)
    end = max(decay, warmup + 1)  # a decay that ends within the warm-up is over one step after it
    assert rate(end) == pytest.approx(low, rel=1e-12, abs=1e-18)
    assert rate(end + 100) == rate(end)
    # No jump: from one step to the next at most the slope of the shortest part.
    first = max(warmup, decay - cooldown) if name == "wsd" else warmup
    steepest = (peak - low) * (1.6 if name == "cosine" else 1.0) / max(1, decay - first)
    for step in range(warmup, end + 2):
        assert 0 <= rate(step) - rate(step + 1) + 1e-15 <= steepest + 2e-15
