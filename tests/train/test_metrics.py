"""metrics.jsonl: well-formed lines, and a rewind that leaves neither gap nor repeat."""

import json
from types import SimpleNamespace

from pentameter.config.load import load_config
from pentameter.processes.world import World
from pentameter.train.event_log import EventLog
from pentameter.train.log_files import rewind_metrics


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail(warning):
    raise AssertionError(warning)


def recorder(path):
    folder = SimpleNamespace(metrics_path=path, check_there=lambda: None, checkpoint=None)
    return EventLog(load_config("grammar"), folder, 0, World(), SimpleNamespace(say=fail))


def test_non_finite_numbers_become_null(tmp_path):
    log = recorder(tmp_path / "metrics.jsonl")
    log.write("train", step=1, loss=float("nan"), grad_norm=float("inf"))
    log.close()
    path = tmp_path / "metrics.jsonl"
    assert read(path) == [{"event": "train", "step": 1, "loss": None, "grad_norm": None}]
    assert path.read_text().startswith('{"event"')


def test_rewind_cuts_what_will_be_written_again_and_keeps_the_checkpoints_own_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = recorder(path)
    log.write("train", step=1)
    log.write("train", step=2)
    size = log.sync()["metrics_bytes"]
    log.write("checkpoint", step=2, seconds=0.5)
    log.write("train", step=3)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "train", "st')  # killed while writing
    rewind_metrics(path, n_bytes=size, checkpoint={"step": 2, "seconds": None})
    assert read(path) == [
        {"event": "train", "step": 1},
        {"event": "train", "step": 2},
        {"event": "checkpoint", "step": 2, "seconds": 0.5},
    ]


def test_rewind_adds_the_checkpoints_line_when_a_kill_prevented_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 2}\n')
    size = path.stat().st_size
    rewind_metrics(path, n_bytes=size, checkpoint={"step": 2, "seconds": None})
    assert read(path)[1:] == [{"event": "checkpoint", "step": 2, "seconds": None}]


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
    rewind_metrics(tmp_path / "metrics.jsonl", n_bytes=100, checkpoint={"step": 3})
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
