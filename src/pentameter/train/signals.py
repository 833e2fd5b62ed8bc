"""Stop signals (SIGTERM, SIGINT, SIGUSR1, SIGHUP): the first ends a run between two steps, once it
is saved; the second ends the process at once. A launcher's request for a pause is heeded there,
too: where no rank waits for another, it may last longer than `parallel.timeout_seconds`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Self

from pentameter.errors import InterruptedRunError
from pentameter.processes.group.world import World
from pentameter.processes.launch.stop_signals import handling_stop_signals, handling_suspension

PROMPT_SECONDS = 2.0
"""Seconds of steps after which ranks compare stop signals again, if they need not at each step. A
step that takes longer ends first."""

SETTLE_SECONDS = 0.2
"""Seconds from the ranks' agreement on a pause until it begins. By then, messages under way have
left each rank, and the request has reached all of them."""

_HAS_WORD, _SIGNALS_FROM = 1, 2  # codes between ranks (0: nothing): a reason, a signal's number + 2


class _StopNow(BaseException):
    """Raised in the main thread by the signal handler, with the signal's name, to end the program's
    block at once. It derives from BaseException, so that no library's `except Exception` swallows
    it."""


class StopSignals:
    """Context manager that handles STOP_SIGNALS: the first asks the run to stop, the second exits
    with code 75.

    While `nothing_to_lose` is true (preparing data, loading, compiling), the first signal ends the
    block at once with InterruptedRunError. Otherwise `received` becomes its name, and the loop
    stops after the current step, once all ranks know (`agree`). The second may exit at any moment:
    checkpoints on disk are always complete.

    Python delivers signals only to the main thread; in another thread this class does nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.agreed: str | None = None
        self.nothing_to_lose = True
        self.maxima: Sequence[int] = ()
        """The maximum over all ranks of each number in `beside` at the latest `agree`."""
        self.steps_unasked = 1
        """Number of steps that may pass before the next `agree`, about PROMPT_SECONDS long; the
        same on every rank. 1 until a step's time is known."""
        self._is_pausing = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._stack.enter_context(handling_stop_signals(self._on_signal))
            self._stack.enter_context(handling_suspension(self._on_suspension))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        if isinstance(error, _StopNow):
            raise InterruptedRunError(
                f"stopped by {error} before the first step; the same command starts again",
                agreed=False,
            ) from None

    def agree(
        self,
        world: World,
        word: str | None = None,
        *,
        step_seconds: float = PROMPT_SECONDS,
        beside: Sequence[int] = (),
    ) -> str | None:
        """Return the reason to stop, the same on every rank, or None to go on. Collective. If a
        launcher asked any rank to pause, all ranks pause here first.

        word: a hook's reason to stop, which may differ between ranks. A signal that any rank
            received has precedence; its name is then in `agreed`.
        step_seconds: this rank's latest step time; the slowest rank's sets `steps_unasked`.
        beside: numbers sent in the same message, as many on each rank, for `maxima`.
        """
        number = signal.Signals[self.received].value + _SIGNALS_FROM if self.received else 0
        code = number or (_HAS_WORD if word is not None else 0)
        most, nanoseconds, pauses, *self.maxima = world.all_reduce_maxima(
            code, max(1, round(1e9 * step_seconds)), int(self._is_pausing), *beside
        )
        if pauses:
            self._pause()
        self.steps_unasked = max(1, int(1e9 * PROMPT_SECONDS) // nanoseconds)
        if most == _HAS_WORD:
            return world.first(word)
        if most:
            self.agreed = signal.Signals(most - _SIGNALS_FROM).name
        return self.agreed

    def _on_suspension(self, is_asked: bool) -> None:
        self._is_pausing = is_asked

    def _pause(self) -> None:
        time.sleep(SETTLE_SECONDS)
        if self._is_pausing:  # else the launcher has gone on meanwhile
            os.kill(os.getpid(), signal.SIGSTOP)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(InterruptedRunError.exit_code)
        self.received = signal.Signals(number).name
        if self.nothing_to_lose:
            raise _StopNow(self.received)
