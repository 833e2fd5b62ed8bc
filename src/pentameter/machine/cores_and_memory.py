"""This machine's cores and memory, or what a container has of them: how many processes and threads
they carry."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from pentameter.disk import macos
from pentameter.disk.owner import process_start
from pentameter.errors import ConfigError

PROCESSES_PER_CORE = 4
"""Most processes per core that a run may start: enough to try any layout out, too many to train
fast."""

INTERPRETER_BYTES = 300_000_000
"""A process's memory in bytes before it has a model: Python, torch, and the training code."""

QUOTA_THREADS = "PENTAMETER_QUOTA_THREADS"
"""Environment variable in which `prepare_threads` notes the OMP_NUM_THREADS that it set for a CPU
quota, to tell it from a user's."""

_LOOK = "--dry-run shows what each process would hold, and starts none"


def usable_cores() -> frozenset[int]:
    """Return the numbers of the logical cores that this process may run on; in a container or
    under SLURM not all. How many of them it may keep busy is `n_usable_cores`."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    # Apple's chips have slow cores beside fast ones; processes of one run wait for the slowest.
    fast = macos.sysctl("hw.perflevel0.logicalcpu") if sys.platform == "darwin" else ""
    return frozenset(range(int(fast) if fast.isdecimal() else os.cpu_count() or 1))


def n_usable_cores() -> int:
    """Return how many cores this process may keep busy: `usable_cores`, or the whole cores of its
    CPU quota if these are fewer, and at least one."""
    quota = cpu_quota()
    n_cores = len(usable_cores())
    return n_cores if quota is None else max(1, min(n_cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' time this process's control groups allow it, such as 1.5 (`docker run
    --cpus 1.5`, Kubernetes' limits); None if they set no limit. root: where /proc and /sys are."""
    quotas = []
    for group in _control_groups("cpu", root):
        words = _read(group / "cpu.max")
        if not words:
            words = " ".join(_read(group / f"cpu.cfs_{each}_us") for each in ("quota", "period"))
        numbers = [int(word) for word in words.split() if word.isdecimal()]
        if len(numbers) == 2 and all(numbers):  # "max" and -1 set no limit
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process's control groups allow all of their processes
    together; None if they set no limit. root: where /proc and /sys are."""
    limits = []
    for group in _control_groups("memory", root):
        word = (_read(group / "memory.max") or _read(group / "memory.limit_in_bytes")).strip()
        # "max" sets none, nor does the largest number of whole pages, which is version 1's word
        limits += [int(word)] if word.isdecimal() and 0 < int(word) < 2**62 else []
    return min(limits, default=None)


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the Linux control groups that limit this process's CPU time
    (`controller` `cpu`) or memory (`memory`): its own group, and each one around it that can be
    seen from here. Versions 1 and 2 are read (cgroups(7), and proc(5) for mountinfo). root: where
    /proc and /sys are."""
    mounts = [line.partition(" - ") for line in _read(root / "proc/self/mountinfo").splitlines()]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for where, _, what in mounts:
            kind, *options = what.replace(",", " ").split()
            if kind != ("cgroup" if controllers else "cgroup2"):
                continue
            if controllers and controller not in options:
                continue
            top, point = where.split()[3:5]
            inside = PurePosixPath()  # what is outside of a container's mount cannot be seen
            if PurePosixPath(path).is_relative_to(top) and ".." not in path:
                inside = PurePosixPath(path).relative_to(top)
            for group in (inside, *inside.parents):
                yield root / point.lstrip("/") / group


def _read(path: Path) -> str:
    """Return the text in one of the kernel's files; "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def chosen_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the thread count that the user set by OMP_NUM_THREADS; None if unset, or set by
    `prepare_threads`.

    torchrun sets it to 1 if unset. That 1 cannot be told from a user's, and would leave most of a
    machine's cores idle, so under torchrun a 1 counts as unset.
    """
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text.isdecimal() or int(text) == 0 or text == environ.get(QUOTA_THREADS):
        return None
    return None if text == "1" and "TORCHELASTIC_RUN_ID" in environ else int(text)


