"""The runs in a folder, read again as they change: rows for `watch`'s table, and rendered pages."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pentameter import formatting
from pentameter.disk.atomic import storage_errors
from pentameter.disk.lock import owner_of
from pentameter.errors import ConfigError, PentameterError, printable
from pentameter.record.curves import Series, envelope
from pentameter.record.event_reader import EventReader
from pentameter.record.reading import RUN_FILES, RecordedRun, holds_run, read_run
from pentameter.report.pages.page import render_page
from pentameter.report.watch.comparison import (
    compare_records,
    differing_settings,
    render_comparison,
)
from pentameter.report.watch.ranking import Run, compared_run

MOST_RUNS = 1000
MOST_COMPARED = 50
SPARK_BINS = 60
"""Bins of a sparkline; each has its lowest and its highest loss."""
SPARK_POINTS = 400
"""Most points of a sparkline; beyond, it is made anew from SPARK_BINS bins."""
MOST_PAGES = 20
"""Rendered pages kept in memory; beyond, all are dropped."""
FRESH_SECONDS = 1.0
"""Age in seconds below which the table or a page is returned again without reading the folder."""
RENDER_SHARE = 0.3
"""Largest fraction of the time spent on rendering a page, since its run may be training on this
machine."""
WATCHED = ("metrics.jsonl", "config.toml", "plan.json", "run.lock", "samples", "checkpoints")
"""Entries of a run folder. If there is something new to display, one of them has changed."""
LEFTOVERS = ("run.lock", "plan.json", "environment.json", "log.txt", "checkpoints", "samples")
"""Files and folders by which a folder without any of RUN_FILES is recognized as what is left of a
run."""


@dataclass
class _Followed:
    """One run folder that the live page follows: its events; the run as read, or the error if it
    cannot be read; its row of the table and its sparkline. `signature` identifies the state of its
    files when they were last read. `changed_at` is the Board's version at which row or sparkline
    last changed."""

    folder: Path
    events: EventReader
    signature: object = None
    run: Run | None = None
    error: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    changed_at: int = 0
    spark: list[tuple[int, int, float]] = field(default_factory=list)
    """Points of the loss curve: (Board version at which it was added, step, loss)."""
    spark_began_at: int = 0


@dataclass(frozen=True)
class _Drawn:
    """A rendered page, its version, the time (monotonic clock) at which it was rendered, and the
    seconds that this took."""

    version: str
    page: str
    at: float
    seconds: float

    def is_fresh(self) -> bool:
        """Return True if it is too early to render the page again: it is younger than
        FRESH_SECONDS, or than its rendering time ÷ RENDER_SHARE."""
        return time.monotonic() - self.at < max(FRESH_SECONDS, self.seconds / RENDER_SHARE)


class Board:
    """The runs in `folder`, one per sub-folder; each is read again when its files change. The
    Board's version is an int that rises with every change. Thread-safe. Symlinks out of the folder
    are not followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._session = uuid.uuid4().hex[:12]
        self._version = 0
        self._read_at = -math.inf
        self._columns: list[str] = []
        self._columns_changed_at = 0
        self._followed: dict[str, _Followed] = {}
        self._pages: dict[tuple[str, ...], _Drawn] = {}
        self._lock = threading.Lock()
        self._drawing = threading.Lock()

    def news(self, session: str, after: int) -> dict[str, Any]:
        """Return what has changed since version `after`, as JSON values for the page's table: the
        runs' addresses, the columns, and each changed row with its new sparkline points. If
        `session` is not this Board's, the server was restarted since, and all rows are returned.
        Raises StorageError if the folder cannot be read."""
        with self._lock:
            self._refresh()
            if session != self._session:
                after = -1
            everything = self._columns_changed_at > after
            return {
                "session": self._session,
                "version": self._version,
                "folder": printable(str(self.folder)),
                "addresses": [in_address(name) for name in self._followed],
                "columns": self._columns,
                "rows": [
                    _news_of(name, each, after, self._columns)
                    for name, each in self._followed.items()
                    if everything or each.changed_at > after
                ],
            }

    def version(self, names: Sequence[str]) -> str:
        """Return a string that changes whenever `page` for these run names changes. Raises
        ConfigError for an unknown name."""
        with self._lock:
            self._refresh()
            known = [self._known(name) for name in names]
            newest = f"{self._session}-{max(each.changed_at for each in known)}"
        drawn = self._pages.get(tuple(names))
        return drawn.version if drawn is not None and drawn.is_fresh() else newest

    def page(self, names: Sequence[str], live: str) -> str:
        """Return HTML: one run's report, or several runs' comparison. Its script polls the address
        `live` for a new version. Raises ConfigError for an unknown name or an unreadable run."""
        asked = tuple(names)
        with self._drawing:  # one at a time: drawing takes a core that the run may want
            version, old = self.version(names), self._pages.get(asked)
            if old is not None and old.version == version:
                return old.page
            records = [self._record(name) for name in names]
            began = time.monotonic()
            page = (
                render_page(records[0], live=live, version=version)
                if len(records) == 1
                else render_comparison(compare_records(records), live=live, version=version)
            )
            if len(self._pages) > MOST_PAGES:
                self._pages.clear()
            ended = time.monotonic()
            self._pages[asked] = _Drawn(version, page, ended, ended - began)
            return page

    def _known(self, name: str) -> _Followed:
        if name not in self._followed:
            raise ConfigError(f"{printable(name)} is no run in {self.folder}")
        return self._followed[name]

    def _record(self, name: str) -> RecordedRun:
        with self._lock:
            followed = self._known(name)
            if followed.run is None:
                raise ConfigError(f"{printable(name)}: {followed.error}")
            return followed.run.record

    def _refresh(self) -> None:
        """Read changed runs and raise the version, at most once in FRESH_SECONDS. Raises
        StorageError if the folder cannot be read."""
        if time.monotonic() - self._read_at < FRESH_SECONDS:
            return
        names = _run_names(self.folder)
        if list(self._followed) != names:
            self._columns_changed_at = self._version + 1
        self._followed = {
            name: self._followed.get(name)
            or _Followed(self.folder / name, EventReader(self.folder / name))
            for name in names
        }
        version = self._version + 1
        with ThreadPoolExecutor(8) as pool:  # a lock held on another machine is watched for seconds
            changed = list(pool.map(lambda each: _update(each, version), self._followed.values()))
        runs = [each.run for each in self._followed.values() if each.run is not None]
        columns = list(differing_settings(runs)) if len(runs) > 1 else []
        if columns != self._columns:
            self._columns, self._columns_changed_at = columns, version
        if any(changed) or self._columns_changed_at == version:
            self._version = version
        self._read_at = time.monotonic()


