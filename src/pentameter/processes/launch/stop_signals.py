"""The signals that ask a run to stop, and how they are handled outside of training.

This file imports almost nothing, so that the command can handle signals before imports that take
seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType

from pentameter.errors import InterruptedRunError
from pentameter.processes.group.rank import LAUNCH_FOLDER

Handler = Callable[[int, FrameType | None], object]
"""A function that is called with a signal's number and the interrupted frame."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to stop: from a person, a scheduler, or a terminal that closes."""


def minded_stop_signals() -> list[signal.Signals]:
    """Return the STOP_SIGNALS that this process should handle: all but those that it was told to
    ignore when it was started, such as SIGHUP under `nohup`."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Context manager: call each of `handlers` with signal number and frame on its signal while the
    block runs, and restore the earlier ones afterwards. Main thread only."""
    previous = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def handling_stop_signals(handler: Handler) -> AbstractContextManager[None]:
    """Return `handling` of all stop signals by `handler`. Signals that this process was started to
    ignore stay ignored."""
    return handling(dict.fromkeys(minded_stop_signals(), handler))


def handling_suspension(handler: Callable[[bool], None]) -> AbstractContextManager[None]:
    """Return a context manager for a process that a launcher started. Inside, `handler` is called
    with True when the launcher asks for a pause (SIGTSTP, on Ctrl-Z), and with False when the
    process goes on (SIGCONT). In any other process SIGTSTP suspends at once, as by default. Main
    thread only."""
    if LAUNCH_FOLDER not in os.environ:
        return nullcontext()
    pause, go_on = (lambda number, frame: handler(True)), (lambda number, frame: handler(False))
    return handling({signal.SIGTSTP: pause, signal.SIGCONT: go_on})


def stop_at_once() -> None:
    """From now on, exit with code 75 on a stop signal, without saving. A launcher with workers and
    a training run replace this by handlers that save first."""
    for number in minded_stop_signals():
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    # An import that is under way could swallow an exception.
    if os.environ.get("RANK", "0") == "0":
        said = f"stopped by {signal.Signals(number).name}"
        with suppress(OSError):  # nobody reads it
            os.write(
                2, f"pentameter: {said} outside of training; the same command goes on\n".encode()
            )
    os._exit(InterruptedRunError.exit_code)
