"""Where each process is in its run, noted for those who wait for it: the launcher, and messages."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LEAST_PATIENCE_SECONDS = 30.0
"""Silence that is no sign of a hang, whatever the process does."""

STARTING = "starting"

_TIMES_THE_LONGEST = 3  # a step, a save, … may take so many times as long as the longest before
_RECORD_BYTES = 128  # one write, so that a reader sees the old record or the new one
_REARM_SECONDS = 1.0  # a timer's thread costs some 50 µs, which a small step would feel


@dataclass(frozen=True)
class Note:
    """One record: from when on (monotonic seconds, or a file's time), and how long it may last."""

    doing: str = STARTING
    step: int = 0
    patience_seconds: float = LEAST_PATIENCE_SECONDS
    since: float = 0.0

    def __str__(self) -> str:
        if self.doing == STARTING:
            return "while starting"
        return f"in step {self.step} ({self.doing})"


class Progress:
    """The latest Note of this process, in a file where somebody reads one.

    `patience_seconds` is how long something may take that was never timed.
    With `dump_stacks` all stacks go to stderr once nothing was noted for so long.
    """

    def __init__(
        self,
        path: Path | None = None,
        patience_seconds: float = LEAST_PATIENCE_SECONDS,
        *,
        dump_stacks: bool = False,
    ) -> None:
        self.latest = Note(since=time.monotonic())
        self._patience_seconds = patience_seconds
        self._longest: dict[str, float] = {}  # seconds, by what was done
        self._is_timed = False
        self._dump_stacks = dump_stacks and sys.__stderr__ is not None  # it may be closed
        self._armed_at = -_REARM_SECONDS
        self._fd = -1
        if path is not None:
            with suppress(OSError):  # a full disk: the launcher does without
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, doing: str, step: int, *, nothing_to_lose: bool = False) -> None:
        """Record that the process now does `doing` (training, saving, …) in `step`.

        With `nothing_to_lose` it may be ended after LEAST_PATIENCE_SECONDS, timed or not, and its
        time is no measure of later ones: a first step compiles.
        """
        before, now = self.latest, time.monotonic()
        if self._is_timed:
            longest = self._longest.get(before.doing, 0.0)
            self._longest[before.doing] = max(longest, now - before.since)
        self._is_timed = not nothing_to_lose
        patience = LEAST_PATIENCE_SECONDS if nothing_to_lose else self._patience_seconds
        if doing in self._longest:
            patience = max(LEAST_PATIENCE_SECONDS, _TIMES_THE_LONGEST * self._longest[doing])
        self.latest = Note(doing, step, patience, now)
        if self._fd >= 0:
            record = json.dumps([doing, step, patience]).encode().ljust(_RECORD_BYTES)
            with suppress(OSError):
                os.pwrite(self._fd, record, 0)
        if self._dump_stacks and now - self._armed_at > _REARM_SECONDS:
            self._armed_at = now
            assert sys.__stderr__ is not None
            faulthandler.dump_traceback_later(self._patience_seconds, file=sys.__stderr__)

    def close(self) -> None:
        """Note nothing any more."""
        if self._dump_stacks:
            faulthandler.cancel_dump_traceback_later()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def progress_path(folder: Path, rank: int) -> Path:
    """The record of the process `rank` in the folder of a launch."""
    return folder / f"progress-{rank}"


def read_progress(folder: Path, rank: int) -> Note:
    """The latest Note of the process `rank`; `since` is the file's time, 0 where there is none."""
    path = progress_path(folder, rank)
    try:
        since = path.stat().st_mtime
        doing, step, patience = json.loads(path.read_bytes())
        return Note(doing, step, patience, since)
    except (OSError, ValueError):
        return Note()
