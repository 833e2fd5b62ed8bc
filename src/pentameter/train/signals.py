"""Stop signals: the first ends a run between two steps, once it is saved; the second ends it at
once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Self

from pentameter.errors import InterruptedRunError
from pentameter.processes.stop_signals import handling_stop_signals
from pentameter.processes.world import World

PROMPT_SECONDS = 2.0
"""Seconds within which ranks ask each other for signals again, if they need not ask at each step.
A step that takes longer ends first."""

_HAS_WORD, _SIGNALS_FROM = 1, 2  # codes between ranks (0: nothing): a reason, a signal's number + 2


class _StopNow(BaseException):
    """The error that a signal handler raises, with the signal's name. It is not an Exception, so
    that no library's catch-all swallows it. On other ranks a collective may raise it."""


class StopSignals:
    """The handler for STOP_SIGNALS while entered: the first asks to stop, the next exits with code
    75.

    While `nothing_to_lose` is true (preparing data, loading, compiling) the stop is immediate and
    leaves the block as InterruptedRunError. Afterwards the signal's name is in `received`, and the
    loop stops after the current step, once all ranks know (`agree`). The second signal may exit
    safely at any moment: the commit protocol guarantees that checkpoints on disk are complete.
    Python delivers signals only to the main thread; in another thread this class does nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.agreed: str | None = None
        self.nothing_to_lose = True
        self.steps_unasked = 1
        """Number of steps that take PROMPT_SECONDS, the same on every rank, since a step's time
        was passed to `agree`."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._stack.enter_context(handling_stop_signals(self._on_signal))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        if isinstance(error, _StopNow):
            raise InterruptedRunError(
                f"stopped by {error} before the first step; the same command starts again",
                agreed=False,
            ) from None

    def agree(
        self, world: World, word: str | None = None, *, step_seconds: float = PROMPT_SECONDS
    ) -> str | None:
        """Return the reason to stop, the same on every rank; None to go on.

        A signal that any rank received is in `agreed` afterwards, and comes before any rank's own
        `word`. The slowest rank's `step_seconds` decide `steps_unasked`. Collective.
        """
        number = signal.Signals[self.received].value + _SIGNALS_FROM if self.received else 0
        code = number or (_HAS_WORD if word is not None else 0)
        most, nanoseconds = world.all_reduce_maxima(code, max(1, round(1e9 * step_seconds)))
        self.steps_unasked = max(1, int(1e9 * PROMPT_SECONDS) // nanoseconds)
        if most == _HAS_WORD:
            return next(other for other in world.all_gather(word) if other is not None)
        if most:
            self.agreed = signal.Signals(most - _SIGNALS_FROM).name
        return self.agreed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(InterruptedRunError.exit_code)
        self.received = signal.Signals(number).name
        if self.nothing_to_lose:
            raise _StopNow(self.received)
