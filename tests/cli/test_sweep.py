"""`train --sweep`: its runs, their processes, and what becomes of the others where one fails."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from pentameter.cli.main import main
from pentameter.cli.options.sweep_option import sweep_runs, train_sweep
from pentameter.errors import ConfigError, InterruptedRunError, TrainingFailedError

DEED = "train.sample_prompt"
HUNDRED = ",".join(map(str, range(100)))


def test_a_run_for_each_combination():
    runs = sweep_runs(["optimizer.learning-rate=1e-3,2e-3", "seed=1,2"], ["--train.steps=5"])
    assert [run.label for run in runs] == [
        "learning_rate-1e-3_seed-1",
        "learning_rate-1e-3_seed-2",
        "learning_rate-2e-3_seed-1",
        "learning_rate-2e-3_seed-2",
    ]
    assert runs[1].overrides == ["--optimizer.learning_rate=1e-3", "--seed=2"]


def test_names_tell_keys_and_values_apart():
    runs = sweep_runs(["model.bias=true", "optimizer.betas=0.9,0.95;0.9,0.99"], [])
    assert [run.label for run in runs] == ["bias-true_betas-0.9-0.95", "bias-true_betas-0.9-0.99"]
    (run,) = sweep_runs(["checkpoint.interval=5", "log.interval=2"], [])
    assert run.label == "checkpoint.interval-5_log.interval-2"


def test_each_run_is_copied_into_a_folder_of_its_own():
    (run,) = sweep_runs(["seed=1"], [])
    assert run.copied_below(None) == run
    assert run.copied_below("s3://bucket/runs/").overrides == [
        "--seed=1",
        "--checkpoint.copy_to=s3://bucket/runs/seed-1",
    ]


@pytest.mark.parametrize(
    ("swept", "overrides", "said"),
    [
        (["seed"], [], "must read KEY=VALUE,VALUE"),
        (["seed=1,,2"], [], "must read KEY=VALUE,VALUE"),
        (["sead=1"], [], "no key of the configuration; did you mean seed"),
        (["seed=1", "seed=2"], [], "names seed twice"),
        (["seed=1,1"], [], "names a value twice"),
        (["seed=1"], ["--seed", "3"], "is swept, too"),
        (["data.path=a/b,a-b"], [], "two runs the name path-a-b"),
        ([f"seed={HUNDRED}", f"model.n_layers={HUNDRED}"], [], "10,000 runs"),
    ],
)  # fmt: skip
def test_a_sweep_that_says_nothing_clear_is_refused(swept, overrides, said):
    with pytest.raises(ConfigError, match=said):
        sweep_runs(swept, overrides)


@pytest.fixture
def deeds(tmp_path, monkeypatch):
    """Train runs by their deeds (see sweep_workers.py) in the test's folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def train(*deeds, at_once=1):
        runs = sweep_runs([f"{DEED}={','.join(deeds)}"], [])
        train_sweep(runs, ["grammar"], tmp_path / "sweep", at_once, "sweep_workers:serve")

    return train


def read(folder, name):
    return {path.parent.name: path.read_text() for path in folder.glob(f"*/{name}")}


def test_runs_share_a_process(deeds, tmp_path, capsys):
    deeds("a", "b", "c")
    assert capsys.readouterr().out.splitlines() == [
        f"{n}/3  sample_prompt-{name}  val loss 1.5000 at step 1, – of training"
        for n, name in enumerate("abc", start=1)
    ]
    assert len(set(read(tmp_path / "sweep", "pid").values())) == 1


def test_runs_at_a_time_divide_the_cores(deeds, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pentameter.machine.cores.n_usable_cores", lambda: 7)
    deeds("a", "b", "c", "d", at_once=3)
    assert set(read(tmp_path / "sweep", "threads").values()) == {"2"}


def test_fewer_runs_than_at_once_divide_all_cores(deeds, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pentameter.machine.cores.n_usable_cores", lambda: 7)
    deeds("a", "b", at_once=7)
    assert set(read(tmp_path / "sweep", "threads").values()) == {"3"}


def test_a_run_that_fails_leaves_the_others_alone(deeds, tmp_path, capsys):
    with pytest.raises(TrainingFailedError, match="the loss is not finite"):
        deeds("fails", "a", "dies", "b")
    first, second, third, fourth = capsys.readouterr().out.splitlines()
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


TINY = [
    "train", "grammar", "--data.grammar.n-characters=3000", "--model.n-layers=1",
    "--model.d-model=16", "--model.context-length=16", "--train.batch-size=4", "--train.steps=4",
    "--train.eval-interval=2", "--train.precision=fp32", "--train.compile=false",
    "--train.sample-interval=none",
]  # fmt: skip


def test_a_sweep_trains_compares_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [*TINY, "--sweep", "optimizer.learning_rate=1e-3,2e-3", "--sweep=seed=1"]
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("runs/grammar-sweep/learning_rate-") == 2
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 runs in runs/grammar-sweep\n1/2  learning_rate-1e-3_seed-1  val loss")
    assert "best validation loss" in said
    folder = tmp_path / "runs" / "grammar-sweep"
    assert (folder / "compare.html").is_file()
    assert (
        'name = "learning_rate-2e-3_seed-1"'
        in read(folder, "config.toml")["learning_rate-2e-3_seed-1"]
    )
    assert len(read(folder, "report.html")) == 2
    metrics = read(folder, "metrics.jsonl")
    assert main(command) == 0  # which finds both complete
    for label, text in read(folder, "metrics.jsonl").items():
        assert text.count('"event": "train"') == metrics[label].count('"event": "train"')


def test_a_sweep_that_is_stopped_says_so_whatever_its_runs_left(tmp_path, monkeypatch, capsys):
    def stopped(runs, arguments, folder, at_once, function):
        for run in runs:  # the last was being set up
            (folder / run.label).mkdir(parents=True)
            (folder / run.label / "plan.json").touch()
        for run in runs[:2]:
            (folder / run.label / "config.toml").touch()
        raise InterruptedRunError("the sweep was stopped")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pentameter.cli.options.sweep_option.train_sweep", stopped)
    assert main([*TINY, "--sweep", "seed=1,2,3"]) == InterruptedRunError.exit_code
    assert "the sweep was stopped" in capsys.readouterr().err
    assert (tmp_path / "runs" / "grammar-sweep" / "compare.html").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep", "model.n_heads=2,3"], "n_heads=3 must divide"),
        (["--sweep", "seed=1", "--at-once", "0"], "--at-once 0"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_run(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *options]) == ConfigError.exit_code
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_launcher_starts_no_sweep(monkeypatch, capsys):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main([*TINY, "--sweep", "seed=1,2"]) == ConfigError.exit_code
    assert "leave the launcher out" in capsys.readouterr().err
