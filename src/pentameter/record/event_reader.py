"""A run's events, read from metrics.jsonl all at once, or step by step as the file grows."""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from pentameter.config.files.load import DEEPEST
from pentameter.disk.atomic import MissingFileError, open_regular
from pentameter.errors import CorruptError

NAN = math.nan
CURVES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes",
    "tokens", "loss_tokens", "eta_seconds", "time",
)  # fmt: skip
"""Fields of `train` events that are kept: curves to draw or to sum up."""
SESSIONS = ("start", "resume", "end")
EVENTS = (
    *SESSIONS, "train", "experts", "ranks", "eval", "checkpoint", "copy", "skip", "rollback",
)  # fmt: skip
"""Kinds of events that are kept; hooks may record others."""
ONCE_A_STEP = {
    "train": (), "experts": ("layer",), "ranks": (), "eval": ("split",), "checkpoint": (),
    "skip": (), "rollback": (),
}  # fmt: skip
"""Kinds of events that a run records once for each step, and for each value of these fields."""
MOST_BYTES = 2**29
"""Largest metrics.jsonl that is read all at once: well over a million lines."""
LONGEST_LINE_BYTES = 2**20
MOST_UNREADABLE = 100_000
"""Lines that are no events, beyond which metrics.jsonl is taken for another kind of file."""
MOST_EVENTS = 4000
"""Most events of a kind kept while following a run; beyond, half are dropped, but no extreme."""
READ_BYTES = 2**25
"""Most bytes that one update reads, so that a page need not wait for a long run."""
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

    With `follows` (a page that follows a run), at most MOST_EVENTS per kind are kept, and a last
    line without a newline waits until it is complete. Without it all events are kept, and such a
    line is read as it is.
    """

    def __init__(self, folder: Path, *, follows: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self._follows = follows
        self.unread = ""
        """The reason that the file is not read at all; "" if it is."""
        self._forget()

    def _forget(self) -> None:
        self.has_more = False
        """True if the last update stopped at READ_BYTES, so that there may be more to read."""
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.n_unreadable = 0
        self._offset = 0  # complete lines up to here were read
        self._before = b""  # the last bytes before it
        self._inode = 0
        self._refused = -1  # inode of a file that is another kind of file
        self._skips = False  # inside a line that is too long

    def all(self) -> list[dict[str, Any]]:
        """Return the events kept: first start, resume and end in file order, then each other kind
        in order."""
        sessions = self.events.get("session", [])
        others = (events for kind, events in self.events.items() if kind != "session")
        return [*sessions, *(event for events in others for event in events)]

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
        """Return True if the bytes read last are still in the file (n_bytes long): it only grew."""
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
        event = _event(line) if len(line) <= LONGEST_LINE_BYTES else None
        if event is None:
            self.n_unreadable += 1
            if self.n_unreadable > MOST_UNREADABLE:
                name = self.path.name
                raise CorruptError(f"{name} has over {MOST_UNREADABLE:,} unreadable lines")
            return
        kind = event["event"]
        if kind not in EVENTS:
            return
        kept = self.events.setdefault("session" if kind in SESSIONS else kind, [])
        kept[_position(kept, event)] = [event]
        if self._follows and len(kept) > MOST_EVENTS:
            kept[:] = _thinned(kept)


def _position(kept: Sequence[dict[str, Any]], event: dict[str, Any]) -> slice:
    """Return which of `kept`, the events of its kind by step, an event replaces; an empty slice
    where it is to be inserted: at the end. But two processes of an earlier version may have written
    a run's events beside each other; then it belongs to its step, and replaces what says the
    same."""
    fields, step = ONCE_A_STEP.get(event["event"]), _step(event)
    if fields is None or not kept or not step <= _step(kept[-1]):
        return slice(len(kept), len(kept))
    end = bisect.bisect_right(kept, step, key=_step)
    for index in range(end - 1, -1, -1):
        if _step(kept[index]) != step:
            break
        if all(event.get(field) == kept[index].get(field) for field in fields):
            return slice(index, index + 1)
    return slice(end, end)


def _step(event: dict[str, Any]) -> float:
    return number(event.get("step"))


def _event(line: bytes) -> dict[str, Any] | None:
    """Return a metrics.jsonl line's event, None if it has none; `train` events with only the fields
    in CURVES."""
    try:
        event = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if event["event"] == "train":  # of which there may be a million: only what is drawn stays
        return {key: event[key] for key in ("event", "step", *CURVES) if key in event}
    return as_table(portable(event))


def _thinned(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return about half the events (all one kind). From every four `train` events in a row, or
    `eval` events of one split, those with the lowest and the highest loss stay, so that no spike
    and no best is lost; of `experts` those of every second step; other kinds lose their older half.
    The first and the last event always stay, of `eval` those of each split, of `experts` those of
    their steps."""
    if events[0]["event"] == "experts":
        steps = list(dict.fromkeys(event.get("step") for event in events))
        stay = {*steps[::2], steps[-1]}
        return [event for event in events if event.get("step") in stay]
    if events[0]["event"] not in ("train", "eval"):
        return [events[0], *events[len(events) // 2 :]]
    curves: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        curves.setdefault(str(event.get("split")), []).append(index)
    kept: set[int] = set()
    for curve in curves.values():
        kept |= {curve[0], curve[-1]}
        for first in range(1, len(curve) - 1, 4):
            four = curve[first : min(first + 4, len(curve) - 1)]
            order = sorted(four, key=lambda index: number(events[index].get("loss")))
            kept |= {order[0], order[-1]}
    return [events[index] for index in sorted(kept)]


def portable(value: object, n_levels: int = DEEPEST) -> Any:
    """Return a value from TOML or JSON in a form that any page or JSON reader can hold: integers
    beyond 64 bits become floats, dates text, and tables below `n_levels` levels "…"."""
    if isinstance(value, dict | list) and not n_levels:
        return "…"
    if isinstance(value, dict):
        return {str(key): portable(each, n_levels - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [portable(each, n_levels - 1) for each in value]
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else number(value)
    return str(value)


def as_table(value: object) -> dict[str, Any]:
    """Return `value` if it is a dict, else an empty one: files may be damaged."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float:
    """Return `value` as a float; NaN if it is no number or numeric text (JSON has "NaN" and "inf"
    as text)."""
    if type(value) is float:  # nearly all are: a long run has a million of them
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return NAN
    try:
        return float(value)
    except (ValueError, OverflowError):
        return NAN
