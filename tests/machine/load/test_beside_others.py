"""Threads share their cores with other programs that come and go, and change no number by it."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from pentameter.machine.cores_and_memory import usable_cores
from pentameter.machine.load import affinity, beside_others
from pentameter.machine.load.beside_others import BesideOthers
from pentameter.machine.load.idle_threads import SPIN
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="GNU's runtime, and /proc")
ALONE = World().all_gather


@pytest.fixture
def load(monkeypatch):
    """The number of cores that others keep busy, as the next look finds it, and a clock for it."""
    now = {"seconds": 0.0, "busy": 0.0, "used": 0.0, "cores": 0.0}

    def times(self):
        now["seconds"] += 1.0
        now["busy"] += now["cores"] + 1.5
        now["used"] += 1.5  # this process computes meanwhile
        return now["busy"], now["used"], now["seconds"]

    monkeypatch.setattr(BesideOthers, "_times", times)
    for name, value in SPIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return now


def n_holders():
    return sum("_hold" in thread.name for thread in threading.enumerate())


@LINUX_ONLY
def test_threads_sleep_while_other_programs_want_the_cores(monkeypatch, load):
    monkeypatch.setattr(beside_others, "LOOK_SECONDS", 1e6)
    monkeypatch.setattr(beside_others, "usable_cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr(beside_others.time, "monotonic", lambda: load["seconds"])
    with BesideOthers(2, ALONE) as sharing:
        found = []
        for cores in (0.3, 1.0, 1.0, 1.0, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1, 2.0, 0.0, 0.0):
            load["cores"] = cores
            sharing._look()
            found.append((n_holders(), sharing.take_word()))
    asleep = "other processes keep 0.4 of the 2 cores busy: idle threads sleep meanwhile"
    awake = "the cores are free again: idle threads spin"
    assert found == [
        *((0, None), (1, None), (1, None), (1, None), (1, asleep), (1, None)),
        *((0, None), (0, None), (0, None), (0, awake)),
        *((1, None), (0, None), (0, None)),  # a moment's load is met, and not told
    ]
    with BesideOthers(2, ALONE) as sharing:
        load["cores"] = 1.0
        sharing._look()
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

    with BesideOthers(2, ALONE) as sharing:
        load["cores"] = 1.0
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            sharing._look()
        assert n_holders() == 0
        assert not any(thread.is_alive() for thread in started)
        sharing._look()
        assert n_holders() == 1


@LINUX_ONLY
@pytest.mark.parametrize(("n_threads", "policy"), [(1, None), (2, "active")])
def test_nobody_looks_where_no_thread_waits_or_the_user_chose(monkeypatch, load, n_threads, policy):
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(beside_others, "Beat", lambda *_: pytest.fail("it looks"))
    with BesideOthers(n_threads, ALONE) as sharing:
        assert sharing.take_word() is None


def test_ranks_on_the_same_cores_are_no_other_programs(monkeypatch):
    monkeypatch.setattr(beside_others, "usable_cores", lambda: frozenset({0, 1}))
    used = {os.getpid(): 1.0, 11: 10.0, 12: 100.0, 13: 1000.0}
    monkeypatch.setattr(beside_others, "processor_seconds", used.__getitem__)
    others = [(frozenset({1, 2}), 11), (frozenset({2, 3}), 12)]

    def gather(mine):
        return [mine, *((mine[0], *each) for each in others), ("elsewhere", mine[1], 13)]

    assert BesideOthers(2, gather)._times()[1] == 11.0


@LINUX_ONLY
def test_a_load_that_comes_and_goes_changes_no_bit(monkeypatch, tmp_path, load):
    """In the middle of one run threads sleep, then share one core too; in the other nothing is
    beside."""
    monkeypatch.setattr(beside_others, "LOOK_SECONDS", 1e6)
    every = usable_cores()

    def measured(cores):
        now = load["seconds"]
        return affinity._Load(dict.fromkeys(cores, now), 0.1 * now, now)

    monkeypatch.setattr(affinity, "_measure", measured)
    settings = {
        "train.steps": 6, "train.batch_size": 8, "train.compile": "false", "train.device": "cpu",
        "model.n_layers": 2, "model.d_model": 128, "data.max_bytes": 100_000,
        "train.eval_interval": "none", "train.sample_interval": "none",
    }  # fmt: skip

    class Loads:
        def __init__(self, cores):
            self.cores, self.losses, self.found = cores, [], []

        def on_step(self, run, step):
            self.losses.append((step.loss, step.grad_norm))
            self.found.append((n_holders(), len(usable_cores())))
            load["cores"] = self.cores[step.step - 1]
            watch[-1]._look()

    watch = []
    enter = BesideOthers.__enter__
    monkeypatch.setattr(BesideOthers, "__enter__", lambda self: watch.append(self) or enter(self))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [Loads((0.0,) * 6), Loads((0.0, 1.0, 1.0, 1.0, 0.0, 0.0))]
        for number, hook in enumerate(runs):
            folder = tmp_path / str(number)
            Trainer("quickstart", overrides=settings, run_dir=folder, hooks=[hook]).fit()
    finally:
        torch.set_num_threads(before)
    quiet = (0, len(every))
    assert runs[0].found == [quiet] * 6
    assert runs[1].found == [quiet, quiet, (1, len(every)), (1, 1), (1, 1), quiet]
    assert usable_cores() == every
    assert runs[0].losses == runs[1].losses


@LINUX_ONLY
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_ranks_that_share_cores_are_not_bound(monkeypatch, load, n_ranks):
    """Each of them would choose by itself."""
    looks = []
    monkeypatch.setattr(affinity.Affinity, "look", lambda _: looks.append(1))
    load["cores"] = 1.0
    with BesideOthers(2, lambda mine: [mine] * n_ranks) as sharing:
        sharing._look()
    assert len(looks) == (n_ranks == 1)
