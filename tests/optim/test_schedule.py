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
