"""A run followed while it is written: only what is new in metrics.jsonl is read, and what is kept
of a run of any length is bounded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import MissingFileError, open_regular
from pentameter.errors import CorruptError
from pentameter.report.reading import (
    EVENTS,
    LONGEST_LINE_BYTES,
    MOST_UNREADABLE,
    event_of,
    number,
)

MOST_EVENTS = 4000
"""Events of a kind that are kept; of more, half are thinned out, and extremes stay."""
READ_BYTES = 2**25
"""Most that one update reads, so that a page is not kept waiting by a long run."""
CHECKED_BYTES = 64
"""Bytes before the place that was read up to, which tell whether the file was rewound."""


class FollowedEvents:
    """The events of `folder`/metrics.jsonl, brought up to date by `update`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.has_more = False
        """Whether the last update left something to the next one."""
        self.unread = ""
        """Why the file is left out; "" if it is not."""
        self._forget()

    def _forget(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.n_unreadable = 0
        self.n_read = 0
        """Events read so far; it begins anew where the file was rewound."""
        self._offset = 0  # complete lines up to here were read
        self._before = b""  # the last bytes before it
        self._inode = 0
        self._refused = -1  # inode of a file that is another kind of file
        self._skips = False  # inside a line that is too long

    def all(self) -> list[dict[str, Any]]:
        """Return the events that are kept, each kind in order; those of sessions in the order of
        the file."""
        sessions = self.events.get("session", [])
        others = (events for kind, events in self.events.items() if kind != "session")
        return [*sessions, *(event for events in others for event in events)]

    def update(self) -> bool:
        """Read what is new, `READ_BYTES` at most; return whether anything is. Raises
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
                file.seek(self._offset)
                block = file.read(READ_BYTES)
                self.has_more = len(block) == READ_BYTES
                changed = self._take(block)
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

    def _goes_on(self, file: Any, n_bytes: int) -> bool:
        """Return whether the file still begins with what was read."""
        if n_bytes < self._offset:
            return False
        file.seek(self._offset - len(self._before))
        return bool(file.read(len(self._before)) == self._before)

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
        event = event_of(line) if len(line) <= LONGEST_LINE_BYTES else None
        if event is None:
            self.n_unreadable += 1
            if self.n_unreadable > MOST_UNREADABLE:
                name = self.path.name
                raise CorruptError(f"{name} has over {MOST_UNREADABLE:,} unreadable lines")
            return
        kind = event["event"]
        if kind not in EVENTS:
            return
        self.n_read += 1
        kept = self.events.setdefault("session" if kind in ("start", "resume", "end") else kind, [])
        kept.append(event)
        if len(kept) > MOST_EVENTS:
            kept[:] = thinned_events(kept)


def thinned_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return half of the events: of each four the lowest and the highest loss, in order, so that
    neither a spike nor the best is lost; the first and the last stay. Others than `train` and
    `eval` lose the older half."""
    if events[0]["event"] not in ("train", "eval"):
        return [events[0], *events[len(events) // 2 :]]
    kept = [events[0]]
    for first in range(1, len(events) - 1, 4):
        four = range(first, min(first + 4, len(events) - 1))
        order = sorted(four, key=lambda index: number(events[index].get("loss")))
        kept += [events[index] for index in sorted({order[0], order[-1]})]
    return [*kept, events[-1]]
