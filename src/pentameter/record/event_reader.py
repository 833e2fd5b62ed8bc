"""A run's events, read from metrics.jsonl all at once, or step by step as the file grows."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from io import BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pentameter.disk.atomic import MissingFileError, open_regular
from pentameter.errors import CorruptError
from pentameter.record.events import (
    EvalMetrics,
    Event,
    ExpertMetrics,
    OtherEvent,
    RunEnd,
    RunStart,
    StepMetrics,
    read_line,
)

E = TypeVar("E", bound=Event)

SESSION = "session"
"""Key under which starts, resumes and ends are kept together, in one list."""
MOST_BYTES = 2**29
"""Largest metrics.jsonl that is read all at once: well over a million lines."""
LONGEST_LINE_BYTES = 2**20
MOST_UNREADABLE = 100_000
"""If metrics.jsonl has more lines than this that are no events, it is taken for another kind of
file."""
MOST_EVENTS = 4000
"""Most events of a kind kept while following a run. Beyond, half are dropped, but neither the
highest nor the lowest loss."""
READ_BYTES = 2**25
"""Most bytes that one update reads, so that a page of a long run need not wait."""
CHECKED_BYTES = 64
"""Number of bytes before the read offset that are compared to detect that the file was rewound."""


def read_events(folder: Path) -> EventReader:
    """Read all events in `folder`/metrics.jsonl; none if it is missing. Raises StorageError."""
    events = EventReader(folder, follows=False)
    while events.update() and events.has_more:
        pass
    return events


class EventReader:
    """Reads the events in `folder`/metrics.jsonl; each `update` reads only new bytes.

    follows: True for a page that follows a run. At most MOST_EVENTS per kind are then kept, and a
        last line without a newline waits until it is complete. Otherwise all events are kept, and
        such a line is read as it is.
    """

    def __init__(self, folder: Path, *, follows: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self._follows = follows
        self.unread = ""
        """The reason that the file cannot be read; "" if it can."""
        self._forget()

    def _forget(self) -> None:
        self.has_more = False
        """True if the last update stopped at READ_BYTES, so that there may be more to read."""
        self._kept: dict[str, list[Any]] = {}
        self.n_unreadable = 0
        self._offset = 0  # complete lines up to here were read
        self._before = b""  # the last bytes before it
        self._inode = 0
        self._refused = -1  # inode of a file that is another kind of file
        self._skips = False  # inside a line that is too long

    def sessions(self) -> list[RunStart | RunEnd]:
        """Return the starts, resumes and ends of the run, in file order."""
        return self._kept.get(SESSION, [])

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of this `kind` that are kept, in the order of the file; for starts and
        ends use `sessions`."""
        return self._kept.get(kind.EVENT, [])

    def update(self) -> bool:
        """Read up to READ_BYTES more from the file; begin anew if it was rewound or replaced.
        Return True if anything changed. A damaged file is noted in `unread`. Raises
        StorageError."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino not in (self._inode, self._refused) or not self._goes_on(
                    file, status.st_size
                ):
                    self._forget()
                    self._inode = status.st_ino
                if status.st_ino == self._refused:
                    return False
                if not self._follows and status.st_size > MOST_BYTES:
                    raise CorruptError(
                        f"{self.path} has {status.st_size:,} bytes, and at most {MOST_BYTES:,} are "
                        "read"
                    )
                file.seek(self._offset)
                block = file.read(READ_BYTES)
                self.has_more = len(block) == READ_BYTES
                is_last = not (self._follows or self.has_more)
                changed = self._take(block + b"\n" if is_last else block)
        except MissingFileError:
            had = bool(self._offset)
            self._forget()
            return had
        except CorruptError as error:
            changed = self.unread != str(error)
            refused = self._inode
            self._forget()
            self.unread, self._refused = str(error), refused
            return changed
        self.unread = ""
        return changed

    def _goes_on(self, file: BufferedReader, n_bytes: int) -> bool:
        """Return True if the file (n_bytes long) still has the bytes that were read last, so that
        it only grew."""
        if n_bytes < self._offset:
            return False
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before)) == self._before

    def _take(self, block: bytes) -> bool:
        end = block.rfind(b"\n") + 1
        if not end and len(block) > LONGEST_LINE_BYTES:  # no end of a line: leave it out
            self.n_unreadable += not self._skips
            self._skips, end = True, len(block)
        elif end:
            lines = block[:end].split(b"\n")[:-1]
            for line in lines[1:] if self._skips else lines:
                self._add(line)
            self._skips = False
        self._offset += end
        self._before = (self._before + block[:end])[-CHECKED_BYTES:]
        return end > 0

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        event = read_line(line) if len(line) <= LONGEST_LINE_BYTES else None
        if event is None:
            self.n_unreadable += 1
            if self.n_unreadable > MOST_UNREADABLE:
                name = self.path.name
                raise CorruptError(f"{name} has over {MOST_UNREADABLE:,} unreadable lines")
            return
        if isinstance(event, OtherEvent):
            return
        is_session = isinstance(event, RunStart | RunEnd)
        kept = self._kept.setdefault(SESSION if is_session else event.EVENT, [])
        kept[_position(kept, event)] = [event]
        if self._follows and len(kept) > MOST_EVENTS:
            kept[:] = _thinned(kept)


def _position(kept: Sequence[Event], event: Event) -> slice:
    """Return the slice of `kept`, the events of one kind in the order of steps, that `event` is to
    replace: an event of the same step that says the same, or an empty slice where the event is to
    be inserted, which is usually the end. It may be elsewhere in files of an earlier version, where
    two processes could write events of one run in turns."""
    fields, step = event.ONCE, event.step
    if fields is None or not kept or not step <= kept[-1].step:
        return slice(len(kept), len(kept))
    end = bisect.bisect_right(kept, step, key=attrgetter("step"))
    for index in range(end - 1, -1, -1):
        if kept[index].step != step:
            break
        if all(getattr(event, name) == getattr(kept[index], name) for name in fields):
            return slice(index, index + 1)
    return slice(end, end)


def _thinned(events: Sequence[Any]) -> list[Any]:
    """Return about half the events (all of one kind). Of every four `train` events in a row, or
    `eval` events of one split, those with the lowest and the highest loss stay, so that no spike
    and no best is lost. Of `experts`, every second step stays; other kinds lose their older half.
    The first and the last event always stay, per split of `eval`, and all layers' of a step of
    `experts`."""
    if isinstance(events[0], ExpertMetrics):
        steps = list(dict.fromkeys(event.step for event in events))
        stay = {*steps[::2], steps[-1]}
        return [event for event in events if event.step in stay]
    if not isinstance(events[0], StepMetrics | EvalMetrics):
        return [events[0], *events[len(events) // 2 :]]
    curves: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        curves.setdefault(getattr(event, "split", ""), []).append(index)
    kept: set[int] = set()
    for curve in curves.values():
        kept |= {curve[0], curve[-1]}
        for first in range(1, len(curve) - 1, 4):
            four = curve[first : min(first + 4, len(curve) - 1)]
            order = sorted(four, key=lambda index: events[index].loss)
            kept |= {order[0], order[-1]}
    return [events[index] for index in sorted(kept)]
