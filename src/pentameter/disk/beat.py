"""A thread with which a process shows that it lives, or looks whether another one does."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Beat:
    """A thread that calls `turn` again and again, `seconds` after the call before, until `turn`
    returns False or this object is closed. It keeps no process alive."""

    def __init__(self, turn: Callable[[], bool | None], seconds: float) -> None:
        self._turn, self._seconds = turn, seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds) and self._turn() is not False:
            pass

    def close(self, most_seconds: float | None = None) -> None:
        """End the thread, and wait for it, for `most_seconds` at most; None for as long as its last
        turn takes."""
        self._closing.set()
        self._thread.join(most_seconds)
