"""The slowest rank in the report."""

from __future__ import annotations

from pages import text_of

from pentameter.record.reading import read_run
from pentameter.report.figures.plots import PAGE, small_figures
from pentameter.report.pages.page import render_page


def ranks_event(step, slowest, waited):
    return {"event": "ranks", "step": step, "slowest": slowest, "host": f"node-{slowest}",
            "waited": waited}  # fmt: skip


def test_how_long_ranks_wait_for_the_slowest_one(make_run, run_events):
    events = [ranks_event(10, 0, 0.01), ranks_event(20, 3, 0.2), ranks_event(30, 3, 0.3)]
    record = read_run(make_run([*run_events(40), *events]))
    assert record.train["waited"].values == (0.01, 0.2, 0.3)
    text = text_of(render_page(record))
    assert "20.0 %" in text
    assert "of a step; 66.7 % of it rank 3 on node-3" in text
    assert "waited" in [key for key, _, _ in small_figures(record, PAGE)]


def test_a_run_of_one_process_says_nothing_of_ranks(make_run, run_events):
    record = read_run(make_run([*run_events(40), {"event": "ranks", "step": 10, "waited": "?"}]))
    assert "Slowest rank" not in text_of(render_page(record))
