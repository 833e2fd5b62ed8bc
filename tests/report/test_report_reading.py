import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pentameter.errors import StorageError
from pentameter.record.event_reader import read_events
from pentameter.record.events import CheckpointMetrics, EvalMetrics, SkippedStep, StepMetrics
from pentameter.record.reading import MAX_SAMPLE_CHARACTERS, read_run
from pentameter.report.pages.page import render_page


def test_a_whole_run(make_run):
    folder = make_run(samples={100: "one", 200: "two"})
    record = read_run(folder)
    assert record.name == "small-gpt"
    assert record.last_step == 400
    assert record.tokens == 400 * 256
    assert record.training_seconds == 3723.0
    assert record.start.parameters == 10_745_088
    assert len(record.train["loss"]) == 40
    assert record.best() == min(record.evaluations, key=lambda e: e.loss)
    assert [s.text for s in record.samples] == ["one", "two"]
    assert record.end is not None


def test_nothing_but_a_folder(tmp_path):
    record = read_run(tmp_path)
    assert record.name == tmp_path.name
    assert record.best() is None
    assert record.last_step == 0
    assert math.isnan(record.training_seconds)


def test_no_folder(tmp_path):
    with pytest.raises(StorageError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_half_a_last_line_is_skipped(make_run, run_events):
    text = "".join(json.dumps(e) + "\n" for e in run_events(100))
    record = read_run(make_run(text + '{"event": "train", "step": 110, "lo'))
    assert record.last_step == 100
    assert record.unreadable_lines == 1


def test_a_resume_in_another_layout_is_a_mark_of_its_own(make_run, run_events):
    events = run_events(200)
    fewer = [{**events[0], "event": "resume", "step": at, "layout": "data=2"} for at in (50, 100)]
    record = read_run(make_run([{**events[0], "layout": "data=4"}, *events[1:], *fewer]))
    assert record.marks == ((50, "layout", "data=4 → data=2"), (100, "resume", ""))


def test_a_resumed_run(make_run, run_events, run_end):
    events = run_events(200)
    # as after a crash: the first session's end is gone, a step stands there twice
    changed = {"device": "Other CPU", "steps": 1000, "layout": ["damaged"]}
    again = {**events[-1], "event": "resume", "step": 100, **changed}
    repeated = next(e for e in events if e["event"] == "train" and e["step"] == 150)
    record = read_run(make_run([*events, again, {**repeated, "loss": 1.5}]))
    assert record.end is None
    before = record.starts[0]
    reason = f"{before.steps} → 1,000 steps, {before.device} → Other CPU"
    assert record.marks == ((100, "resume", reason),)
    assert record.start.device == "Other CPU"
    loss = record.train["loss"]
    assert list(loss.steps) == sorted(set(loss.steps))
    assert loss.values[loss.steps.index(150)] == 1.5


def test_time_of_an_unfinished_run_follows_from_its_rate(make_run, run_events):
    record = read_run(make_run(run_events(400)))
    assert record.training_seconds == pytest.approx(400 * 256 / 2560.0)


def test_values_that_are_not_finite_are_counted(make_run):
    lines = [
        '{"event": "train", "step": 1, "loss": NaN}',
        '{"event": "train", "step": 2, "loss": null}',
        '{"event": "train", "step": 3, "loss": "inf"}',
        '{"event": "train", "step": 4, "loss": 1e999}',
        '{"event": "train", "step": 5, "loss": 2.5}',
        '{"event": "eval", "step": 5, "split": "val", "loss": NaN}',
    ]
    record = read_run(make_run("\n".join(lines)))
    assert record.train["loss"].values == (2.5,)
    assert record.train["loss"].n_non_finite == 4
    assert record.best() is None


def test_a_long_sample_is_cut(make_run):
    record = read_run(make_run(samples={10: "x" * (MAX_SAMPLE_CHARACTERS + 5)}))
    assert len(record.samples[0].text) == MAX_SAMPLE_CHARACTERS
    assert record.samples[0].omitted_characters == 5


def test_damaged_files_beside_the_metrics(make_run):
    folder = make_run(config="name = [", plan_json="[1, 2]", environment_json='{"a": ')
    (folder / "log.txt").write_bytes(b"\xff\xfe half a \xc3")
    (folder / "samples" / "step-x.txt").write_text("not a sample")
    record = read_run(folder)
    assert (record.config, record.plan, record.environment) == ({}, {}, {})
    assert record.name == "a run"
    assert "half a" in record.log_tail
    assert record.samples == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(), children),
    max_leaves=4,
)
fields = ("step", "loss", "tokens", "split", "path", "bytes", "reason", "grad_norm", "parameters",
          "seconds", "tokens_per_second", "entropy_rate", "steps", "learning_rate")  # fmt: skip


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.builds(
            lambda event, values: {"event": event, **values},
            st.sampled_from(
                ["start", "train", "eval", "checkpoint", "skip", "rollback", "resume", "end"]
            ),
            st.dictionaries(st.sampled_from(fields), json_values),
        ),
        max_size=6,
    )
)
def test_no_event_whatever_it_holds_stops_the_report(tmp_path, events):
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(e) for e in events))
    assert "</html>" in render_page(read_run(tmp_path))


def test_what_two_writers_left_double_is_read_once(make_run, run_events, run_end):
    """As an earlier version did where a frozen process was replaced, and thawed."""
    more = [
        {"event": "experts", "step": step, "layer": layer, "entropy": 0.5}
        for step in range(10, 410, 10)
        for layer in (0, 1)
    ]
    more += [
        {"event": "eval", "step": step, "split": split, "loss": 1.0}
        for step in range(50, 450, 50)
        for split in ("val", "code")
    ]
    more += [{"event": "checkpoint", "step": step, "bytes": 7} for step in range(50, 450, 50)]
    more += [{"event": "skip", "step": 130, "reason": "loss nan"}]
    events = sorted([*run_events(400), *more], key=lambda event: event["step"])
    folder = make_run([*events, run_end])
    kinds = (StepMetrics, EvalMetrics, CheckpointMetrics, SkippedStep)
    once = read_events(folder)
    ahead, behind = events[: len(events) // 2], events[len(events) // 2 :]
    late = [each for pair in zip(behind, ahead[1:], strict=False) for each in pair]
    double = [*ahead, *late, *behind, run_end]
    lines = "".join(json.dumps(event) + "\n" for event in double)
    (folder / "metrics.jsonl").write_text(lines)
    found = read_events(folder)
    # By text, as NaN, the time of these, equals none.
    assert repr([found.of(kind) for kind in kinds]) == repr([once.of(kind) for kind in kinds])
    assert repr(found.sessions()) == repr(once.sessions())
