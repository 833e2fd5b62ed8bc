"""The load of other programs on this machine's cores, and the time that a thread works among
them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from pentameter.disk.owner import family_seconds
from pentameter.machine.cores_and_memory import cpu_quota, usable_cores

Collect = Callable[[Any], list[Any]]
"""Type of an all-gather: maps this process's value to the list of all processes' values, ordered by
rank. Collective."""

BUSY_CORES = 0.5
"""Number of cores that other programs must keep busy for a warning; fewer are an idle machine's
noise."""

_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Columns of a core's line in /proc/stat, in order."""


class OtherPrograms:
    """Measures how much other programs load the cores that this run's processes use, averaged since
    this object was made. What those processes began, such as a compiler's workers, is none."""

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._start = busy_seconds(self._cores), family_seconds(), time.monotonic()

    def cores(self, collect: Collect) -> float:
        """Return how many cores programs outside this run kept busy on this machine, on average
        since construction. collect: all-gather over the run's ranks (`World.all_gather`).
        Collective."""
        busy, used, now = busy_seconds(self._cores), family_seconds(), time.monotonic()
        node = platform.node()
        mine = node, self._cores, busy - self._start[0], used - self._start[1]
        here = [each[1:] for each in collect(mine) if each[0] == node]
        # Ranks may have cores of their own.
        busy_on = {cores: seconds for cores, seconds, _ in here}
        used_by_run = sum(seconds for *_, seconds in here)
        return max(0.0, sum(busy_on.values()) - used_by_run) / max(now - self._start[2], 1e-3)

    def warning(self, collect: Collect) -> str | None:
        """Return a sentence for people if other programs keep BUSY_CORES or more busy. None if they
        do not, and under a container's CPU quota. collect: all-gather over the run's ranks
        (`World.all_gather`). Collective."""
        cores, n = self.cores(collect), len(self._cores)
        if cores < BUSY_CORES or cpu_quota() is not None:
            return None
        return (
            f"other programs keep {min(cores, n):.1f} of this machine's {n} cores busy; steps will "
            "take longer than they need to"
        )


def busy_seconds(cores: Collection[int], *, with_stolen: bool = True) -> float:
    """Return the CPU seconds that all programs have used on the cores with these numbers since the
    machine started; 0 if the system does not say. with_stolen: count what other virtual machines
    took, too."""
    states = ("user", "nice", "system", "irq", "softirq", *(("steal",) if with_stolen else ()))
    return sum(seconds_by_core(cores, states).values())


def seconds_by_core(cores: Collection[int], states: Collection[str]) -> dict[int, float]:
    """Return the seconds for which each of the cores with these numbers has been in one of the
    `states` since the machine started, from /proc/stat: columns in proc(5), _STATES. Cores of which
    the system does not say are left out."""
    columns = [1 + column for column, state in enumerate(_STATES) if state in states]
    wanted = {f"cpu{number}": number for number in cores}
    found: dict[int, float] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[0] in wanted:
                ticks = sum(int(words[column]) for column in columns)
                found[wanted[words[0]]] = ticks / os.sysconf("SC_CLK_TCK")
    return found


class BusyTime:
    """A clock that measures the time in which the thread that creates it works. It runs while the
    thread computes and, on Linux, while it could compute but another program has its core; it
    stands while the thread waits for another process, a disk or a timer. Call `close` in the
    end."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):  # not on Linux, or a kernel without it
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._read()

    def seconds(self) -> float:
        """Return the clock's time in seconds; only differences mean something."""
        return time.thread_time() if self._fd < 0 else self._read()

    def _read(self) -> float:
        on_core, waiting_for_core, _ = os.pread(self._fd, 64, 0).split()
        return 1e-9 * (int(on_core) + int(waiting_for_core))

    def close(self) -> None:
        """Close the kernel's file; the clock then counts the time on a core alone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
