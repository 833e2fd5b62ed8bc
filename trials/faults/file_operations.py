"""Acts before each file-system operation of this process: to count, to fail, or to die there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

CHANGES = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
OPERATIONS = ("open", "close", *CHANGES)


def act_before_each(patch: pytest.MonkeyPatch, act: Callable[[str, tuple], None]) -> None:
    """Call `act(operation, arguments)` before each file-system operation, until `patch` is undone.
    What it raises is what the operation raises."""
    real = {name: getattr(os, name) for name in OPERATIONS}
    for name in OPERATIONS:

        def wrapped(*arguments, _name=name, _real=real[name], **keywords):
            if _name == "close":  # a failing close has closed
                _real(*arguments)
            act(_name, arguments)
            return None if _name == "close" else _real(*arguments, **keywords)

        patch.setattr(os, name, wrapped)


@contextmanager
def before_each(act: Callable[[str, tuple], None]) -> Iterator[None]:
    """Call `act(operation, arguments)` before each file-system operation of the body."""
    with pytest.MonkeyPatch.context() as patch:
        act_before_each(patch, act)
        yield


class DieAt:
    """An act that kills this process before its n-th operation, or in the middle of it if a write;
    n = 0 never."""

    def __init__(self, n: int) -> None:
        self.n, self.n_seen = n, 0
        self._write = os.write

    def __call__(self, name: str, arguments: tuple) -> None:
        self.n_seen += 1
        if self.n_seen == self.n:
            if name == "write":
                self._write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
