"""Spikes of the loss, and the command that shows what their steps read."""

import math
import random

import pytest
from pages import check_page, text_of

from pentameter.record.curves import Series, spikes
from pentameter.report.pages.page import write_report


def falling(n, noise=0.05, **raised):
    """A loss that falls, with noise; `raised` has heights added at indices `at_INDEX`."""
    drawn = random.Random(3)
    values = [2 + 4 * math.exp(-index / (n / 10)) + drawn.gauss(0, noise) for index in range(n)]
    for name, height in raised.items():
        values[int(name.removeprefix("at_"))] += height
    return Series(tuple(range(10, 10 * n + 1, 10)), tuple(values))


@pytest.mark.parametrize("n", [5, 20, 31, 32, 400, 3000])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_loss_that_falls_has_no_spike(n, noise):
    assert spikes(falling(n, noise)) == []
    assert spikes(Series()) == []


@pytest.mark.parametrize("index", [3, 20, 200, 390, 399])
def test_a_spike_is_found_at_its_step(index):
    series = falling(400, **{f"at_{index}": 9.0})
    (found,) = spikes(series)
    assert (found.step, found.value) == (10 * (index + 1), series.values[index])
    assert found.value - found.usual == pytest.approx(9, abs=2)  # it falls fast at the start


def test_the_largest_come_first_and_of_neighbours_the_highest():
    series = falling(3000, at_500=1.0, at_900=3.0, at_901=4.0, at_902=2.0, at_2000=2.0)
    assert [each.step for each in spikes(series)] == [9020, 20010, 5010]
    assert [each.step for each in spikes(series, most=1)] == [9020]


def test_noise_that_grows_is_no_spike():
    drawn = random.Random(1)
    values = tuple(3 + drawn.gauss(0, 0.01 if index < 500 else 0.3) for index in range(1000))
    assert spikes(Series(tuple(range(1000)), values)) == []


def test_the_report_names_the_command(make_run, run_events):
    events = run_events(400)
    (spike,) = [event for event in events if event["event"] == "train" and event["step"] == 200]
    spike["loss"] = 7.5
    folder = make_run(events, plan_json='{"data": {"batches": null}}')
    page = check_page(write_report(folder).read_text(encoding="utf-8"))
    assert f"pentameter data &#39;{folder}&#39; --step 200" in page
    assert "7.5000" in text_of(page)
    (folder / "plan.json").write_text('{"data": {"batches": "of_mine"}}')
    page = check_page(write_report(folder).read_text(encoding="utf-8"))
    assert "7.5000" in text_of(page)
    assert "pentameter data" not in page
