"""The sharing of a process's cores with other programs, which come and go while it runs."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from typing import Any, Self

from pentameter.disk.beat import Beat
from pentameter.disk.owner import processor_seconds
from pentameter.machine.cores_and_memory import chosen_threads, n_usable_cores, usable_cores
from pentameter.machine.load.affinity import Affinity
from pentameter.machine.load.idle_threads import Teams, is_chosen, put_to_sleep
from pentameter.machine.load.other_programs import BUSY_CORES, Collect, busy_seconds

LOOK_SECONDS = 1.0
"""Seconds over which the load is averaged, after each of which threads may begin to sleep or to
spin, or change their cores."""

SETTLED_SECONDS = 3.0
"""Seconds for which threads must wait in one way before people are told."""

QUIET_CORES = 0.25
"""Number of cores below which other programs must fall for threads to spin again; that they began
to sleep took BUSY_CORES."""


def _alone(value: Any) -> list[Any]:
    return [value]


class BesideOthers:
    """Context manager that decides every LOOK_SECONDS how this process's threads share their cores
    with other programs: idle threads sleep once those keep BUSY_CORES or more of them busy, and
    spin again below QUIET_CORES; meanwhile all threads keep to cores that are left (`Affinity`),
    unless other processes of the run are on the same ones. Which threads compute what stays as it
    is, and so does every number.

    It does nothing if the user chose how they wait, if one thread computes, and with another
    runtime than GNU's, which is that of torch on Linux.

    n_threads: number of threads that compute in this process; by default as many as torch starts.
    collect: all-gather over the run's ranks (`World.all_gather`), as those on the same cores are no
        other programs; by default this process is alone. Creating one is collective, the rest is
        not.
    """

    def __init__(self, n_threads: int | None = None, collect: Collect = _alone) -> None:
        self._cores, node = usable_cores(), platform.node()
        ranks = collect((node, self._cores, os.getpid()))
        self._pids = [pid for name, cores, pid in ranks if name == node and cores & self._cores]
        self._n_threads = n_threads or chosen_threads() or n_usable_cores()
        self._before = self._times()
        self._sleep: Teams | None = None
        self._affinity = Affinity(self._cores, self._n_threads)
        self._beat: Beat | None = None
        self._busy_cores = 0.0
        self._was_told, self._differs_since = False, math.inf

    def __enter__(self) -> Self:
        if self._n_threads > 1 and sys.platform == "linux" and is_chosen():
            self._before = self._times()
            self._beat = Beat(self._look, LOOK_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._beat is not None:
            self._beat.close()
        self._spin()

    def take_word(self) -> str | None:
        """Return a sentence if threads have waited otherwise than the last one said for
        SETTLED_SECONDS of calls to this method; else None. So what passes, such as the workers of
        a compiler, is met and not told."""
        is_asleep, now = self._sleep is not None, time.monotonic()
        if is_asleep == self._was_told:
            self._differs_since = math.inf
            return None
        self._differs_since = min(self._differs_since, now)
        if now - self._differs_since < SETTLED_SECONDS:
            return None
        self._was_told, self._differs_since = is_asleep, math.inf
        if not is_asleep:
            return "the cores are free again: idle threads spin"
        busy = f"{self._busy_cores:.1f} of the {len(self._cores)} cores"
        n_left = len(self._affinity.cores)
        kept = f", and all keep to {n_left} of them" if n_left < len(self._cores) else ""
        return f"other processes keep {busy} busy: idle threads sleep meanwhile{kept}"

    def _look(self) -> None:
        """Measure the load since the last look, and have idle threads sleep or spin by it."""
        now = self._times()
        (busy, used, _), seconds = now, now[2] - self._before[2]
        others = (busy - self._before[0]) - (used - self._before[1])
        self._before, self._busy_cores = now, max(0.0, others) / max(seconds, 1e-3)
        if self._sleep is None and self._busy_cores >= BUSY_CORES:
            self._sleep = put_to_sleep(self._n_threads, len(self._cores))
        elif self._busy_cores < QUIET_CORES:
            self._spin()
        if self._sleep is not None and len(self._pids) == 1:
            self._affinity.look()

    def _spin(self) -> None:
        self._affinity.release()
        if self._sleep is not None:
            self._sleep.close()
            self._sleep = None

    def _times(self) -> tuple[float, float, float]:
        """Return the CPU seconds of all programs on these cores and those of this run's processes
        there, and the time."""
        used = sum(map(processor_seconds, self._pids))
        return busy_seconds(self._cores, with_stolen=False), used, time.monotonic()
