"""Threads keep to the cores that other programs leave, and return."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from pentameter.machine.cores_and_memory import usable_cores
from pentameter.machine.load import affinity
from pentameter.machine.load.affinity import Affinity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there threads are bound")


@pytest.fixture
def unbound(monkeypatch):
    """Cores are chosen, and no thread is bound."""
    monkeypatch.setattr(affinity.os, "sched_setaffinity", lambda *_: None)


def beside(n_cores, n_threads):
    """An Affinity, and a function that tells it how much of each second others had on each core,
    its own threads the rest of theirs, and returns its cores."""
    found = Affinity(frozenset(range(n_cores)), n_threads)

    def choose(*others):
        own = sum(1.0 - others[core] for core in found.cores)
        busy = {core: 1.0 if core in found.cores else others[core] for core in range(n_cores)}
        found._choose(busy, own)
        return set(found.cores)

    return choose


@pytest.mark.usefixtures("unbound")
def test_threads_leave_the_cores_that_others_keep_busy():
    choose = beside(2, 2)
    assert choose(0.4, 0.4) == {0, 1}  # no more than a part of one
    first = choose(0.7, 0.65)  # as beside two loops, of which the kernel then puts both elsewhere
    assert len(first) == 1
    elsewhere = [float(core not in first) for core in range(2)]
    assert choose(*elsewhere) == first
    assert choose(*(0.7 * x for x in elsewhere)) == first  # one that is busy for most of the time
    assert choose(*(0.5 * x for x in elsewhere)) == {0, 1}


@pytest.mark.usefixtures("unbound")
@pytest.mark.parametrize(
    ("others", "n"), [(0.8, 8), (1.0, 7), (2.85, 6), (3.0, 5), (5.0, 4), (7.9, 4)]
)
def test_at_most_two_threads_share_a_core(others, n):
    assert len(beside(8, 8)(*[others / 8] * 8)) == n


@pytest.mark.usefixtures("unbound")
def test_threads_that_leave_enough_cores_free_are_not_bound():
    choose = beside(8, 3)
    assert len(choose(*[0.6] * 8)) == 8  # three are left
    assert len(choose(*[0.8] * 8)) == 2


@pytest.mark.usefixtures("unbound")
def test_threads_follow_to_where_others_are_not():
    choose = beside(4, 4)
    first = choose(*[0.5] * 4)
    assert len(first) == 2
    there = [float(core in first) for core in range(4)]
    assert choose(*there) == {0, 1, 2, 3} - first


@pytest.mark.usefixtures("unbound")
def test_two_runs_that_meet_on_one_core_part(monkeypatch):
    """They look at once, and each sees the other."""
    for seed in range(20):
        runs = []
        for number in (0, 1):
            monkeypatch.setattr(affinity.os, "getpid", lambda n=2 * seed + number: n)
            runs.append(Affinity(frozenset({0, 1}), 2))
        for _ in range(60):
            seen = []
            for each in runs:
                (other,) = (run for run in runs if run is not each)
                shares = {core: 1 / sum(core in run.cores for run in runs) for core in (0, 1)
                          if core in each.cores | other.cores}  # fmt: skip
                busy = {core: float(core in shares) for core in (0, 1)}
                seen.append((busy, sum(shares[core] for core in each.cores)))
            for each, (busy, own) in zip(runs, seen, strict=True):
                each._choose(busy, own)
        assert len(runs[0].cores) == len(runs[1].cores) == 1
        assert runs[0].cores != runs[1].cores


def test_all_threads_are_bound_and_released_but_for_those_of_others():
    every = usable_cores()
    if len(every) < 2:
        pytest.skip("one core")
    closing, found = threading.Event(), {}

    def wait(name, cores):
        if cores:
            os.sched_setaffinity(0, cores)
        found[name] = threading.get_native_id()
        closing.wait()

    threads = [threading.Thread(target=wait, args=("ours", None))]
    last = frozenset({max(every)})
    threads.append(threading.Thread(target=wait, args=("bound", last)))
    here = Affinity(every, 2)
    try:
        for thread in threads:
            thread.start()
        while len(found) < 2:
            time.sleep(0.01)
        rest = every - last
        here._bind(rest)
        threads.append(threading.Thread(target=wait, args=("later", None)))
        threads[-1].start()
        while len(found) < 3:
            time.sleep(0.01)
        cores = {name: os.sched_getaffinity(number) for name, number in found.items()}
        assert cores == {"ours": rest, "bound": last, "later": rest}
        assert usable_cores() == rest
        here.release()
        cores = {name: os.sched_getaffinity(number) for name, number in found.items()}
        assert cores == {"ours": every, "bound": last, "later": every}
    finally:
        here.release()
        closing.set()
        for thread in threads:
            thread.join()


def test_programs_of_lower_priority_do_not_count(monkeypatch):
    lines = "cpu 0 0 0 0 0 0 0 0\ncpu0 100 700 30 9000 400 20 1 5000\ncpu1 8 0 0 0 0 0 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: lines)
    monkeypatch.setattr(affinity, "family_seconds", lambda: 3.0)
    monkeypatch.setattr(affinity.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(affinity.os, "getpriority", lambda *_: 0)
    assert affinity._measure(frozenset({0, 7}))[:2] == ({0: 1.51}, 3.0)
    monkeypatch.setattr(affinity.os, "getpriority", lambda *_: 5)
    assert affinity._measure(frozenset({0}))[:2] == ({0: 1.51}, 0.0)  # its own is not in there
