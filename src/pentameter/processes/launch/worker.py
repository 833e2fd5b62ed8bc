"""Threads and handlers of a worker process, for its launcher: print stacks on request, and end when
the parent is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pentameter.machine.child import LIFELINE, end_with_parent
from pentameter.processes.failures.activity import write_stacks_when_asked
from pentameter.processes.group.rank import LAUNCH_FOLDER
from pentameter.processes.launch.stop_signals import stop_at_once

ORPHAN_SECONDS = 25
"""Seconds in which a worker whose torchrun agent is gone may save and exit before it is killed."""

_PARENT_POLL_SECONDS = 1.0


def watch_launcher() -> None:
    """From now on, end this process and those it started when `--nproc`'s launcher is gone, and
    write all stacks to a file on the launcher's signal. A worker of torchrun, also one alone, ends
    with its agent (`watch_agent`). In any other process this does nothing."""
    if {"RANK", "TORCHELASTIC_RUN_ID"} <= os.environ.keys():
        watch_agent()
    if LIFELINE not in os.environ:
        return  # this is not a worker, though a worker may have started it
    end_with_parent()
    write_stacks_when_asked(Path(os.environ[LAUNCH_FOLDER]), int(os.environ["RANK"]))


def become_rank(environment: Mapping[str, str]) -> None:
    """Make this process the rank that the environment variables in `environment` describe; they
    replace its present ones. For a process just forked from a server. From then on stop signals end
    it with exit code 75, and on the launcher's signal it writes the stacks of all threads to a
    file."""
    stop_at_once()
    os.environ.clear()
    os.environ.update(environment)
    write_stacks_when_asked(Path(environment[LAUNCH_FOLDER]), int(environment["RANK"]))


@cache  # once per process is enough
def watch_agent() -> None:
    """From now on, send this process SIGTERM when its parent is gone, and kill it ORPHAN_SECONDS
    later if it still runs.

    A torchrun agent that was killed leaves its workers behind; they would train on, and no agent
    would restart them.
    """
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    signal.alarm(ORPHAN_SECONDS)  # the kernel's timer, since a hang may leave Python no turn
    os.kill(os.getpid(), signal.SIGTERM)
