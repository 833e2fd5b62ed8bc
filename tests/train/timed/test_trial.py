"""The trial before a run of `train --time`."""

from __future__ import annotations

import tiny_runs

from pentameter.data.open_dataset import open_dataset
from pentameter.train.timed.trial import measure_pace


def test_a_trial_measures_steps_and_the_evaluation():
    config = tiny_runs.config()
    pace = measure_pace(config, open_dataset(config.data), 0.05)
    assert 0 < pace.step_seconds < 5
    assert pace.evaluation_seconds > 0
    assert pace.first_seconds >= 0
    assert pace.flops_per_second > 1e3
    assert not pace.compiled


def test_a_trial_without_evaluations():
    config = tiny_runs.config(train={"eval_interval": None})
    assert measure_pace(config, open_dataset(config.data), 0.01).evaluation_seconds == 0
