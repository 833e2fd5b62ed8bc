"""Sweeps: their runs, their processes, and what becomes of the others where one fails."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import tiny_runs

import pentameter as pm
from pentameter.autotune.sweep import sweep_runs, train_sweep
from pentameter.config.files.load import load_config
from pentameter.config.files.overrides import as_options
from pentameter.errors import ConfigError, InterruptedRunError, TrainingFailedError

DEED = "train.sample_prompt"


def runs_of(values, overrides=(), folder=Path("sweep")):
    def load(settings):
        return load_config("grammar", {**dict(overrides), **settings})

    return sweep_runs(values, dict(overrides), load, folder)


def test_a_run_for_each_combination():
    runs = runs_of({"optimizer.learning_rate": ["1e-3", "2e-3"], "seed": [1, 2]})
    assert [run.label for run in runs] == [
        "learning_rate-1e-3_seed-1",
        "learning_rate-1e-3_seed-2",
        "learning_rate-2e-3_seed-1",
        "learning_rate-2e-3_seed-2",
    ]
    assert runs[1].settings == {"optimizer.learning_rate": "1e-3", "seed": 2}
    assert runs[1].folder == Path("sweep/learning_rate-1e-3_seed-2")


def test_names_tell_keys_and_values_apart():
    runs = runs_of({"model.bias": ["true"], "optimizer.betas": ["0.9,0.95", "0.9,0.99"]})
    assert [run.label for run in runs] == ["bias-true_betas-0.9-0.95", "bias-true_betas-0.9-0.99"]
    (run,) = runs_of({"checkpoint.interval": [5], "log.interval": [2]})
    assert run.label == "checkpoint.interval-5_log.interval-2"


def test_each_run_is_copied_into_a_folder_of_its_own():
    assert runs_of({"seed": [1]})[0].settings == {"seed": 1}
    (run,) = runs_of({"seed": [1]}, {"checkpoint.copy_to": "s3://bucket/runs/"})
    assert run.settings == {"seed": 1, "checkpoint.copy_to": "s3://bucket/runs/seed-1"}


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        ({}, {}, "needs a key, and values"),
        ({"seed": []}, {}, "needs a key, and values"),
        ({"sead": [1]}, {}, "no key of the configuration; did you mean seed"),
        ({"seed": [1, 1]}, {}, "names a value twice"),
        ({"seed": [1]}, {"seed": 3}, "is swept, too"),
        ({"data.path": ["a/b", "a-b"]}, {}, "two runs the name path-a-b"),
        ({"seed": range(100), "model.n_layers": range(1, 101)}, {}, "10,000 runs"),
    ],
)
def test_a_sweep_that_says_nothing_clear_is_refused(values, overrides, said):
    with pytest.raises(ConfigError, match=said):
        runs_of(values, overrides)


@pytest.fixture
def deeds(tmp_path, monkeypatch):
    """Train runs by their deeds (see sweep_workers.py) in the test's folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def train(*deeds, at_once=1):
        runs = runs_of({DEED: deeds}, folder=tmp_path / "sweep")

        def request(run):
            return [f"--run-dir={run.folder}", *as_options(run.settings)]

        train_sweep(runs, at_once, "sweep_workers:serve", request)

    return train


def read(folder, name):
    return {path.parent.name: path.read_text() for path in folder.glob(f"*/{name}")}


def test_runs_share_a_process(deeds, tmp_path, capsys):
    deeds("a", "b", "c")
    assert capsys.readouterr().out.splitlines()[:4] == [
        f"3 runs in {tmp_path / 'sweep'}",
        *(
            f"{n}/3  sample_prompt-{name}  val loss 1.5000 at step 1, – of training"
            for n, name in enumerate("abc", start=1)
        ),
    ]
    assert len(set(read(tmp_path / "sweep", "pid").values())) == 1


def test_runs_at_a_time_divide_the_cores(deeds, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pentameter.machine.cores_and_memory.n_usable_cores", lambda: 7)
    deeds("a", "b", "c", "d", at_once=3)
    assert set(read(tmp_path / "sweep", "threads").values()) == {"2"}


def test_fewer_runs_than_at_once_divide_all_cores(deeds, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pentameter.machine.cores_and_memory.n_usable_cores", lambda: 7)
    deeds("a", "b", at_once=7)
    assert set(read(tmp_path / "sweep", "threads").values()) == {"3"}


def test_a_run_that_fails_leaves_the_others_alone(deeds, tmp_path, capsys):
    with pytest.raises(TrainingFailedError, match="the loss is not finite"):
        deeds("fails", "a", "dies", "b")
    _, first, second, third, fourth, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("failed: the loss is not finite")
    assert "val loss 1.5000" in second
    assert re.search(r"failed: its process was killed by SIGKILL .*worker-1.txt", third)
    assert "val loss 1.5000" in fourth
    pids = read(tmp_path / "sweep", "pid")
    assert pids["sample_prompt-fails"] == pids["sample_prompt-a"] != pids["sample_prompt-b"]


def test_a_signal_stops_the_runs_and_starts_no_other(deeds, tmp_path, capsys):
    waiting = tmp_path / "sweep" / "sample_prompt-waits" / "waiting"

    def interrupt():
        while not waiting.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(InterruptedRunError, match="stopped by SIGINT; the same command goes on"):
        deeds("a", "waits", "b")
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert set(read(tmp_path / "sweep", "pid")) == {"sample_prompt-a", "sample_prompt-waits"}


TINY = {
    "data.grammar.n_characters": 3000, "model.n_layers": 1, "model.d_model": 16,
    "model.context_length": 16, "train.batch_size": 4, "train.steps": 4, "train.eval_interval": 2,
    "train.precision": "fp32", "train.compile": False, "train.sample_interval": None,
}  # fmt: skip


def test_python_sweeps_as_the_command_does(tmp_path, capsys, monkeypatch):
    from pentameter.cli.main import main

    monkeypatch.chdir(tmp_path)
    values = {"optimizer": {"learning-rate": [1e-3, 2e-3]}}
    folders = pm.sweep("grammar", values, TINY, run_dir="python", at_once=2, quiet=True)
    assert capsys.readouterr().out == ""
    command = ["train", "grammar", *as_options(TINY), "--sweep=optimizer.learning_rate=0.001,0.002"]
    assert main([*command, "--run-dir=command"]) == 0
    assert folders == [Path("python/learning_rate-0.001"), Path("python/learning_rate-0.002")]
    for folder in folders:
        other = Path("command") / folder.name
        assert (folder / "config.toml").read_text() == (other / "config.toml").read_text()
        kept = [
            [event for event in tiny_runs.recorded(each) if event["event"] in ("train", "eval")]
            for each in (folder, other)
        ]
        assert kept[0] == kept[1]
        assert kept[0]
        assert (folder / "report.html").is_file()
    assert Path("python/compare.html").is_file()


def test_what_is_wrong_is_raised_before_the_first_run(tmp_path):
    config = load_config("grammar", TINY)
    with pytest.raises(ConfigError, match="n_heads=3 must divide"):
        pm.sweep(config, {"model.attention.n_heads": [2, 3]}, run_dir=tmp_path / "sweep")
    with pytest.raises(ConfigError, match="--at-once 0"):
        pm.sweep(config, {"seed": [1]}, run_dir=tmp_path / "sweep", at_once=0)
    assert not any(tmp_path.iterdir())
