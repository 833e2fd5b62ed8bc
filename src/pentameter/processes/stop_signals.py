"""The signals that ask a run to stop, and what they do before anything can be lost.

This file loads almost nothing, so that the command can mind them before it imports what takes
seconds.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from pentameter.errors import InterruptedRunError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to stop: from a person, a scheduler, a terminal that closes."""


def minded_stop_signals() -> list[signal.Signals]:
    """STOP_SIGNALS without those that this process was started to ignore, as `nohup` does."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def stop_at_once() -> None:
    """From now on, end this process with exit code 75 at a stop signal, until somebody else minds
    them: a launcher its workers', a training its own, which it saves first."""
    for number in minded_stop_signals():
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    # An exception could be swallowed by what is being imported.
    if os.environ.get("RANK", "0") == "0":
        said = f"stopped by {signal.Signals(number).name}"
        os.write(2, f"pentameter: {said} outside of training; the same command goes on\n".encode())
    os._exit(InterruptedRunError.exit_code)
