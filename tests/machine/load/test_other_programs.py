"""How busy other programs keep the cores, and a clock that counts work alone."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from pentameter.disk.owner import family_seconds
from pentameter.machine.cores_and_memory import usable_cores
from pentameter.machine.load import other_programs
from pentameter.machine.load.other_programs import BusyTime, OtherPrograms
from pentameter.processes.group.world import World

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")


@LINUX_ONLY
def test_another_program_is_noticed_and_this_one_is_not():
    others = OtherPrograms()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:  # this process is busy, which is no other program
        pass
    alone = others.cores(World().all_gather)
    others = OtherPrograms()
    before = os.times()
    orphan = f"{sys.executable} -c 'while True: pass' > /dev/null & echo $!"  # none of our children
    busy = int(subprocess.check_output(["sh", "-c", orphan]))
    try:
        time.sleep(1.0)
        beside = others.cores(World().all_gather)
        assert os.times()[0] - before[0] < 0.5  # which its own seconds did not hide
    finally:
        os.kill(busy, signal.SIGKILL)
    assert 0 <= alone < len(usable_cores())
    assert beside > 0.2
    assert beside <= len(usable_cores()) + 0.1


@LINUX_ONLY
def test_what_living_children_compute_is_no_other_program():
    code = "while __import__('time').process_time() < 0.4: pass\nprint(flush=True); input()"
    nested = f"{sys.executable} -c {shlex.quote(code)}; true"  # a child of the shell
    before = family_seconds()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", nested], **pipes) as shell:
        shell.stdout.readline()  # it has computed, and lives
        assert family_seconds() - before > 0.35
        shell.stdin.close()


@pytest.mark.parametrize("own_cores", [[{0}, {1}], [{0, 1}, {0, 1}]], ids=["bound", "common"])
def test_ranks_see_one_load_whichever_cores_they_may_use(monkeypatch, own_cores):
    """Each core is busy for 8 of 10 s, each rank computes for 5 s of them."""
    now = [0.0]
    monkeypatch.setattr(other_programs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_programs, "busy_seconds", lambda cores: 0.8 * now[0] * len(cores))
    monkeypatch.setattr(other_programs, "family_seconds", lambda: 0.5 * now[0])
    ranks = []
    for cores in map(frozenset, own_cores):
        monkeypatch.setattr(other_programs, "usable_cores", lambda cores=cores: cores)
        ranks.append(OtherPrograms())
    now[0] = 10.0
    sent: list[object] = []
    for rank in ranks:
        rank.cores(lambda value: sent.append(value) or [value])
    assert [rank.cores(lambda value: sent) for rank in ranks] == pytest.approx([0.6, 0.6])


def test_a_busy_machine_is_told(monkeypatch):
    others = OtherPrograms()
    monkeypatch.setattr(others, "cores", lambda world: 1.25)
    warning = str(others.warning(World().all_gather))
    assert warning.startswith("other programs keep 1.2 of this machine's ")
    monkeypatch.setattr(others, "cores", lambda world: 0.1)
    assert others.warning(World().all_gather) is None


def test_a_system_that_does_not_say_is_taken_for_idle(monkeypatch):
    monkeypatch.setattr(other_programs, "busy_seconds", lambda cores: 0.0)
    assert OtherPrograms().cores(World().all_gather) == 0.0


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.fixture
def busy():
    clock = BusyTime()
    yield clock
    clock.close()


def test_sleeping_is_not_busy(busy):
    start, began = busy.seconds(), time.perf_counter()
    time.sleep(0.2)
    took = busy.seconds() - start
    assert took < time.perf_counter() - began - 0.19


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a stolen core")
def test_computing_is_busy_also_while_another_program_has_the_core(busy):
    start, began = busy.seconds(), time.perf_counter()
    spin(0.1)
    assert busy.seconds() - start == pytest.approx(time.perf_counter() - began, rel=0.2)


def test_a_closed_clock_counts_the_time_on_a_core():
    clock = BusyTime()
    clock.close()
    start = clock.seconds()
    spin(0.05)
    assert clock.seconds() > start
