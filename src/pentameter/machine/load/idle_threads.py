"""The waiting of this process's idle threads for their next work: spinning, or asleep while other
programs want the cores.

A step on a CPU has thousands of places where threads wait for each other. Spinning threads see at
once that the wait is over, sleeping ones need the kernel for it, which costs 5 to 35 % of a step.
But a spinning thread holds the core that the awaited thread needs if another program has the other
one, which costs three quarters of a step and more. benchmarks/measurements/cpu-threads.md has the
figures.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, MutableMapping

from pentameter.machine.cores_and_memory import (
    QUOTA_THREADS,
    chosen_threads,
    cpu_quota,
    n_usable_cores,
)

SPIN = {"GOMP_SPINCOUNT": "60000", "KMP_BLOCKTIME": "3"}
"""OpenMP environment variables that have an idle thread spin for 3 ms before it sleeps: GNU's
runtime counts turns of some 140 cycles, Intel's milliseconds."""

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


def put_to_sleep(n_threads: int, n_cores: int) -> Teams | None:
    """Have all idle threads of this process sleep until the returned Teams are closed; n_threads of
    them compute, and OpenMP counts n_cores. Return None where the system lets no more threads
    start."""
    n_teams = _n_teams(n_threads, n_cores)
    return Teams(n_teams) if _may_start(n_teams * n_threads) else None


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


class Teams:
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
