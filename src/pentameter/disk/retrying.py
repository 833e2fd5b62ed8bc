"""Asking again after pauses that grow, while a failure may pass."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pentameter.disk.file_systems import is_passing
from pentameter.errors import PentameterError

Result = TypeVar("Result")


def growing(first: float, n: int | None = None, longest: float = math.inf) -> Iterator[float]:
    """Yield pauses in seconds: `first`, then each twice the one before, but at most `longest`.
    There are `n` of them; without end if `n` is None."""
    pause = first
    for _ in itertools.count() if n is None else range(n):
        yield pause
        pause = min(2 * pause, longest)


def _slept(error: Exception, pause: float) -> bool:
    time.sleep(pause)
    return True


def retried(
    ask: Callable[[], Result],
    pauses: Iterable[float],
    failed: Callable[[Exception, int], PentameterError],
    wait: Callable[[Exception, float], bool] = _slept,
    may_pass: Callable[[Exception], bool] = is_passing,
) -> Result:
    """Return the result of `ask()`. While it raises an error for which `may_pass` is True, it is
    called again after each of `pauses`, in seconds.

    When no pause is left, or `may_pass` or `wait` returns False, `failed(error, number of calls)`
    is raised. A PentameterError from `ask` is raised at once, as it is. wait: called with the error
    and the pause, it sleeps, and returns False to end the attempts.
    """
    for n_calls, pause in enumerate((*pauses, None), start=1):
        try:
            return ask()
        except PentameterError:
            raise
        except Exception as error:  # each kind of file system has errors of its own
            if pause is None or not may_pass(error) or not wait(error, pause):
                raise failed(error, n_calls) from error
    raise AssertionError("unreachable")
