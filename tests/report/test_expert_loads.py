"""The loads of experts in the report: read from events, drawn as maps, summed up."""

import json
import math
import re

import pytest
from pages import check_page, text_of

from pentameter.record import event_reader
from pentameter.record.event_reader import EventReader
from pentameter.record.events import ExpertMetrics
from pentameter.record.reading import read_run
from pentameter.record.results import results
from pentameter.report.figures.expert_map import expert_maps
from pentameter.report.pages.page import render_page


def loads_event(step, layer, *loads, **further):
    return {"event": "experts", "step": step, "layer": layer, "loads": list(loads), **further}


EVENTS = [
    *(loads_event(step, 0, 10, 10, 10, 10) for step in (10, 20, 30, 40)),
    loads_event(10, 2, 10, 10, 10, 10),
    loads_event(20, 2, 40, 10, 30, 0),
    loads_event(30, 2, 40, 10, 30, 0),
    loads_event(40, 2, 20, 0, 20, 0),
]


@pytest.fixture
def record(make_run, run_events):
    return read_run(make_run([*run_events(40), *EVENTS]))


def test_the_loads_of_each_layer_are_read(record):
    first, second = record.expert_loads
    assert (first.layer, second.layer) == (0, 2)
    assert second.steps == (10, 20, 30, 40)
    assert second.loads[1] == (40, 10, 30, 0)
    found = results(record)
    assert found.expert_imbalance == (1 + 2) / 2
    assert found.idle_experts == 2


def test_logits_and_bytes_are_shown_where_they_are_recorded(make_run, run_events):
    router = {"z": 4.0, "logit_rms": 0.5, "exchanged_bytes": 3_000_000}
    events = [loads_event(10, 0, 1, 3, **router), loads_event(10, 1, 1, 3, **router | {"z": 2.0})]
    record = read_run(make_run([*run_events(40), *events]))
    first, _ = expert_maps(record.expert_loads)
    assert first.detail == "busiest 1.50× the mean · logits 0.50 rms, z 4.00 · 3 MB exchanged"
    found = results(record)
    assert (found.router_z, found.exchanged_bytes) == (3.0, 6_000_000)


def test_a_run_from_before_they_were_recorded_has_none(record):
    found = results(record)
    assert math.isnan(found.router_z)
    assert math.isnan(found.exchanged_bytes)


def test_damaged_loads_are_left_out(make_run):
    bad = [
        loads_event(10, 0),
        loads_event(10, 0, 0, 0),
        loads_event(10, 0, -1, 3),
        loads_event(10, 0, "nan", 3),
        loads_event(10, "0", 1, 3),
        {"event": "experts", "step": 10, "layer": 0, "loads": 7},
        loads_event(20, 1, 1, 3),
        loads_event(30, 1, 1, 3, 4),
    ]
    (layer,) = read_run(make_run(bad)).expert_loads
    assert (layer.layer, layer.steps, layer.loads) == (1, (20,), ((1, 3),))


def test_a_map_has_each_load_once_and_names_the_idle(record):
    even, uneven = expert_maps(record.expert_loads)
    # From step 0 on, as far as the first record from the second: all at the mean's level.
    assert even.paths == (("load-4", "M0 0.5h40M0 1.5h40M0 2.5h40M0 3.5h40"),)
    paths = dict(uneven.paths)
    assert paths["idle"] == "M30 1.5h10M10 3.5h30"
    assert paths["load-6"] == "M10 0.5h30M30 2.5h10"  # twice the mean
    covered = sum(int(width) for path in paths.values() for width in re.findall(r"h(\d+)", path))
    assert covered == 4 * 40
    assert uneven.detail == "busiest 2.00× the mean · 2 idle: 1, 3"
    assert (uneven.first_step, uneven.last_step) == (0, 40)


def test_the_page_shows_them(record):
    page = check_page(render_page(record))
    assert page.count('class="card loads"') == 2
    assert 'class="idle" d="M30 1.5h10M10 3.5h30"' in page
    assert "Layer 2 busiest 2.00× the mean · 2 idle: 1, 3" in " ".join(text_of(page).split())


def test_a_page_of_a_dense_model_has_no_maps(make_run):
    assert 'class="card loads"' not in check_page(render_page(read_run(make_run())))


def test_many_narrow_maps_have_fewer_columns(make_run):
    events = [loads_event(s, layer, s % 5 + 1, 3) for s in range(1, 500) for layer in range(8)]
    maps = expert_maps(read_run(make_run(events)).expert_loads)
    assert len(maps) == 8
    assert max(sum(path.count("M") for _, path in each.paths) for each in maps) <= 2 * 100


def test_following_a_long_run_keeps_whole_steps(make_run, monkeypatch):
    monkeypatch.setattr(event_reader, "MOST_EVENTS", 100)
    events = [loads_event(s, layer, 1, s) for s in range(1, 301) for layer in range(4)]
    folder = make_run(events)
    followed = EventReader(folder)
    while followed.update() or followed.has_more:
        pass
    assert len(followed.of(ExpertMetrics)) <= 100
    layers = read_run(folder, followed).expert_loads
    assert len({layer.steps for layer in layers}) == 1
    assert layers[0].steps[0] == 1
    assert layers[0].steps[-1] == 300


def test_compare_has_columns_for_mixtures_alone(make_run, run_events, tmp_path):
    from pentameter.report.watch.comparison import compare_runs

    mixture = make_run([*run_events(40), *EVENTS]).rename(tmp_path / "mixture")
    dense = tmp_path / "dense"
    dense.mkdir()
    lines = [json.dumps(event) for event in run_events(40)]
    (dense / "metrics.jsonl").write_text("\n".join(lines))
    columns = {column.title: column.cells for column in compare_runs([mixture, dense]).columns}
    order = [run.record.folder.name for run in compare_runs([mixture, dense]).runs]
    assert columns["busiest expert ÷ mean"][order.index("mixture")] == "1.50"
    assert columns["idle experts"][order.index("dense")] == "–"
