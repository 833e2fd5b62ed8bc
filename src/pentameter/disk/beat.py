"""A thread with which a process shows that it lives, or looks whether another one does."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Beat:
    """Background thread that repeats a call: it calls `turn` again and again, with a pause of
    `seconds` before each call, until `turn` returns False or this object is closed. It is a daemon:
    it keeps no process alive."""

    def __init__(self, turn: Callable[[], bool | None], seconds: float) -> None:
        self._turn, self._seconds = turn, seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds) and self._turn() is not False:
            pass

    def close(self, most_seconds: float | None = None) -> None:
        """Stop the calls, and wait until the thread has ended: at most `most_seconds`, or, if that
        is None, as long as a call that is running takes."""
        self._closing.set()
        self._thread.join(most_seconds)
