"""Facts of a Mac and its processes, asked of macOS by commands, as it has no /proc."""

from __future__ import annotations

import calendar
import os
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from typing import Self

from pentameter.disk.beat import Beat
from pentameter.disk.commands import said_by

_LOOK_SECONDS = 0.1


@cache
def sysctl(name: str) -> str:
    """Return the output of `sysctl -n NAME`, asked once in a process; empty if there is none, as on
    another system. Values that are asked for do not change while a Mac runs."""
    return said_by("sysctl", "-n", name)


def chip() -> str:
    """Return the name of a Mac's chip, `Apple M3 Pro`; empty on another system."""
    return sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else ""


def process_start(pid: int) -> int | None:
    """Return when a process started, in seconds since 1970; -1 for a zombie, None if unknown."""
    # Two options: BSD's takes all that follows "=" for the heading.
    said = said_by("ps", "-o", "state=", "-o", "lstart=", "-p", str(pid))
    state, _, started = said.partition(" ")
    if state.startswith("Z"):
        return -1
    try:
        return calendar.timegm(time.strptime(" ".join(started.split()), "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return None


class MemoryBound:
    """Context manager that kills the process `pid` once it uses more than `most_bytes` of memory;
    it looks ten times a second. It stands in for RLIMIT_AS, which macOS refuses; on other systems
    it does nothing."""

    def __init__(self, pid: int, most_bytes: int) -> None:
        self.is_exceeded = False
        self._pid, self._most_bytes = pid, most_bytes
        self._beat: Beat | None = None

    def __enter__(self) -> Self:
        if sys.platform == "darwin":
            self._beat = Beat(self._look, _LOOK_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._beat is not None:
            self._beat.close()

    def _look(self) -> bool:
        resident = said_by("ps", "-o", "rss=", "-p", str(self._pid))  # in KiB
        if resident.isdecimal() and int(resident) * 1024 > self._most_bytes:
            self.is_exceeded = True
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        return not self.is_exceeded