def environment_of_one(n_processes: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for one of `n_processes` processes that share this machine's cores:
    `environ` with OMP_NUM_THREADS set to a process's part. It is unchanged if there is one process,
    and keeps the user's OMP_NUM_THREADS."""
    if n_processes == 1:
        return dict(environ)
    n_threads = chosen_threads(environ) or max(1, n_usable_cores() // n_processes)
    return {**environ, "OMP_NUM_THREADS": str(n_threads)}


def fair_thread_count(
    cores: frozenset[int], all_cores: Iterable[frozenset[int]], quota: float | None = None
) -> int:
    """Return the number of threads, at least one, for a process that may run on `cores`: their
    number ÷ the processes that may use any of them.

    all_cores: for each process on the machine, this one included, the cores that it may use. So
    processes that SLURM bound to separate cores use all of theirs, and others split common ones.
    quota: a CPU quota in cores (`cpu_quota`), which these processes split as well; None for no
    quota.
    """
    n_users = max(1, sum(1 for other in all_cores if other & cores))
    n_cores = len(cores) if quota is None else min(len(cores), int(quota))
    return max(1, n_cores // n_users)


def check_processes(n_processes: int, *, oversubscribe: bool = False) -> None:
    """Raise ConfigError if this machine lacks memory for `n_processes` interpreters, or if these
    are more than PROCESSES_PER_CORE for each core and `oversubscribe` is not set."""
    n_cores = n_usable_cores()
    most = PROCESSES_PER_CORE * n_cores
    if n_processes > most and not oversubscribe:
        raise ConfigError(
            f"--nproc {n_processes:,} is more than {PROCESSES_PER_CORE} processes for each of the "
            f"{n_cores} cores of this machine{or_container()}; start at most {most}, or add "
            f"--oversubscribe if you mean it. {_LOOK}"
        )
    check_memory(n_processes, 0)


def check_memory(n_processes: int, needed_bytes: int) -> None:
    """Raise ConfigError if `n_processes` processes, each with an interpreter (INTERPRETER_BYTES)
    and `needed_bytes` for tensors, exceed this machine's memory; does nothing if that is not known.
    """
    total, each = host_memory_bytes(), INTERPRETER_BYTES + needed_bytes
    if total is not None and n_processes * each > total:
        raise ConfigError(
            f"--nproc {n_processes:,}: processes of about {each / 1e9:,.2f} GB each (the fullest: "
            f"{needed_bytes / 1e9:,.2f} GB of weights, gradients and optimizer) would take "
            f"{n_processes * each / 1e9:,.0f} GB, and this machine{or_container()} has "
            f"{total / 1e9:,.0f} GB; start fewer, or share more out ([parallel]). {_LOOK}"
        )


def or_container() -> str:
    """Return " (or its container)" if this process has a limit on CPU or memory, else "": an
    addition to messages about this machine."""
    return "" if cpu_quota() is None and memory_limit() is None else " (or its container)"


def host_memory_bytes() -> int | None:
    """Return this machine's total memory in bytes, or its container's limit if that is less; None
    if the system does not say."""
    limit = memory_limit()
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return limit
    return total if limit is None else min(total, limit)


def has_gpu_file(devices: Path = Path("/dev")) -> bool:
    """Return whether there is a GPU's device file under `devices`: NVIDIA's (a container may have
    any but the first), AMD's, or the one that WSL passes on."""
    return any(next(devices.glob(name), None) for name in ("nvidia[0-9]*", "kfd", "dxg"))


def seconds_running() -> float:
    """Return the seconds since this process started; 0 if the system does not say (proc(5))."""
    ticks = process_start(os.getpid()) if sys.platform == "linux" else None
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
