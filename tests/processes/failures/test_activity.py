"""Notes of where a process is, and how long each may last."""

from __future__ import annotations

import pytest

from pentameter.processes.failures import activity
from pentameter.processes.failures.activity import (
    Activity,
    Note,
    Watchdog,
    activity_path,
    culprits,
    read_activity,
)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(activity.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_note_may_last_three_times_as_long_as_it_ever_took(clock):
    noted = Activity(timeout_seconds=600)
    noted.note("training", 1, nothing_to_lose=True)
    assert noted.latest.timeout_seconds == 30
    clock.now += 300  # it compiled, which is no measure of a step
    noted.note("training", 2)
    assert noted.latest.timeout_seconds == 600
    clock.now += 2
    noted.note("saving", 2)
    assert noted.latest.timeout_seconds == 600
    clock.now += 50
    noted.note("training", 3)
    assert noted.latest.timeout_seconds == 30
    clock.now += 20
    noted.note("training", 4)
    assert noted.latest.timeout_seconds == 60
    noted.note("saving", 4)
    assert noted.latest.timeout_seconds == 150
    assert str(noted.latest) == "in step 4 (saving)"


def test_what_was_done_beside_training_is_a_measure_too(clock):
    """The last save of a run is waited for, and only those beside training were timed."""
    noted = Activity(timeout_seconds=600)
    noted.note("saving", 1)
    clock.now += 1
    noted.note("training", 2)
    noted.took("saving", 100)
    noted.took("saving", 3)
    noted.note("saving", 3)
    assert noted.latest.timeout_seconds == 300


def test_the_launcher_reads_what_a_worker_notes(tmp_path):
    assert read_activity(tmp_path, 3) == Note()
    noted = Activity(activity_path(tmp_path, 3), 600)
    noted.note("training", 123456, nothing_to_lose=True)
    noted.note("saving", 7)
    found = read_activity(tmp_path, 3)
    assert (found.doing, found.step, found.timeout_seconds) == ("saving", 7, 600)
    noted.close()
    noted.note("training", 8)
    assert read_activity(tmp_path, 3) == found
    activity_path(tmp_path, 3).write_text("[half")
    assert read_activity(tmp_path, 3) == Note()


def test_a_watchdog_times_out_when_nobody_has_made_progress(tmp_path, clock):
    workers = [Activity(activity_path(tmp_path, rank), 600) for rank in range(2)]
    watchdog = Watchdog(tmp_path)
    for step in range(1, 4):
        for worker in workers:
            worker.note("training", step)
    watchdog.look([0, 1])
    signalled_at = clock.now
    clock.now += 29
    assert not watchdog.timed_out([0, 1], signalled_at)
    workers[0].note("training", 4)
    watchdog.look([0, 1])
    clock.now += 2
    assert not watchdog.timed_out([0, 1], signalled_at)  # rank 0 goes on
    assert watchdog.timed_out([1], signalled_at)
    assert not watchdog.timed_out([1], clock.now)
    clock.now += 3 * 29  # the step that rank 0 just made took so long
    watchdog.look([0, 1])
    assert watchdog.timed_out([0, 1], signalled_at)
    assert watchdog.of(1) == "in step 3 (training)"


def test_who_waits_is_read_off_the_main_thread_whichever_the_signal_interrupts():
    def dump(*frames: str) -> str:
        return (
            "Current thread 0x00007f37f2dff6c0 (most recent call first):\n"
            + 4 * '  File "/x/threading.py", line 9 in run\n'
            + "\nThread 0x00007f37f8c3b740 (most recent call first):\n"
            + "".join(f'  File "{frame}", line 9 in f\n' for frame in frames)
        )

    shown = {0: dump("/x/torch/distributed/c10d.py", "/x/run.py"), 1: dump("/x/run.py")}
    assert culprits([0, 1], shown) == [1]
