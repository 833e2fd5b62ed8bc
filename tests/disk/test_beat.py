"""A beat goes on until it is closed, or says itself that it ends."""

import itertools
import threading
import time

from pentameter.disk.beat import Beat


def test_it_beats_until_it_is_closed():
    beaten = threading.Semaphore(0)
    beat = Beat(beaten.release, 0.001)
    for _ in range(3):
        assert beaten.acquire(timeout=10)
    beat.close()
    assert not beat._thread.is_alive()
    while beaten.acquire(blocking=False):
        pass
    assert not beaten.acquire(timeout=0.02)


def test_a_turn_that_says_so_is_the_last():
    turns = itertools.count(1)
    seen = []

    def turn():
        seen.append(next(turns))
        return len(seen) < 3

    beat = Beat(turn, 0.001)
    beat._thread.join(10)
    assert seen == [1, 2, 3]


def test_closing_waits_no_longer_than_it_is_told():
    going, go_on = threading.Event(), threading.Event()

    def turn():
        going.set()
        go_on.wait(10)

    beat = Beat(turn, 0.0)
    assert going.wait(10)
    begin = time.monotonic()
    beat.close(0.05)
    assert time.monotonic() < begin + 5
    assert beat._thread.is_alive()
    go_on.set()
    beat.close()
    assert not beat._thread.is_alive()
