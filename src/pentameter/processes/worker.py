"""A worker's duties to its launcher: print stacks on request, and end when its parent is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache
from pathlib import Path

from pentameter.machine.child import LIFELINE, end_with_parent
from pentameter.processes.place import LAUNCH_FOLDER
from pentameter.processes.progress import write_stacks_when_asked

ORPHAN_SECONDS = 25
"""Seconds that a worker whose torchrun agent is gone has to save and exit."""

_PARENT_POLL_SECONDS = 1.0


def watch_launcher() -> None:
    """From now on, end this process and its children when `--nproc`'s launcher is gone, and write
    all stacks to a file on the launcher's STACKS_SIGNAL."""
    if LIFELINE not in os.environ:
        return  # this is not a worker, though a worker may have started it
    end_with_parent()
    write_stacks_when_asked(Path(os.environ[LAUNCH_FOLDER]), int(os.environ["RANK"]))


@cache  # once per process is enough
def watch_agent() -> None:
    """From now on, stop this process, as SIGTERM does, when its parent is gone. A torchrun agent
    that was killed leaves its workers behind; they would train on, and no agent would restart them.
    After ORPHAN_SECONDS a process that is still there is ended."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    signal.alarm(ORPHAN_SECONDS)  # the kernel's timer, since a hang may leave Python no turn
    os.kill(os.getpid(), signal.SIGTERM)
