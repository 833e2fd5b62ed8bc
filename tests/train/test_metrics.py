"""metrics.jsonl: well-formed lines, and a rewind that leaves neither gap nor repeat."""

import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import events, fit

from pentameter.config.files.load import load_config
from pentameter.processes.group.world import World
from pentameter.record.events import CheckpointMetrics, OtherEvent
from pentameter.record.log_files import Reached, rewind_metrics
from pentameter.train.say.event_log import EventLog

SAVED = CheckpointMetrics(2, Path("step-00000002"), 7)


def read(path):
    """The events of a file, without the times at which they were written."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: event[key] for key in event if key != "time"} for event in events]


def fail(warning):
    raise AssertionError(warning)


def recorder(path):
    folder = SimpleNamespace(
        metrics_path=path, check_ours=lambda: None, check_not_taken=lambda: None, checkpoint=None
    )
    return EventLog(load_config("grammar"), folder, 0, World(), SimpleNamespace(say=fail))


def test_non_finite_numbers_become_null(tmp_path):
    log = recorder(tmp_path / "metrics.jsonl")
    log.write(OtherEvent(1, "train", {"loss": math.nan, "grad_norm": math.inf}))
    log.close()
    path = tmp_path / "metrics.jsonl"
    assert read(path) == [{"event": "train", "step": 1, "loss": None, "grad_norm": None}]
    assert path.read_text().startswith('{"event"')


def test_an_event_says_when_it_was_written(tmp_path):
    log = recorder(tmp_path / "metrics.jsonl")
    before = time.time()
    log.write(OtherEvent(1, "train", {}))
    log.close()
    (event,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert before - 0.001 <= event["time"] <= time.time() + 0.001  # to a millisecond


def test_rewind_cuts_what_will_be_written_again_and_keeps_the_checkpoints_own_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = recorder(path)
    log.write(OtherEvent(1, "train", {}))
    log.write(OtherEvent(2, "train", {}))
    size = log.sync()["metrics_bytes"]
    log.write(OtherEvent(2, "checkpoint", {"seconds": 0.5}))
    log.write(OtherEvent(3, "train", {}))
    log.close()
    with path.open("a") as file:
        file.write('{"event": "train", "st')  # killed while writing
    rewind_metrics(path, n_bytes=size, checkpoint=SAVED)
    assert read(path) == [
        {"event": "train", "step": 1},
        {"event": "train", "step": 2},
        {"event": "checkpoint", "step": 2, "seconds": 0.5},
    ]


def test_rewind_adds_the_checkpoints_line_when_a_kill_prevented_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 2}\n')
    size = path.stat().st_size
    rewind_metrics(path, n_bytes=size, checkpoint=SAVED)
    (added,) = read(path)[1:]
    assert added == {
        "event": "checkpoint", "step": 2, "path": "checkpoints/step-00000002", "bytes": 7,
        "seconds": None, "stall_seconds": None,
    }  # fmt: skip


def test_a_resume_that_the_disk_refused_at_first_is_kept_once(tmp_path):
    """Its line came into the file later, and is rewound with it again and again."""
    path = tmp_path / "metrics.jsonl"
    start, resume, saved = (
        json.dumps({"event": event, "step": 2, "time": 1.0})
        for event in ("start", "resume", "checkpoint")
    )
    path.write_text(f"{start}\n{resume}\n{saved}\n")
    for _ in range(2):
        rewind_metrics(path, n_bytes=len(start) + 1, unwritten=[resume], checkpoint=SAVED)
        assert path.read_text().splitlines() == [start, resume, saved]


def test_rewind_keeps_earlier_resumes_and_tells_what_was_reached(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def append(*events):
        with path.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def rewind():
        return rewind_metrics(path, n_bytes=size, checkpoint=SAVED)

    append({"event": "start", "step": 0, "time": 1.0}, {"event": "train", "step": 2, "time": 2.0})
    size = path.stat().st_size
    saved = {"event": "checkpoint", "step": 2, "time": 2.5}
    append(saved, *({"event": "train", "step": n, "time": float(n)} for n in (3, 4, 5)))
    assert rewind() == Reached(5, 5.0)
    append({"event": "resume", "step": 2, "time": 9.0}, {"event": "train", "step": 3, "time": 9.5})
    assert rewind() == Reached(3, 9.5)
    append({"event": "resume", "step": 2, "time": 12.0})
    assert rewind() == Reached(2, 12.0), "it was lost again before its first step"
    assert [event["event"] for event in read(path)] == [
        "start", "train", "checkpoint", "resume", "resume",
    ]  # fmt: skip


def test_rewind_tells_nothing_of_files_without_times(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 1}\n[1]\n{"event": "train", "step": "two"}\n')
    assert rewind_metrics(path, n_bytes=0, checkpoint=SAVED) is None


def test_rewind_to_the_start_empties_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 1}\n')
    rewind_metrics(path, n_bytes=0, checkpoint=None)
    assert path.read_text() == ""


def test_rewind_survives_a_file_that_lost_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 1}\n{"event"')
    rewind_metrics(path, n_bytes=10_000, checkpoint=None)
    assert read(path) == [{"event": "train", "step": 1}]


def test_rewind_without_a_file_does_nothing(tmp_path):
    rewind_metrics(
        tmp_path / "metrics.jsonl",
        n_bytes=100,
        checkpoint=SAVED,
    )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rewind_brings_lines_back_that_waited_for_the_disk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    one, two = '{"event": "train", "step": 1}', '{"event": "train", "step": 2}'
    for before in (None, "", f"{one}\n", f"{one}\n{two}\n", f"{one}\n{two[:9]}"):
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_text(before)
        kept = f"{one}\n" if before else ""
        rewind_metrics(path, n_bytes=len(kept), unwritten=[two], checkpoint=None)
        assert path.read_text() == f"{kept}{two}\n"


class FailsAt:
    """A hook that ends the run at this step, with an error."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, step):
        if step.step == self.step:
            raise RuntimeError("a fault")


def test_a_run_lost_twice_says_each_time_what_it_had_reached(tmp_path):
    run, saving = tmp_path / "run", {"checkpoint": {"interval": 4}}
    for step in (7, 6):
        with pytest.raises(RuntimeError):
            fit(run, sections=saving, hooks=[FailsAt(step)])
    fit(run, sections=saving)
    (start,) = events(run, "start")
    assert (start["n_nodes"], start["reached_step"], start["reached_time"]) == (1, None, None)
    resumes = events(run, "resume")
    assert [(each["step"], each["reached_step"]) for each in resumes] == [(4, 7), (4, 6)]
    for before, after in itertools.pairwise([start, *resumes]):
        assert before["time"] <= after["reached_time"] <= after["time"]
    assert [event["step"] for event in events(run, "train")] == list(range(1, 13))
