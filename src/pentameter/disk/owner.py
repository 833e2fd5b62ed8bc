"""Identifies the process that holds a lock, on any machine, and tells whether it still lives."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pentameter.disk import macos


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, identified so that it differs from every other on any
    machine."""

    pid: int
    host: str
    boot: str
    """Kernel's boot id: two machines with one name, or one before and after a restart, differ."""
    pid_namespace: str
    """Namespace that the pid is valid in; containers have their own."""
    process_start: int
    """Time at which the process started: clock ticks since boot, on macOS seconds since 1970; a
    reused pid differs. 0 if unknown."""
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def current_owner() -> Owner:
    """Return this process as an Owner, with a new random token at each call."""
    pid = os.getpid()
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return Owner(
        pid=pid,
        host=socket.gethostname(),
        boot=_boot_id(),
        pid_namespace=namespace,
        process_start=_own_start(pid),
        token=uuid.uuid4().hex,
    )


def is_same_machine(owner: Owner, me: Owner) -> bool:
    """Return whether `owner` is or was a process on the same machine as this one, `me`, in the same
    boot and pid namespace, so that its pid can be looked up."""
    if (owner.boot, owner.pid_namespace) != (me.boot, me.pid_namespace):
        return False
    # A Mac's name follows the network that it is in.
    return owner.host == me.host or (sys.platform == "darwin" and me.boot != "")


def is_dead(owner: Owner, me: Owner) -> bool:
    """Return True if `owner` is known to have ended: it ran where this process, `me`, can look it
    up (`is_same_machine`), and its pid is gone or belongs to a later process. False if it lives, or
    that cannot be known."""
    if not is_same_machine(owner, me):
        return False
    with suppress(PermissionError):  # another user's
        try:
            os.kill(owner.pid, 0)  # signal 0 only asks whether the process is there
        except ProcessLookupError:
            return True
    start = process_start(owner.pid)
    return start is not None and owner.process_start not in (0, start)


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (proc(5), field 22), on macOS in
    seconds since 1970; -1 for a zombie, None if the system does not say."""
    if sys.platform == "darwin":
        return macos.process_start(pid)
    fields = _about(pid)
    return None if not fields else -1 if fields[0] in "ZX" else int(fields[19])


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds that a process and its ended children have used; 0 if the system does
    not say, or the process is gone."""
    return _seconds_used(_about(pid))


def family_seconds() -> float:
    """Return the CPU seconds that this process and all that it began, directly or not, have used,
    whether ended or alive, such as a compiler's workers; only those that ended where the system
    lists no children (Linux does, unless it was built without)."""
    family = [os.getpid()]
    for parent in family:  # which grows meanwhile
        family += _children(parent)
    return sum(os.times()[:4]) + sum(map(processor_seconds, family[1:]))


def _children(pid: int) -> list[int]:
    """Return the process ids of a process's living children, whichever of its threads began
    them."""
    threads: list[str] = []
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    lists = [_read_text(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    return [int(child) for each in lists for child in each.split()]


def is_stopped(pid: int) -> bool:
    """Return True if a process is suspended by a signal such as SIGSTOP; False if there is no
    /proc."""
    return any(state in "Tt" for state in _about(pid)[:1])


def _about(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process's name, which may hold blanks:
    its state first (proc(5), from field 3 on). Empty if the system does not say."""
    return _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _seconds_used(about: list[str]) -> float:
    """Return the CPU seconds of a process and its ended children, from its fields as `_about` gives
    them."""
    return sum(map(int, about[11:15])) / os.sysconf("SC_CLK_TCK")


@cache
def _own_start(pid: int) -> int:
    return process_start(pid) or 0


def _boot_id() -> str:
    if sys.platform == "darwin":
        return macos.sysctl("kern.bootsessionuuid")
    return _read_text("/proc/sys/kernel/random/boot_id")


def _read_text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""
