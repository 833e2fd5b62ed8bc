"""A worker and what started it: its stacks when asked for, and its end when its parent is gone."""

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
"""Time that a worker whose torchrun agent is gone has to save and leave."""

_PARENT_POLL_SECONDS = 1.0


def watch_launcher() -> None:
    """From now on, end this process and what it started when `--nproc`'s launcher is gone, and
    write all stacks to a file at the launcher's STACKS_SIGNAL."""
    if LIFELINE not in os.environ:
        return  # this is not a worker, though it may be something that a worker started
    end_with_parent()
    write_stacks_when_asked(Path(os.environ[LAUNCH_FOLDER]), int(os.environ["RANK"]))


@cache  # once for a process is enough
def watch_agent() -> None:
    """From now on, stop this process, as SIGTERM does, when its parent is gone: an agent of
    torchrun that was killed leaves its workers behind, which would train on with nobody to start
    them again. What has not left after ORPHAN_SECONDS is ended."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    signal.alarm(ORPHAN_SECONDS)  # the kernel's, since a hang may leave Python no turn
    os.kill(os.getpid(), signal.SIGTERM)
