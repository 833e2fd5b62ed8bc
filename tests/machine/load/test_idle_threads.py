"""Idle threads spin, sleep while other programs want the cores, and change no number by it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from pentameter.machine.load import idle_threads
from pentameter.machine.load.idle_threads import SPIN, IdleThreads, is_chosen, prepare_threads
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="GNU's runtime, and /proc")
ALONE = World().all_gather


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_how_threads_wait_is_the_users_choice(monkeypatch, name):
    monkeypatch.setattr(idle_threads, "cpu_quota", lambda: None)
    chosen = {name: "7"}
    prepare_threads(chosen)
    assert chosen == {name: "7"}
    assert not is_chosen(chosen)
    assert not is_chosen({**SPIN, "OMP_WAIT_POLICY": "PASSIVE"})


def test_how_threads_wait_is_chosen_before_torch_is_loaded():
    """The runtime reads its variables once, when torch loads it."""
    code = (
        "import os, sys, pentameter as pm; assert 'torch' not in sys.modules;"
        "from pentameter.machine.load.idle_threads import is_chosen; print(is_chosen());"
        "pm.Trainer; print('torch' in sys.modules, is_chosen())"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept
    )
    assert done.stdout == "False\nTrue True\n"


@pytest.fixture
def load(monkeypatch):
    """The number of cores that others keep busy, as the next look finds it, and a clock for it."""
    now = {"seconds": 0.0, "busy": 0.0, "used": 0.0, "cores": 0.0}

    def times(self):
        now["seconds"] += 1.0
        now["busy"] += now["cores"] + 1.5
        now["used"] += 1.5  # this process computes meanwhile
        return now["busy"], now["used"], now["seconds"]

    monkeypatch.setattr(IdleThreads, "_times", times)
    for name, value in SPIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return now


def n_holders():
    return sum("_hold" in thread.name for thread in threading.enumerate())


@LINUX_ONLY
def test_threads_sleep_while_other_programs_want_the_cores(monkeypatch, load):
    monkeypatch.setattr(idle_threads, "LOOK_SECONDS", 1e6)
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr(idle_threads.time, "monotonic", lambda: load["seconds"])
    with IdleThreads(2, ALONE) as idle:
        found = []
        for cores in (0.3, 1.0, 1.0, 1.0, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1, 2.0, 0.0, 0.0):
            load["cores"] = cores
            idle._look()
            found.append((n_holders(), idle.take_word()))
    asleep = "other processes keep 0.4 of the 2 cores busy: idle threads sleep meanwhile"
    awake = "the cores are free again: idle threads spin"
    assert found == [
        *((0, None), (1, None), (1, None), (1, None), (1, asleep), (1, None)),
        *((0, None), (0, None), (0, None), (0, awake)),
        *((1, None), (0, None), (0, None)),  # a moment's load is met, and not told
    ]
    with IdleThreads(2, ALONE) as idle:
        load["cores"] = 1.0
        idle._look()
        assert n_holders() == 1
    assert n_holders() == 0


@LINUX_ONLY
@pytest.mark.parametrize("n_may_start", [0, 1])
def test_no_team_is_opened_where_its_threads_may_not_start(monkeypatch, load, n_may_start):
    """OpenMP ends the process whose threads it cannot start."""
    real, started = threading.Thread.start, []

    def start(thread):
        if len(started) == n_may_start:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    with IdleThreads(2, ALONE) as idle:
        load["cores"] = 1.0
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            idle._look()
        assert n_holders() == 0
        assert not any(thread.is_alive() for thread in started)
        idle._look()
        assert n_holders() == 1


@LINUX_ONLY
@pytest.mark.parametrize(("n_threads", "policy"), [(1, None), (2, "active")])
def test_nobody_looks_where_no_thread_waits_or_the_user_chose(monkeypatch, load, n_threads, policy):
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(idle_threads, "Beat", lambda *_: pytest.fail("it looks"))
    with IdleThreads(n_threads, ALONE) as idle:
        assert idle.take_word() is None


def test_ranks_on_the_same_cores_are_no_other_programs(monkeypatch):
    monkeypatch.setattr(idle_threads, "usable_cores", lambda: frozenset({0, 1}))
    used = {os.getpid(): 1.0, 11: 10.0, 12: 100.0, 13: 1000.0}
    monkeypatch.setattr(idle_threads, "processor_seconds", used.__getitem__)
    others = [(frozenset({1, 2}), 11), (frozenset({2, 3}), 12)]

    def gather(mine):
        return [mine, *((mine[0], *each) for each in others), ("elsewhere", mine[1], 13)]

    assert IdleThreads(2, gather)._times()[1] == 11.0


@LINUX_ONLY
def test_waiting_threads_sleep_while_more_are_managed_than_there_are_cores():
    """The runtime's own rule, with a spin count that the environment sets."""
    code = """
import os, time, torch
from pentameter.machine.load.idle_threads import _n_teams, _Teams
n = len(os.sched_getaffinity(0))
torch.set_num_threads(max(2, n))
numbers = torch.empty(1 << 20)
def waits():
    numbers.fill_(0.0)  # after it the other threads wait
    start = time.process_time()
    time.sleep(0.2)
    return time.process_time() - start
waits()  # its own threads are managed from here on
teams = _Teams(_n_teams(max(2, n), n))
asleep = min(waits() for _ in range(3))
teams.close()
print(asleep, max(waits() for _ in range(3)))
"""
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000000000", "KMP_BLOCKTIME": "3"}
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    asleep, spinning = map(float, done.stdout.split())
    assert 20 * asleep < spinning


@LINUX_ONLY
def test_a_load_that_comes_and_goes_changes_no_bit(monkeypatch, tmp_path, load):
    """Threads sleep in every second step of one run, and in none of the other."""
    monkeypatch.setattr(idle_threads, "LOOK_SECONDS", 1e6)
    settings = {
        "train.steps": 6, "train.batch_size": 8, "train.compile": "false", "train.device": "cpu",
        "model.n_layers": 2, "model.d_model": 128, "data.max_bytes": 100_000,
        "train.eval_interval": "none", "train.sample_interval": "none",
    }  # fmt: skip

    class Loads:
        def __init__(self, cores):
            self.cores, self.losses, self.n_holders = cores, [], []

        def on_step(self, run, step):
            self.losses.append((step.loss, step.grad_norm))
            self.n_holders.append(n_holders())
            load["cores"] = self.cores[step.step % 2]
            watch[-1]._look()

    watch = []
    enter = IdleThreads.__enter__
    monkeypatch.setattr(IdleThreads, "__enter__", lambda self: watch.append(self) or enter(self))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [Loads((0.0, 0.0)), Loads((0.0, 1.0))]
        for number, hook in enumerate(runs):
            folder = tmp_path / str(number)
            Trainer("quickstart", overrides=settings, run_dir=folder, hooks=[hook]).fit()
    finally:
        torch.set_num_threads(before)
    assert [hook.n_holders for hook in runs] == [[0] * 6, [0, 1, 0, 1, 0, 1]]
    assert runs[0].losses == runs[1].losses
