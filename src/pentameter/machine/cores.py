"""The cores of this machine: which a run may use, how many processes and threads they carry, how
busy other programs keep them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from pentameter.errors import ConfigError

PROCESSES_PER_CORE = 4
"""Processes of a run that a core may have: enough to try any layout out, too many to train fast."""

INTERPRETER_BYTES = 300_000_000
"""Memory of a process before it has a model: Python, torch, and what trains with it."""

Collect = Callable[[Any], list[Any]]
"""Returns what each process of the run gave, by rank."""

_LOOK = "--dry-run shows what each process would hold, and starts none"

BUSY_CORES = 0.5
"""Cores that other programs keep busy; fewer are the noise of a machine that does nothing else."""


def usable_cores() -> frozenset[int]:
    """Logical cores this process may run on, which in a container or under SLURM is not all."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def chosen_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number that the user chose with OMP_NUM_THREADS; None where nobody did.

    torchrun sets it to 1 where it is not set. That 1 cannot be told from a user's, and would
    leave most of a machine's cores idle, so under torchrun a 1 is nobody's choice.
    """
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text.isdecimal() or int(text) == 0:
        return None
    return None if text == "1" and "TORCHELASTIC_RUN_ID" in environ else int(text)


def fair_share(mine: frozenset[int], of_the_machine: Iterable[frozenset[int]]) -> int:
    """Threads for a process that may use the cores `mine`, at least one.

    `of_the_machine` holds what each process of the machine may use, this one included. Processes
    that SLURM bound to cores of their own use all of those; the others divide what they share.
    """
    n_sharing = sum(1 for cores in of_the_machine if cores & mine)
    return max(1, len(mine) // max(1, n_sharing))


def check_processes(n_processes: int, *, oversubscribe: bool = False) -> None:
    """Raise ConfigError where this machine cannot carry the interpreters of `n_processes`, or has
    too few cores for them and nobody asked to `oversubscribe` it."""
    n_cores = len(usable_cores())
    most = PROCESSES_PER_CORE * n_cores
    if n_processes > most and not oversubscribe:
        raise ConfigError(
            f"--nproc {n_processes:,} is more than {PROCESSES_PER_CORE} processes for each of the "
            f"{n_cores} cores of this machine; start at most {most}, or add --oversubscribe if you "
            f"mean it. {_LOOK}"
        )
    check_memory(n_processes, 0)


def check_memory(n_processes: int, needed_bytes: int) -> None:
    """Raise ConfigError where `n_processes` do not fit this machine's memory, each with an
    interpreter and `needed_bytes` of tensors."""
    total, each = host_memory_bytes(), INTERPRETER_BYTES + needed_bytes
    if total is not None and n_processes * each > total:
        raise ConfigError(
            f"--nproc {n_processes:,}: processes of about {each / 1e9:,.2f} GB each (the fullest: "
            f"{needed_bytes / 1e9:,.2f} GB of weights, gradients and optimizer) would take "
            f"{n_processes * each / 1e9:,.0f} GB, and this machine has {total / 1e9:,.0f} GB; "
            f"start fewer, or share more out ([parallel]). {_LOOK}"
        )


def host_memory_bytes() -> int | None:
    """Total memory of this machine in bytes; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


WAIT_POLICIES = {
    "quiet": {"GOMP_SPINCOUNT": "60000", "KMP_BLOCKTIME": "3"},
    "busy": {"OMP_WAIT_POLICY": "PASSIVE"},
}
"""Settings of OpenMP runtimes: how long a thread without work spins before it sleeps. GNU's counts
in turns of some 140 cycles, 3 ms in all; Intel's in ms. Passive threads sleep at once."""

_BUSY_SHARE = 0.75  # of the cores' time: below it a core is left for the thread that is waited for
_LOOK_SECONDS = 0.05


def choose_wait_policy(environ: MutableMapping[str, str] = os.environ) -> None:
    """Choose how idle OpenMP threads wait, by how busy other programs keep the machine now, unless
    the user chose.

    Call it before torch is imported, which loads the OpenMP runtime: that reads these variables
    once. Threads that sleep make every short wait inside a step one of the kernel's, which costs a
    quarter to a third of a step; threads that spin hold the core that the thread they wait for
    needs, where others have the remaining ones, which costs three quarters. Workers inherit the
    choice of their launcher. docs/performance.md has the figures.
    """
    if environ.keys() & {"OMP_WAIT_POLICY", *WAIT_POLICIES["quiet"]}:
        return
    cores = usable_cores()
    before, start = _busy_seconds(cores), time.monotonic()
    time.sleep(_LOOK_SECONDS)
    busy = (_busy_seconds(cores) - before) / (time.monotonic() - start)
    environ.update(WAIT_POLICIES["busy" if busy > _BUSY_SHARE * len(cores) else "quiet"])


class OtherPrograms:
    """How many of the cores that this process may use other programs keep busy, from here on."""

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._start = _busy_seconds(self._cores), _own_seconds(), time.monotonic()

    def cores(self, collect: Collect) -> float:
        """Cores, on average since the start, that programs other than this run kept busy on this
        machine. Collective: `collect` is that of the run's World."""
        busy, own, now = _busy_seconds(self._cores), _own_seconds(), time.monotonic()
        here = platform.node()
        of_all = collect((here, own - self._start[1]))
        of_the_run = sum(seconds for machine, seconds in of_all if machine == here)
        return max(0.0, busy - self._start[0] - of_the_run) / max(now - self._start[2], 1e-3)

    def warning(self, collect: Collect) -> str | None:
        """A line for a person where others keep this machine busy, else None. Collective."""
        cores, n = self.cores(collect), len(self._cores)
        if cores < BUSY_CORES or _has_quota():
            return None
        return (
            f"other programs keep {min(cores, n):.1f} of this machine's {n} cores busy; steps will "
            "take longer than they need to"
        )


def _has_quota() -> bool:
    """Whether a container's share of time, not other programs, decides how fast this process is."""
    try:
        return not Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").startswith("max")
    except (OSError, ValueError):
        return False


def _own_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _busy_seconds(cores: Collection[int]) -> float:
    """Processor seconds that all programs have used on `cores` since the machine started; 0 where
    the system does not say (proc(5): user, nice, system, idle, iowait, irq, softirq, steal)."""
    wanted = {f"cpu{number}" for number in cores}
    used = 0
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *counts = line.split()
            if name in wanted:
                ticks = [int(count) for count in counts[:8]]
                used += sum(ticks) - sum(ticks[3:5])  # but for idle and iowait
        return used / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
