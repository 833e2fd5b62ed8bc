"""The time that a run may take, and how much of it is left."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from pentameter.errors import ConfigError
from pentameter.machine.cores_and_memory import seconds_running

SECONDS = {"h": 3600, "m": 60, "s": 1}
LONGEST_SECONDS = 366 * 86_400


def parse_time(text: str) -> float:
    """Return `90s`, `30m`, `2h` or `1h30m` in seconds. Raises ConfigError for another form."""
    found = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.strip().lower())
    if not text.strip() or found is None:
        raise ConfigError(
            f"--time {text!r} is no duration; write hours, minutes and seconds, as 90s, 30m, 2h or "
            "1h30m"
        )
    seconds = sum(
        int(n or 0) * each for n, each in zip(found.groups(), SECONDS.values(), strict=True)
    )
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigError(f"--time {text!r} must be between one second and a year")
    return float(seconds)


def process_start() -> float:
    """Return the moment of the monotonic clock, in seconds, at which this process was started."""
    return time.perf_counter() - seconds_running()


CLOSING_SECONDS = 4.0
"""CPU seconds for the last checkpoint, a sample and the report."""
MOST_WAITING = 5.0
"""Largest ratio of elapsed to CPU time assumed for the work after the last evaluation."""


@dataclass(frozen=True)
class TimeBudget:
    """The time for a run: `seconds`, counted from `started`, a moment in seconds on the monotonic
    clock. `before` are those that a shorter run had, with which this one goes on."""

    seconds: float
    started: float
    before: float = 0.0

    @property
    def asked(self) -> float:
        """Seconds that were asked for."""
        return self.before + self.seconds

    @property
    def used(self) -> float:
        """Seconds since the budget began."""
        return time.perf_counter() - self.started

    @property
    def closing_seconds(self) -> float:
        """Seconds expected from the last evaluation to the end of the process: CLOSING_SECONDS,
        times this process's ratio of elapsed to CPU time so far (from 1 to MOST_WAITING), as on a
        busy machine everything takes longer."""
        waiting = self.used / max(sum(os.times()[:4]), 1e-3)
        return CLOSING_SECONDS * min(MOST_WAITING, max(1.0, waiting))

    @property
    def left(self) -> float:
        """Seconds until the budget is used up; negative after that."""
        return self.seconds - self.used
