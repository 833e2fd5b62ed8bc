"""Another system than Linux, simulated: its files and names are hidden, and this package's modules
believe that they run on an Apple-Silicon Mac. As `sitecustomize` on PYTHONPATH it is in every
interpreter of a command; a shell script stands for `sysctl`.

What only a Mac does itself (its scheduler, its file systems, its GPU, fork after Objective-C) is
not simulated.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import platform
import resource
import select
import signal
import sys
import time
import types
from functools import wraps
from typing import Any

HIDDEN = ("/proc", "/sys")
ABSENT = {
    os: (
        "sched_getaffinity", "sched_setaffinity", "pidfd_open", "posix_fallocate", "memfd_create",
        "eventfd", "copy_file_range", "process_cpu_count", "splice",
    ),
    time: ("CLOCK_BOOTTIME",),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX"),
}  # fmt: skip


def _hiding(function: Any) -> Any:
    @wraps(function)
    def found(path: Any = ".", *rest: Any, **named: Any) -> Any:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if name.startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", name)
        return function(path, *rest, **named)

    return found


class _System(types.ModuleType):
    """A module as this package's modules see it."""

    def __init__(self, real: types.ModuleType, **other: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _other=other)

    def __getattr__(self, name: str) -> Any:
        return self._other[name] if name in self._other else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "pentameter" or path is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for each, system in _SYSTEMS.items():
                if each in vars(module):
                    vars(module)[each] = system

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _no_bound(kind: int, limits: Any) -> None:
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")  # as macOS says
    _SETRLIMIT(kind, limits)


_SYSTEMS = {
    "sys": _System(sys, platform="darwin"),
    "platform": _System(platform, machine=lambda: "arm64", processor=lambda: "arm"),
}
_SETRLIMIT = resource.setrlimit

if __name__ == "sitecustomize":
    for module, names in ABSENT.items():
        for each in names:
            if hasattr(module, each):
                delattr(module, each)
    for name in ("open", "readlink", "stat", "lstat", "listdir", "scandir"):
        setattr(os, name, _hiding(getattr(os, name)))
    io.open = builtins.open = _hiding(io.open)
    resource.setrlimit = _no_bound
    sys.meta_path.insert(0, _Finder)