def check_runs_folder(folder: Path) -> None:
    """Raise ConfigError if `folder` does not exist or is itself a run; StorageError if it cannot be
    read."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; watch takes one with runs in it")
    with storage_errors(folder, "read"):
        if holds_run(folder):
            raise ConfigError(
                f"{folder} is itself a run; watch the folder it is in: watch {folder.parent}"
            )
    _run_names(folder)


def _run_names(folder: Path) -> list[str]:
    """Return the names of the run folders in `folder`, broken ones included, sorted, at most
    MOST_RUNS; an empty list if `folder` does not exist. Raises StorageError."""
    if not folder.exists():
        return []
    with storage_errors(folder, "read"):
        names = [name for name in os.listdir(folder) if name[0] != "."]
    return sorted(name for name in names if _looks_like_run(folder / name))[:MOST_RUNS]


def _looks_like_run(folder: Path) -> bool:
    try:
        inside = os.listdir(folder)
    except NotADirectoryError:
        return False
    except OSError:  # which its line then says
        return True
    return bool({*RUN_FILES, *LEFTOVERS} & set(inside))


def _update(each: _Followed, version: int) -> bool:
    """Read a run again if its files changed. Return True if they did; `changed_at` is then
    `version`. An error is shown in the run's row."""
    signature = _signature(each.folder)
    is_locked = each.run is not None and each.run.record.locked
    if signature == each.signature and not is_locked and not each.events.has_more:
        return False
    before = each.row
    try:
        if each.folder.is_symlink():
            raise ConfigError("a symbolic link, which is not followed; watch the folder it is in")
        if not holds_run(each.folder):
            raise ConfigError("no run: it has neither config.toml nor metrics.jsonl")
        has_news = each.events.update()
        each.run = compared_run(each.folder.name, read_run(each.folder, each.events))
        each.error, each.row = "", _row(each.run)
        if has_news:
            _extend_spark(each, each.run.record.train["loss"], version)
    except (PentameterError, OSError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        each.run, each.error = None, printable(said or type(error).__name__)
        each.row = {"state": "broken", "kind": "bad", "why": each.error}
    # Samples and checkpoints are on the run's page, not in its row.
    is_new = each.row != before or signature != each.signature or each.events.has_more
    each.signature = signature
    if is_new:
        each.changed_at = version
    return is_new


def _signature(folder: Path) -> tuple[object, ...]:
    """Return a value that changes whenever a file or folder in WATCHED does."""
    found: list[object] = []
    for name in WATCHED:
        try:
            status = os.lstat(folder / name)
        except OSError as error:
            found.append(error.errno)
        else:
            # A lock's file is written every two seconds; whether it is held is asked each time.
            when = 0 if name == "run.lock" else status.st_mtime_ns
            found.append((status.st_ino, status.st_size, when))
    return tuple(found)


def _row(run: Run) -> dict[str, Any]:
    """Return a run's row as JSON: strings to display, and [number, string] pairs to sort by."""
    record, found, ended = run.record, run.results, run.outcome
    planned = found.planned_steps
    left = record.train["eta_seconds"].values[-1:] if record.locked else ()
    owner = owner_of(record.folder / "run.lock") if record.locked else None
    layout = found.layout if found.layout != "data=1" else ""
    loss = record.train["loss"].values
    speed = record.train["tokens_per_second"].values
    where = " · ".join(filter(None, (owner.host if owner else "", found.device, layout)))
    return {
        "title": record.name if record.name != run.label else "",
        "state": ended.label,
        "kind": ended.kind,
        "why": ended.sentence if ended.kind == "bad" else "",
        "percent": min(record.last_step / planned, 1.0) if planned else None,
        "steps": record.last_step,
        "left": _number(left[0] if left else math.nan, formatting.duration),
        "loss": _number(loss[-1] if loss else math.nan, formatting.fixed),
        "best": _number(found.best_loss, formatting.fixed),
        "speed": _number(speed[-1] if speed else math.nan, formatting.count),
        "where": where,
        "unread": list(record.unread),
    }


def _number(value: float, shown: Any) -> list[Any]:
    """Return a table cell for JSON, [sort key, text]. The text is `shown(value)`; the sort key is
    `value`, or None if that is not finite."""
    return [value if math.isfinite(value) else None, shown(value)]


def _extend_spark(each: _Followed, loss: Series, version: int) -> None:
    """Append the loss curve's new points to a run's sparkline. Each is marked with the Board's
    `version`, which rises with each change, so that a page gets only points newer than its own. If
    there would be more than SPARK_POINTS, or the run was rewound, replace all by SPARK_BINS bins.
    """
    last = each.spark[-1][1] if each.spark else -1
    new = loss.after(last + 1)
    is_rewound = bool(each.spark) and (not len(loss) or loss.steps[-1] < last)
    if is_rewound or not each.spark or len(each.spark) + len(new) > SPARK_POINTS:
        steps, values = envelope(loss, SPARK_BINS)
        each.spark = [
            (version, int(step), float(value)) for step, value in zip(steps, values, strict=True)
        ]
        each.spark_began_at = version
        return
    each.spark += [
        (version, step, value) for step, value in zip(new.steps, new.values, strict=True)
    ]


def in_address(name: str) -> str:
    """Return a run's name percent-encoded for a URL, whatever bytes its folder's name has."""
    return quote(os.fsencode(name), safe="")


def _news_of(name: str, each: _Followed, after: int, columns: Sequence[str]) -> dict[str, Any]:
    """Return a run's row for the table, with its settings named in `columns` (dotted paths) and the
    sparkline points added since version `after`; `anew` is True if they replace all earlier ones.
    """
    found = each.run.settings if each.run is not None else {}
    shown = {path: formatting.scalar(found[path]) for path in columns if path in found}
    anew = each.spark_began_at > after
    points = [[step, loss] for version, step, loss in each.spark if anew or version > after]
    row = {"name": printable(name), "address": in_address(name), **each.row}
    return row | {"settings": shown, "anew": anew, "points": points}
