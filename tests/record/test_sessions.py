"""The sessions of a run in its report: which nodes trained when, and what each change cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from pages import check_page, text_of

from pentameter.record.reading import read_run
from pentameter.record.sessions import MOST_SESSIONS, Session, pauses
from pentameter.report.figures.sessions_figure import STRIP_INCHES, sessions_figure
from pentameter.report.pages.page import render_page

BEGIN = 1_764_000_000.0


def start(step, time, n_nodes, reached=None, **more):
    """A start or resume, `time` seconds after the first; `reached`: (step, time) before it."""
    step_before, time_before = reached or (None, None)
    return {
        "event": "resume" if reached else "start", "step": step, "time": BEGIN + time,
        "n_nodes": n_nodes, "world_size": 2 * n_nodes, "layout": f"data={2 * n_nodes}",
        "reached_step": step_before, "reached_time": reached and BEGIN + time_before,
    } | more  # fmt: skip


def steps(first, last, begin):
    """A step each second: the `first` one is recorded at `begin`."""
    return [
        {"event": "train", "step": step, "loss": 2.0, "time": BEGIN + begin + step - first}
        for step in range(first, last + 1)
    ]


HALF_LOST = [
    start(0, 0, 4),
    *steps(1, 50, begin=1),  # up to 70 steps were made, of which 20 were lost
    start(50, 78, 2, reached=(70, 70)),
    *steps(51, 90, begin=79),
    start(90, 124, 4, reached=(90, 119)),
    *steps(91, 120, begin=125),
]


def test_a_run_that_lost_half_of_its_nodes(make_run):
    record = read_run(make_run(HALF_LOST))
    assert record.sessions == (
        Session(0, 70, 0.0, 70.0, 4, 8, "data=8", lost_steps=20, lost_from=50.0),
        Session(50, 90, 78.0, 119.0, 2, 4, "data=4"),
        Session(90, 120, 124.0, 154.0, 4, 8, "data=8"),
    )
    assert pauses(record.sessions) == [8.0, 5.0]
    page = check_page(render_page(record))
    text = " ".join(text_of(page).split())
    assert "Pauses 13 s 2 of them; 20 steps made again" in text
    assert "8 s pause" in text
    assert "20 steps again" in text
    assert "4 from step 0, 2 from step 50, 4 from step 90" in page
    rows = re.findall(r"<tr>.*?</tr>", page[page.index('id="sessions"') :])
    row = " ".join(text_of(rows[1]).split())
    assert row == "1 min 18 s 2 4 data=4 50 → 90 41 s 8 s 20"


@pytest.mark.parametrize("size_inches", STRIP_INCHES.values(), ids=STRIP_INCHES)
def test_bars_are_as_high_as_there_were_nodes(make_run, size_inches):
    axes = sessions_figure(read_run(make_run(HALF_LOST)), size_inches).axes[0]
    bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axes.patches]
    assert [bar for bar in bars if bar[1]] == [
        (0.0, 50.0, 4), (50.0, 20.0, 4), (78.0, 41.0, 2), (124.0, 30.0, 4),
    ]  # fmt: skip
    assert [bar.get_hatch() for bar in axes.patches[:2]] == ["", "/////"]
    assert axes.get_ylabel() == "nodes"


def rewrite(folder, events):
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(text)


def test_a_run_that_was_complete_and_is_extended_was_not_interrupted(make_run):
    first = [start(0, 0, 1, steps=50), *steps(1, 50, 1)]
    more = start(50, 9000, 1, reached=(50, 50), steps=100)
    folder = make_run([*first, more, *steps(51, 100, 9001)])
    record = read_run(folder)
    assert sessions_figure(record, STRIP_INCHES["wide"]) is None
    assert record.marks == ((50, "extended", "50 → 100 steps"),)
    text = text_of(render_page(record))
    assert "Pauses" not in text
    assert "Interruptions" not in text
    assert "extended" in text  # where the curves say so
    assert "resumed" not in text
    cut = {**more, "step": 40, "reached_step": 50}
    rewrite(folder, [*first, cut, *steps(41, 100, 9001)])
    assert "Interruptions" in text_of(render_page(read_run(folder)))
    wider = start(50, 9000, 2, reached=(50, 50), steps=100)
    rewrite(folder, [*first, wider, *steps(51, 100, 9001)])
    axes = sessions_figure(read_run(folder), STRIP_INCHES["wide"]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["extended"]


def test_a_night_between_two_sessions_is_shortened(make_run):
    events = [start(0, 0, 1), *steps(1, 50, 1), start(50, 40_000, 1, reached=(50, 50))]
    record = read_run(make_run([*events, *steps(51, 100, 40_001)]))
    axes = sessions_figure(record, STRIP_INCHES["wide"]).axes[0]
    assert axes.get_xlabel() == "time, long pauses shortened"
    assert axes.get_xlim()[1] == pytest.approx(115)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "11 h 7 min"]
    assert axes.get_ylabel() == "ranks"


def test_a_clock_that_jumps_back_gives_no_negative_time(make_run):
    events = [start(0, 0, 2), *steps(1, 9, 1), start(9, -500, 2, reached=(9, 9))]
    first, second = read_run(make_run([*events, *steps(10, 12, -499)])).sessions
    assert (first.begin, first.end) == (0.0, 9.0)
    assert (second.begin, second.end) == (9.0, 9.0)


def test_lost_twice_before_a_step(make_run):
    again = [start(4, 20, 2, reached=(9, 9)), start(4, 30, 1, reached=(4, 20))]
    record = read_run(make_run([start(0, 0, 4), *steps(1, 4, 1), *again, *steps(5, 6, 31)]))
    assert [(each.n_nodes, each.end - each.begin) for each in record.sessions] == [
        (4, 9.0), (2, 0.0), (1, 2.0),
    ]  # fmt: skip
    assert [each.lost_steps for each in record.sessions] == [5, 0, 0]


@pytest.mark.parametrize(
    "broken",
    [
        {"time": None},
        {"time": "soon", "reached_step": [], "reached_time": {}},
        {"time": 1e300, "reached_time": -1e300, "n_nodes": -1, "world_size": 2.5, "layout": 7},
        {"step": "x", "reached_step": 2**70, "reached_time": float("nan")},
        {"layout": "$\\frac{$" + "x\n" * 3000, "n_nodes": 0, "world_size": 0},
    ],
    ids=["no time", "other types", "numbers beyond all", "steps", "layout"],
)
def test_damaged_events_make_a_page(make_run, broken):
    events = [start(0, 0, 4), *steps(1, 50, 1), start(50, 78, 2, reached=(70, 70)) | broken]
    check_page(render_page(read_run(make_run(events))))


def test_runs_without_times_have_no_such_figure(make_run, run_events):
    events = [*run_events(100), {"event": "resume", "step": 50, "layout": "data=2"}]
    record = read_run(make_run(events))
    assert record.sessions == ()
    assert sessions_figure(record, STRIP_INCHES["wide"]) is None
    page = render_page(record)
    assert "What trained when" not in page
    assert "Pauses" not in page


def test_sessions_before_the_first_time_are_left_out(make_run):
    old = {key: value for key, value in HALF_LOST[0].items() if key != "time"}
    record = read_run(make_run([old, *HALF_LOST[1:]]))
    assert [each.n_nodes for each in record.sessions] == [2, 4]
    assert record.sessions[0].begin == 0.0


def test_more_layouts_than_colours(make_run):
    record = read_run(make_run(HALF_LOST))
    many = [replace(record.sessions[0], layout=f"data={n}", lost_steps=0) for n in range(9)]
    figure = sessions_figure(replace(record, sessions=tuple(many)), STRIP_INCHES["narrow"])
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["data=0", "data=1", "data=2", "other layouts"]


def test_of_very_many_sessions_the_last_are_shown(make_run):
    events = [start(n, n, 1) for n in range(MOST_SESSIONS + 5)]
    record = read_run(make_run([*events, *steps(300, 310, 301)]))
    assert len(record.sessions) == MOST_SESSIONS + 5
    page = render_page(record)
    assert f"The last {MOST_SESSIONS} of {MOST_SESSIONS + 5} sessions" in page
    assert page.count('<tr><th scope="row" class="number">') == MOST_SESSIONS
