"""The cores that this process's threads may run on while other programs keep cores busy: those that
are left, and at least one for two threads.

Threads that wait for each other lose most of their time where each shares its core with a busy
program: one is off its core while the other computes, then the other way round. Two of them on one
core that is theirs compute whenever they may. benchmarks/measurements/cpu-threads.md has figures.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pentameter.disk.owner import family_seconds
from pentameter.machine.load.other_programs import seconds_by_core

_AS_URGENT = ("user", "system", "irq", "softirq")
"""States of a core (`seconds_by_core`) in which it computes for programs of the usual priority."""
_TO_LEAVE, _TO_RETURN = 0.1, 0.4
"""Cores by which others may fall short of keeping one more busy for threads to leave it, and for
them to stay away from it: of one that is busy for 0.9 of the time, until that is below 0.6."""
_WORTH_A_MOVE = 0.25
"""Cores by which others must keep a core less busy than another one for threads to change to
it."""


class _Load(NamedTuple):
    """CPU seconds until `time`: all programs' on each core, and what this process and all that it
    began had of them."""

    busy: dict[int, float]
    own: float
    time: float


def _measure(cores: frozenset[int]) -> _Load:
    own = family_seconds() if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else 0.0  # else `nice` time
    return _Load(seconds_by_core(cores, _AS_URGENT), own, time.monotonic())


class Affinity:
    """The cores of this process's threads, which `look` chooses by the load of other programs.
    Threads, and processes that they begin, keep to them until `release`. Linux only; threads that
    were bound to other cores by somebody else stay there.

    Programs of a lower priority (`nice`) do not count: they leave a core when it is wanted.

    cores: those that the process may use. n_threads: number of threads that compute.
    """

    def __init__(self, cores: frozenset[int], n_threads: int) -> None:
        self._all, self._n_threads = cores, n_threads
        self.cores = cores
        """The cores of the process's threads now."""
        self._chosen = {cores}
        self._before: _Load | None = None
        self._random = random.Random(os.getpid())  # of its own: the program's may draw batches

    def look(self) -> None:
        """Choose the cores anew by the load since the last look; the first one after `release`
        only measures."""
        before, self._before = self._before, _measure(self._all)
        if before is not None and (seconds := self._before.time - before.time) > 0:
            busy = {core: s - before.busy.get(core, s) for core, s in self._before.busy.items()}
            own = self._before.own - before.own
            self._choose({core: s / seconds for core, s in busy.items()}, own / seconds)

    def release(self) -> None:
        """Let the process's threads run on all of its cores again."""
        self._before = None
        self._return()

    def _choose(self, busy: Mapping[int, float], own: float) -> None:
        """Choose the cores. busy: how many seconds of each second all programs together computed on
        each core, this process's threads among them, by the core's number. own: how many of them
        these threads had."""
        here = sum(busy.get(core, 0.0) for core in self.cores)
        here_by_others = max(0.0, here - own) / len(self.cores)
        others = {core: busy.get(core, 0.0) for core in sorted(self._all - self.cores)}
        others |= dict.fromkeys(self.cores, here_by_others)
        n = self._number(sum(others.values()))
        if n >= self._n_threads:
            self._return()
            return
        # Among equal ones any: not all runs are to meet on the same core.
        order = self._random.sample(list(others), len(others))
        order.sort(key=lambda core: others[core] - _WORTH_A_MOVE * (core in self.cores))
        self._bind(frozenset(order[:n]))

    def _number(self, others: float) -> int:
        """Return the number of cores for this process's threads, of which at most two share one,
        while other programs compute for `others` seconds of each second."""
        least = len(self._all) - math.floor(others + _TO_RETURN)
        most = len(self._all) - math.floor(others + _TO_LEAVE)
        return max(-(-self._n_threads // 2), min(most, max(least, len(self.cores))))

    def _return(self) -> None:
        if self.cores != self._all:
            self._bind(self._all)

    def _bind(self, cores: frozenset[int]) -> None:
        self._chosen.add(cores)
        self.cores = cores
        with suppress(OSError):  # no such folder
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # the thread has ended, or the cores were taken away
                    number = int(thread.name)
                    if frozenset(os.sched_getaffinity(number)) in self._chosen:
                        os.sched_setaffinity(number, cores)
