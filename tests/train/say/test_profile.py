"""What a profile records, when, and that it changes no number."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.train.loop import Trainer
from pentameter.train.say import profile
from pentameter.train.say.profile import (
    Profile,
    longest_operations,
    parse_window,
)

TINY = [
    "grammar", "--data.grammar.n-characters=3000", "--model.n-layers=1", "--model.d-model=16",
    "--model.context-length=16", "--train.batch-size=4", "--train.steps=8", "--log.interval=1",
    "--train.eval-interval=4", "--train.precision=fp32", "--train.compile=false",
    "--schedule.name=constant",
]  # fmt: skip


def fit(run: Path, *hooks: object, **overrides: object) -> str:
    """Train; the log of the run."""
    config = load_config(load_config(TINY[0], TINY[1:]), overrides)
    Trainer(config, run_dir=run, hooks=hooks, quiet=True).fit()
    return (run / "log.txt").read_text()


def spans(trace: Path) -> tuple[list[str], set[str]]:
    """The steps that a trace marks, in order, and the names of everything in it."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and re.fullmatch(r"step \d+", e["name"])]
    return (
        [e["name"] for e in sorted(steps, key=lambda event: event["ts"])],
        {e["name"] for e in events},
    )


def losses(run: Path) -> list[tuple[float, float]]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(e["loss"], e["grad_norm"]) for e in events if e["event"] == "train"]


def test_the_steps_of_the_window_are_recorded_and_no_number_changes(tmp_path):
    said = fit(tmp_path / "run", Profile(3, 6))
    fit(tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    trace = tmp_path / "run" / "profile" / "rank-00000.json.gz"
    steps, names = spans(trace)
    assert steps == ["step 3", "step 4", "step 5", "step 6"]
    assert "aten::mm" in names
    table = said.partition(f"profile of steps 3 to 6: {trace}, for https://ui.perfetto.dev\n")[2]
    rows = [line for line in table.splitlines() if re.search(r" ms +\d+% +\d+ × ", line)]
    assert len(rows) == 10
    assert not any("× step" in row for row in rows)


def test_the_longest_operations_come_first():
    class Row:
        def __init__(self, key, microseconds):
            self.key, self.count, self.self_cpu_time_total = key, 2, microseconds

    rows = [Row("aten::add", 1000.0), Row("step 3", 9e9), Row("aten::mm", 3000.0)]
    assert longest_operations(rows, on_gpu=False) == [
        "         3.0 ms  75%       2 × aten::mm",
        "         1.0 ms  25%       2 × aten::add",
    ]
    many = [Row(f"operation {n}", n) for n in range(30)]
    assert len(longest_operations(many, on_gpu=False)) == 10


def test_a_run_that_continues_records_what_is_left_of_the_window(tmp_path):
    run = tmp_path / "run"
    half = fit(run, Profile(1, 2), **{"train.steps": 4})
    assert "profile of steps 1 to 2" in half
    said = fit(run, Profile(2, 3), **{"train.steps": 4})
    assert "steps 2 to 3 are done and the run continues after step 4; take a later window" in said
    said = fit(run, Profile(4, 6), **{"train.steps": 8})
    assert "profile: recording from step 5 only, the run continues after step 4" in said
    assert spans(run / "profile" / "rank-00000.json.gz")[0] == ["step 5", "step 6"]


def test_on_a_gpu_the_memory_is_recorded_for_the_window_only(tmp_path, monkeypatch):
    # Without a GPU: that PyTorch is asked for it at the right steps, in the right order.
    asked = []

    class Note:
        def on_step(self, trainer, step):
            asked.append(step.step)

    memory = torch.cuda.memory
    monkeypatch.setattr(profile, "_is_on_gpu", lambda trainer: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: asked.append(Path(path).name))
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all", **_: asked.append(enabled)
    )
    fit(tmp_path / "run", Profile(3, 4), Note())
    dumped = ["wait", "rank-00000-memory.pickle", None]
    assert asked == [1, "all", 2, 3, *dumped, 4, 5, 6, 7, 8]


def test_a_run_that_ends_within_the_window_writes_what_there_is(tmp_path):
    class Stop:
        def on_step(self, trainer, step):
            if step.step == 4:
                trainer.stop("enough")

    said = fit(tmp_path / "run", Stop(), Profile(3, 6))
    assert "profile of steps 3 to 4" in said
    assert {"step 3", "step 4"} <= set(
        spans(tmp_path / "run" / "profile" / "rank-00000.json.gz")[0]
    )
    assert "the run ended before step 6" in fit(tmp_path / "early", Stop(), Profile(6, 7))


def test_a_disk_that_refuses_the_trace_does_not_end_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file where the folder would be")
    said = fit(tmp_path / "run", Profile(3, 6))
    assert "warning: the profile is not written: " in said
    assert "ended at step 8: completed" in said


def test_a_failing_step_leaves_no_profiler_running(tmp_path):
    class Fail:
        def on_step(self, trainer, step):
            if step.step == 3:
                raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fit(tmp_path / "failed", Fail(), Profile(2, 6))
    assert not (tmp_path / "failed" / "profile").exists()
    fit(tmp_path / "next", Profile(2, 3))
    assert spans(tmp_path / "next" / "profile" / "rank-00000.json.gz")[0] == ["step 2", "step 3"]


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ("13:10", "cannot profile steps 13 to 10: the numbers of two steps"),
        ("0:5", "cannot profile steps 0 to 5"),
        ("abc", "--profile abc must be FIRST:LAST, the numbers of two steps, counted from 1"),
        ("5", "e.g. --profile 10:13"),
        ("-1:5", "--profile -1:5 must be"),
        ("7:9", "cannot profile steps 7 to 9: the run has train.steps=8; take an earlier window"),
    ],
)
def test_a_window_that_cannot_be_is_refused_before_anything_is_done(
    tmp_path, monkeypatch, capsys, window, said
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, f"--profile={window}"]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_window_beyond_the_epochs_of_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"steps 3 to 9999: the run has train\.steps=\d+"):
        fit(tmp_path / "run", parse_window("3:9999"), **{"train.epochs": 1})


def test_every_process_writes_a_trace_of_its_own_also_of_a_text_by_name(tmp_path):
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night. " * 100)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pentameter", "train", "novel.txt", *TINY[1:]),
            # Of a sample, a thousand operations for each character would be written, too.
            *("--run-dir", "run", "--nproc", "2", "--profile", "2:3"),
            "--train.sample-interval=none",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("profile of steps 2 to 3: ") == 1
    for rank in range(2):
        steps, names = spans(tmp_path / "run" / "profile" / f"rank-{rank:05d}.json.gz")
        assert steps == ["step 2", "step 3"]
        assert any("all_reduce" in name or "allreduce" in name for name in names)
    assert "profile of steps 2 to 3" in (tmp_path / "run" / "logs" / "rank-00001.txt").read_text()
    events = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    ranks = [event for event in events if event["event"] == "ranks"]
    assert [event["step"] for event in ranks] == list(range(1, 9))
    for event in ranks:
        assert event["slowest"] in (0, 1)
        assert 0 < event["others_seconds"] <= event["own_seconds"]
        assert 0 <= event["waited"] <= 1
