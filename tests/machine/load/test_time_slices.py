"""Threads take short slices and the system's again, and nothing else about them changes."""

from __future__ import annotations

import os
import platform
import sys
import threading

import pytest

from pentameter.machine.load import idle_threads
from pentameter.machine.load.idle_threads import SHORT_SLICE, _attributes, set_time_slices

HAS_CALLS = sys.platform == "linux" and platform.machine() in idle_threads._CALLS
needs_calls = pytest.mark.skipif(not HAS_CALLS, reason="the calls of Linux on x86-64 and ARM")
POLICY, NICE, SLICE = 1, 3, 5


def all_attributes():
    found = {int(thread): _attributes(int(thread)) for thread in os.listdir("/proc/self/task")}
    return {thread: each for thread, each in found.items() if each is not None}


@needs_calls
def test_all_threads_get_short_slices_and_then_the_systems_again():
    """Linux before 6.12 says 0 for a slice, and keeps none."""
    closing = threading.Event()
    waiting = threading.Thread(target=closing.wait)
    waiting.start()
    os.setpriority(os.PRIO_PROCESS, waiting.native_id, os.getpriority(os.PRIO_PROCESS, 0) + 1)
    try:
        before = all_attributes()
        set_time_slices(SHORT_SLICE)
        meanwhile = all_attributes()
        set_time_slices(0)
        after = all_attributes()
    finally:
        closing.set()
        waiting.join()
    mine, its = before[threading.get_native_id()], before[waiting.native_id]
    assert its[NICE] == mine[NICE] + 1
    shared = before.keys() & meanwhile.keys() & after.keys()
    assert {threading.get_native_id(), waiting.native_id} <= shared
    for thread in shared:
        keeps = SHORT_SLICE if before[thread][SLICE] else 0
        expected = [*before[thread]]
        expected[SLICE] = keeps
        assert [*meanwhile[thread]] == expected
        assert after[thread] == before[thread]


@needs_calls
def test_a_thread_of_another_policy_is_left_alone():
    """A user who runs a program only when nothing else runs wants that."""
    found = []

    def idle():
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        before = _attributes(0)
        set_time_slices(SHORT_SLICE)
        found.append((before, _attributes(0)))
        set_time_slices(0)

    thread = threading.Thread(target=idle)
    thread.start()
    thread.join()
    ((before, after),) = found
    assert before == after
    assert before[POLICY] == os.SCHED_IDLE


@needs_calls
def test_a_thread_that_has_ended_is_no_error():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    idle_threads._set_time_slice(thread.native_id, SHORT_SLICE)
    assert _attributes(thread.native_id) is None


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "riscv64")])
def test_a_system_without_these_calls_is_not_asked(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(idle_threads, "_call", lambda *_: pytest.fail("it asks"))
    set_time_slices(SHORT_SLICE)
