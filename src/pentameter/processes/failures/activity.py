"""Records of what each process does, for messages and for the launcher of `--nproc`. A process
notes every action (training, saving, …) that it begins, and writes its stacks on request. From
these notes the launcher sees when no process goes on, and requests the stacks of those that
hang."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pentameter.disk.record import read_record
from pentameter.processes.failures.waiting import Naming

LEAST_TIMEOUT_SECONDS = 30.0
"""Least timeout of an action: so long without a note never counts as a hang."""

STARTING = "starting"

STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a worker writes the stacks of all its threads to its file in the launch
folder."""

_TIMES_THE_LONGEST = 3  # limit for a step, a save, …, in times of the longest before
_RECORD_BYTES = 256  # one write, so that a reader sees the old record or the new one
_REARM_SECONDS = 1.0  # a timer's thread costs some 50 µs, which a small step would feel
_STACKS_SECONDS = 2.0
_INNERMOST_FRAMES = 4
_WAITS_FOR_OTHERS = ("torch/distributed/", "torch/autograd/", "pentameter/processes/group/world.py")


@dataclass(frozen=True)
class Note:
    """A process's present action, as a launcher reads it: the action's name (`training`, `saving`),
    the step, and the seconds after which it counts as hung."""

    doing: str = STARTING
    step: int = 0
    timeout_seconds: float = LEAST_TIMEOUT_SECONDS
    """Longest time that the action may take before it counts as a hang."""
    since: float = 0.0
    """Time at which the action began: seconds on the monotonic clock of the process itself."""

    def __str__(self) -> str:
        if self.doing == STARTING:
            return "while starting"
        return f"in step {self.step} ({self.doing})"


class Activity:
    """Records this process's latest Note (its action, step and timeout), and writes it to the file
    `path`, if given, so that the launcher can tell a hung process.

    timeout_seconds: limit for an action that was never timed before. Later ones get 3 times the
        longest time that an action of this name took, at least LEAST_TIMEOUT_SECONDS.
    dump_stacks: True to print the stacks of all threads on stderr if nothing was noted for
        `timeout_seconds`.
    """

    def __init__(
        self,
        path: Path | None = None,
        timeout_seconds: float = LEAST_TIMEOUT_SECONDS,
        *,
        dump_stacks: bool = False,
    ) -> None:
        self.latest = Note(since=time.monotonic())
        self.naming = Naming()
        self._timeout_seconds = timeout_seconds
        self._longest: dict[str, float] = {}  # seconds, by action
        self._is_timed = False
        self._dump_stacks = dump_stacks and sys.__stderr__ is not None  # it may be closed
        self._armed_at = -_REARM_SECONDS
        self._fd = -1
        if path is not None:
            with suppress(OSError):  # a full disk: the launcher does without
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, doing: str, step: int, *, nothing_to_lose: bool = False) -> None:
        """Record that this process begins the action `doing` (training, saving, …) in `step`. The
        action before it ends with this call, and its duration sets the timeout of later ones of
        that name.

        nothing_to_lose: True for an action of unusual length that loses nothing if it is killed,
            such as a first step, which compiles. Its timeout is LEAST_TIMEOUT_SECONDS unless one of
            its name was timed before, and its own duration is not kept.
        """
        before, now = self.latest, time.monotonic()
        if self._is_timed:
            self.took(before.doing, now - before.since)
        self._is_timed = not nothing_to_lose
        timeout = LEAST_TIMEOUT_SECONDS if nothing_to_lose else self._timeout_seconds
        if doing in self._longest:
            timeout = max(LEAST_TIMEOUT_SECONDS, _TIMES_THE_LONGEST * self._longest[doing])
        self.latest = Note(doing, step, timeout, now)
        if self._fd >= 0:
            record = json.dumps(asdict(self.latest)).encode().ljust(_RECORD_BYTES)
            with suppress(OSError):
                os.pwrite(self._fd, record, 0)
        if self._dump_stacks and now - self._armed_at > _REARM_SECONDS:
            self._armed_at = now
            assert sys.__stderr__ is not None
            faulthandler.dump_traceback_later(self._timeout_seconds, file=sys.__stderr__)

    def took(self, doing: str, seconds: float) -> None:
        """Record that an action named `doing` took `seconds`, which sets the timeout of later ones.
        `note` does so by itself for actions that follow one another; call this for one that ran at
        the same time as others, such as a save while training goes on."""
        self._longest[doing] = max(self._longest.get(doing, 0.0), seconds)

    def close(self) -> None:
        """Stop printing stacks, and close the file; later notes are kept in memory only."""
        if self._dump_stacks:
            faulthandler.cancel_dump_traceback_later()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def activity_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in the launch folder to which `rank` writes its latest Note."""
    return folder / f"activity-{rank}"


def read_activity(folder: Path, rank: int) -> Note:
    """Return the latest Note that `rank` wrote to the launch folder. If there is none, return a
    Note that says that it is starting."""
    return read_record(activity_path(folder, rank), Note) or Note()


class Watchdog:
    """The launcher's record of how long each worker process has reported no new action. `folder` is
    the launch folder, to which the workers write their actions (Note).

    Times are on the launcher's clock, from the moment at which it saw a note change; workers'
    clocks play no role.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, tuple[Note, float]] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Read the notes of `ranks`, and record the current time for each rank whose note has
        changed."""
        for rank in ranks:
            note = read_activity(self._folder, rank)
            if rank not in self._seen or self._seen[rank][0] != note:
                self._seen[rank] = note, time.monotonic()

    def timed_out(self, ranks: Iterable[int], start: float) -> bool:
        """Return True if every one of `ranks` has exceeded its latest note's timeout, counted from
        the note or from `start` (monotonic seconds), whichever is later. Call `look` first."""
        now = time.monotonic()
        return all(
            now > max(start, seen) + note.timeout_seconds
            for note, seen in (self._seen[rank] for rank in ranks)
        )

    def of(self, rank: int) -> str:
        """Return a worker's latest action in words: `in step 17 (training)`."""
        return str(self._seen[rank][0])


