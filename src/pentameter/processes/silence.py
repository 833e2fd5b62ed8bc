"""Which workers of a launch have been silent for too long, and what each was doing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from pentameter.processes.progress import Note, read_progress
from pentameter.processes.worker import STACKS_SIGNAL, stacks_path

_STACKS_SECONDS = 2.0
_INNERMOST_FRAMES = 4
_WAITS_FOR_OTHERS = ("torch/distributed/", "torch/autograd/", "pentameter/processes/world.py")


class Silence:
    """Seen from the launcher: how long each worker has noted no progress.

    Times are the launcher's own, from when it saw a record change; workers' clocks play no part.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, tuple[Note, float]] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Note which records have changed since the last look."""
        for rank in ranks:
            note = read_progress(self._folder, rank)
            if rank not in self._seen or self._seen[rank][0] != note:
                self._seen[rank] = note, time.monotonic()

    def is_over(self, ranks: Iterable[int], start: float) -> bool:
        """Whether none of `ranks` has made progress for as long as it may take, counted from
        `start` (monotonic) at the earliest."""
        now = time.monotonic()
        return all(
            now > max(start, seen) + note.patience_seconds
            for note, seen in (self._seen[rank] for rank in ranks)
        )

    def place(self, rank: int) -> str:
        """Where a worker is: `in step 17 (training)`."""
        return str(self._seen[rank][0])


def stacks(folder: Path, pids: dict[int, int]) -> dict[int, str]:
    """Rank → the stacks of its process as text, where it could be asked and has answered."""
    ready = {rank: pid for rank, pid in pids.items() if stacks_path(folder, rank).exists()}
    for rank, pid in list(ready.items()):
        if is_stopped(pid):
            del ready[rank]
            continue
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_SECONDS
    found: dict[int, str] = {}
    while len(found) < len(ready) and time.monotonic() < deadline:
        time.sleep(0.05)  # also until a file that is being written is whole
        for rank in ready:
            with suppress(OSError):
                if text := stacks_path(folder, rank).read_text(encoding="utf-8", errors="replace"):
                    found[rank] = text
    return found


def culprits(ranks: Collection[int], shown: dict[int, str]) -> list[int]:
    """The ranks that others wait for: those that cannot answer, else those whose stack is not that
    of waiting, else all."""
    mute = [rank for rank in ranks if rank not in shown]
    at_work = [rank for rank, text in shown.items() if not _waits(text)]
    return mute or at_work or list(ranks)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP); False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _waits(stacks_text: str) -> bool:
    """Whether the main thread, which the signal interrupts, is in a call that waits for others."""
    main = stacks_text.rpartition("Current thread")[2]
    frames = re.findall(r'File "([^"]*)"', main)[:_INNERMOST_FRAMES]
    return any(part in frame for frame in frames for part in _WAITS_FOR_OTHERS)
