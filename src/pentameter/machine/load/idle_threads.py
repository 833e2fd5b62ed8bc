"""The waiting of this process's idle threads for their next work: spinning, or asleep while other
programs want the cores.

A step on a CPU has thousands of places where threads wait for each other. Spinning threads see at
once that the wait is over, sleeping ones need the kernel for it, which costs 5 to 35 % of a step.
But a spinning thread holds the core that the awaited thread needs if another program has the other
one, which costs three quarters of a step and more. benchmarks/measurements/cpu-threads.md has the
figures.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Self

from pentameter.disk.beat import Beat
from pentameter.disk.owner import processor_seconds
from pentameter.machine.cores_and_memory import (
    QUOTA_THREADS,
    chosen_threads,
    cpu_quota,
    n_usable_cores,
    usable_cores,
)
from pentameter.machine.load.other_programs import BUSY_CORES, Collect, busy_seconds

SPIN = {"GOMP_SPINCOUNT": "60000", "KMP_BLOCKTIME": "3"}
"""OpenMP environment variables that have an idle thread spin for 3 ms before it sleeps: GNU's
runtime counts turns of some 140 cycles, Intel's milliseconds."""

LOOK_SECONDS = 1.0
"""Seconds over which the load is averaged, after each of which threads may begin to sleep or to
spin."""

SETTLED_SECONDS = 3.0
"""Seconds for which threads must wait in one way before people are told."""

QUIET_CORES = 0.25
"""Number of cores below which other programs must fall for threads to spin again; that they began
to sleep took BUSY_CORES."""

_PARALLEL_NUMBERS = 1 << 17
"""Size of a tensor that torch fills with all of its threads: four times the least one."""


def prepare_threads(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables in `environ` that say how many threads compute and how they wait, unless
    the user set them. Call it before importing torch, which reads them once."""
    if cpu_quota() is not None and chosen_threads(environ) is None:
        # A thread more than the quota has time for halts all of them, again and again.
        n_threads = str(n_usable_cores())
        environ.update({"OMP_NUM_THREADS": n_threads, QUOTA_THREADS: n_threads})
        environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", n_threads)
    if not environ.keys() & {"OMP_WAIT_POLICY", *SPIN}:
        environ.update(SPIN)


def is_chosen(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if `prepare_threads` chose how idle threads wait, and not the user."""
    return "OMP_WAIT_POLICY" not in environ and SPIN.items() <= environ.items()


def _alone(value: Any) -> list[Any]:
    return [value]


class IdleThreads:
    """Context manager that decides every LOOK_SECONDS how this process's idle threads wait: they
    sleep once other programs keep BUSY_CORES or more of its cores busy, and spin again below
    QUIET_CORES. Which threads compute what stays as it is, and so does every number.

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
        self._sleep: _Teams | None = None
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
        return f"other processes keep {busy} busy: idle threads sleep meanwhile"

    def _look(self) -> None:
        """Measure the load since the last look, and have idle threads sleep or spin by it."""
        now = self._times()
        (busy, used, _), seconds = now, now[2] - self._before[2]
        others = (busy - self._before[0]) - (used - self._before[1])
        self._before, self._busy_cores = now, max(0.0, others) / max(seconds, 1e-3)
        if self._sleep is None and self._busy_cores >= BUSY_CORES:
            n_teams = _n_teams(self._n_threads, len(self._cores))
            if _may_start(n_teams * self._n_threads):
                self._sleep = _Teams(n_teams)
        elif self._busy_cores < QUIET_CORES:
            self._spin()

    def _spin(self) -> None:
        if self._sleep is not None:
            self._sleep.close()
            self._sleep = None

    def _times(self) -> tuple[float, float, float]:
        """Return the CPU seconds of all programs on these cores and those of this run's processes
        there, and the time."""
        used = sum(map(processor_seconds, self._pids))
        return busy_seconds(self._cores, with_stolen=False), used, time.monotonic()


def _n_teams(n_threads: int, n_cores: int) -> int:
    """Return the number of further teams of n_threads, at least 2, with which OpenMP manages more
    threads than the `n_cores` that it counts."""
    return max(1, -(-(n_cores + 1 - n_threads) // (n_threads - 1)))


def _may_start(n_threads: int) -> bool:
    """Return True if this process may start n_threads more at once. Where the system's limit lets
    it not, OpenMP would end the process."""
    closing = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(n_threads):
            thread = threading.Thread(target=closing.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        closing.set()
        for thread in started:
            thread.join()
    return True


class _Teams:
    """Threads of OpenMP that never compute. While this object is open, all idle threads of the
    process sleep.

    GNU's runtime lets threads wait for 100 turns only, then sleep, once it manages more of them
    than there are cores (`do_spin` in its config/linux/wait.h), and looks at that before each wait.
    It counts the team of every thread that has computed in parallel, until that thread ends.
    """

    def __init__(self, n_teams: int) -> None:
        self._closing = threading.Event()
        self._opened = threading.Barrier(n_teams + 1)
        self._holders = [threading.Thread(target=self._hold, daemon=True) for _ in range(n_teams)]
        for holder in self._holders:
            holder.start()
        self._opened.wait()

    def _hold(self) -> None:
        import torch

        torch.empty(_PARALLEL_NUMBERS).fill_(0.0)
        self._opened.wait()
        self._closing.wait()

    def close(self) -> None:
        """End the threads, after which idle ones spin again."""
        self._closing.set()
        for holder in self._holders:
            holder.join()
