"""What tests of runs of a given time share."""

from __future__ import annotations

import pytest

from pentameter.train.timed import choosing, time_budget
from pentameter.train.timed.trial import Pace


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """The configurations that were tried, of a text in the current folder."""
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night; the rain fell. " * 60)
    monkeypatch.chdir(tmp_path)
    tried = []

    def measure(config, dataset, seconds):
        tried.append(config)
        return Pace(2.0, 0.05, 1.0, 1e9, compiled=False)

    monkeypatch.setattr(time_budget, "CLOSING_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "measure_pace", measure)
    # The choice depends on the clock and on this machine's speed, which here stand still.
    monkeypatch.setattr(time_budget.TimeBudget, "used", 1.0)
    monkeypatch.setattr(choosing, "_expected_flops", lambda config: 1e10)
    monkeypatch.setattr(choosing, "_fraction_of_cores", lambda: 1.0)
    return tried