def write_stacks_when_asked(folder: Path, rank: int) -> None:
    """From now on, on STACKS_SIGNAL, write the stacks of all threads in this process to its file in
    the launch folder."""
    path = _stacks_path(folder, rank)
    with suppress(OSError):  # a full disk: the launcher does without
        stacks = path.with_name(f"{path.name}.new").open("wb", buffering=0)
        faulthandler.register(STACKS_SIGNAL, file=stacks)  # it keeps the file open
        os.rename(stacks.name, path)  # from now on the launcher may send the signal


def _stacks_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in the launch folder to which `rank` writes its stacks. It is
    absent until the rank handles the signal."""
    return folder / f"stacks-{rank}"


def stacks(folder: Path, pids: dict[int, int]) -> dict[int, str]:
    """Ask running processes for all their threads' stacks, and return rank → stacks as text, in
    faulthandler's format.

    folder: the launch folder, in which each process writes its stacks to a file on STACKS_SIGNAL.
    pids: rank → process id.

    This takes at most 2 s. A suspended process is resumed, since it could not write otherwise. A
    rank is missing from the result if it does not handle the signal yet, or has not written by
    then.
    """
    ready = [rank for rank in pids if _stacks_path(folder, rank).exists()]
    for rank in ready:
        with suppress(ProcessLookupError):
            os.kill(pids[rank], STACKS_SIGNAL)
            os.kill(pids[rank], signal.SIGCONT)  # the stacks come first: the signal is pending
    deadline = time.monotonic() + _STACKS_SECONDS
    found: dict[int, str] = {}
    while len(found) < len(ready) and time.monotonic() < deadline:
        time.sleep(0.05)  # also until a half-written file is complete
        for rank in ready:
            with suppress(OSError):
                if text := _stacks_path(folder, rank).read_text(encoding="utf-8", errors="replace"):
                    found[rank] = text
    return found


def culprits(ranks: Collection[int], shown: dict[int, str]) -> list[int]:
    """Return those of `ranks` for which the other ranks seem to wait, judged by stack traces.
    `shown` maps a rank to its stacks as text, as `stacks` returns them.

    They are the ranks that gave no stacks. If all gave some, they are the ranks whose innermost
    frames are outside torch.distributed, autograd and `World`, the code in which a rank waits for
    others. If there are none of these either, all ranks are returned.
    """
    mute = [rank for rank in ranks if rank not in shown]
    at_work = []
    for rank in ranks:
        # The oldest thread comes last; the signal may interrupt another one.
        text = shown.get(rank, "")
        main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
        frames = re.findall(r'File "([^"]*)"', main)[:_INNERMOST_FRAMES]
        if not any(part in frame for frame in frames for part in _WAITS_FOR_OTHERS):
            at_work.append(rank)
    return mute or at_work or list(ranks)
