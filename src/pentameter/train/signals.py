"""Stop signals: the first ends a run between two steps, once it is saved; a second one at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from pentameter.errors import InterruptedRunError
from pentameter.processes.stop_signals import minded_stop_signals
from pentameter.processes.world import World

_HAS_WORD, _SIGNALS_FROM = 1, 2  # what processes tell each other: nothing, a word, a signal


class _StopNow(BaseException):
    """The error that a signal's handler raises, with the signal's name; not an Exception, so that
    no library's catch-all swallows it. A collective call may raise it in the other processes."""


class StopSignals:
    """The handler of STOP_SIGNALS while entered: the first is a request to stop, the next exits 75.

    While `nothing_to_lose` is true (preparing data, loading, compiling) the stop is immediate and
    leaves the block as InterruptedRunError. Afterwards the signal's name is in `received`, and
    the loop stops after the current step, once all processes know of it (`agree`). The second
    signal's exit is safe at any moment: the commit protocol of checkpoints guarantees that what
    is on disk is whole. Python delivers signals only to the main thread; elsewhere this does
    nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.agreed: str | None = None
        self.nothing_to_lose = True
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in minded_stop_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if isinstance(error, _StopNow):
            raise InterruptedRunError(
                f"stopped by {error} before the first step; the same command starts again",
                agreed=False,
            ) from None

    def agree(self, world: World, word: str | None = None) -> str | None:
        """The reason to stop, the same in every process of the world; None to go on.

        A signal that any process received is in `agreed` afterwards, and comes before any
        process's own `word`. Collective.
        """
        number = signal.Signals[self.received].value + _SIGNALS_FROM if self.received else 0
        most = world.all_reduce_max(number or (_HAS_WORD if word is not None else 0))
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
