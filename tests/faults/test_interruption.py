"""Kill or stop a run at any moment; the same command then gives what no interruption gives."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from pentameter.config.files.load import load_config
from trials.faults.oracle import (
    STEPS,
    assert_same_run,
    curve,
    events,
    finish,
    launched,
    tiny_config,
    train_in_child,
)


def make_reference(tmp_path_factory, **overrides):
    folder = tmp_path_factory.mktemp("reference")
    config = tiny_config(folder, **overrides)
    finish(config, folder / "run")  # the first child also waits for the fork server
    start = time.monotonic()
    finish(config, folder / "timed")
    return config, folder / "run", time.monotonic() - start


def wait_until(reached, name, deadline_seconds=30):
    deadline = time.monotonic() + deadline_seconds
    while not reached():
        assert time.monotonic() < deadline, f"not reached: {name}"
        time.sleep(0.005)


def wait_for_step(run, step):
    metrics = run / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), f"step {step}"
    )


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def reference(request, tmp_path_factory):
    return make_reference(tmp_path_factory, **{"train.precision": request.param})


def test_the_undisturbed_run_is_complete(reference):
    _, run, _ = reference
    assert [step for step, _, _ in curve(run)] == list(range(1, STEPS + 1))
    assert [e["step"] for e in events(run, "eval")] == [0, 10, 20, 30, 40]
    assert len(events(run, "end")) == 1


def test_sigkill_at_random_moments(reference, tmp_path):
    config, undisturbed, seconds = reference
    moments = random.Random(5)
    is_single = load_config(config).train.precision == "fp32"
    for trial in range(6 if is_single else 2):  # what a kill leaves depends on no precision
        run = tmp_path / f"run-{trial}"
        for _ in range(2):  # killed, continued and killed again
            process = train_in_child(config, run)
            process.join(moments.uniform(0.05, 1.0) * seconds)
            process.kill()  # or it is done already, which is a moment too
            process.join()
        finish(config, run)
        assert_same_run(run, undisturbed)


EXPERTS = {
    "model.experts.count": 4,
    "model.experts.per_token": 2,
    "model.experts.width": 8,
    "model.router.balance": "bias",
    "parallel.expert": 2,
    "parallel.zero": 3,
}


@pytest.mark.slow
def test_sigkill_of_two_processes_with_half_the_experts_each(tmp_path):
    """Both die at once, at any moment; balance and counts are state like the weights."""
    config = tiny_config(tmp_path, **EXPERTS)
    undisturbed = tmp_path / "undisturbed"
    start = time.monotonic()
    launched(config, undisturbed).communicate(timeout=120)
    seconds = time.monotonic() - start
    moments, n_killed = random.Random(28), 0
    for trial in range(4):
        run = tmp_path / f"run-{trial}"
        process = launched(config, run)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0.4, 1.0) * seconds)
        n_killed += process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        process = launched(config, run)
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors
        assert_same_run(run, undisturbed)
    assert n_killed


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_exits_75(reference, tmp_path, name):
    config, undisturbed, seconds = reference
    moments = random.Random(name)
    run = tmp_path / "run"
    process = train_in_child(config, run)
    wait_until(run.exists, "the run folder is made")  # before `fit`, a signal is the caller's
    process.join(moments.uniform(0.0, 0.8) * seconds)
    with suppress(ProcessLookupError):
        os.kill(process.pid, getattr(signal, name))
    sent = time.monotonic()
    process.join(10)
    assert process.exitcode in (75, 0), process.exitcode  # 0: it was done already
    assert time.monotonic() - sent < 10
    finish(config, run)
    assert_same_run(run, undisturbed)


def test_a_signal_between_checkpoints_commits_the_step_it_reached(tmp_path):
    config = tiny_config(tmp_path, **{"train.steps": 100_000, "checkpoint.interval": 100_000})
    run = tmp_path / "run"
    process = train_in_child(config, run)
    wait_for_step(run, 7)
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == 75
    last = curve(run)[-1][0]
    assert last >= 7
    assert [e["step"] for e in events(run, "checkpoint")][-1] == last
    assert events(run, "end")[-1]["reason"] == "SIGTERM"


def test_a_second_signal_leaves_at_once(tmp_path):
    config = tiny_config(tmp_path, **{"train.steps": 100_000})
    run = tmp_path / "run"
    process = train_in_child(config, run)
    wait_for_step(run, 7)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGTERM)
    process.join(2)
    assert process.exitcode == 75


def test_two_runs_in_one_folder(tmp_path):
    config = tiny_config(tmp_path, **{"train.steps": 100_000})
    run = tmp_path / "run"
    first = train_in_child(config, run)
    wait_for_step(run, 3)
    second = train_in_child(config, run)
    second.join(30)
    assert second.exitcode == 73
    assert str(first.pid) in (run / "error.txt").read_text()
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    third = train_in_child(config, run)  # the dead owner's lock is taken over
    step = curve(run)[-1][0]
    wait_for_step(run, step + 5)
    os.kill(third.pid, signal.SIGTERM)
    third.join(10)
    assert third.exitcode == 75
