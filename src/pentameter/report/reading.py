"""A run folder as values. Reads whatever is there: half a line, half a run, nothing at all."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentameter.errors import StorageError
from pentameter.report.curves import Series

NAN = math.nan
MAX_SAMPLE_CHARACTERS = 4000
MAX_LOG_CHARACTERS = 6000
# the fields of the `train` events that are drawn or summed up
CURVES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes",
    "tokens", "eta_seconds",
)  # fmt: skip
BEATS_SECONDS = 60.0  # a run's lock is touched every few seconds; a dead run's is older


@dataclass(frozen=True)
class Evaluation:
    """One pass over a split."""

    step: int
    split: str
    loss: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Sample:
    """Text the model wrote after a step; `omitted_characters` of it were cut off here."""

    step: int
    text: str
    omitted_characters: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder shows it; every field may be empty."""

    folder: Path
    start: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Series] = field(default_factory=dict)
    """Curve by name: those of CURVES, and elapsed_seconds, the time spent in steps. One without
    values is empty or absent."""
    evaluations: tuple[Evaluation, ...] = ()
    marks: tuple[tuple[int, str, str], ...] = ()
    """(step, kind, reason) of each resume, skip and rollback."""
    checkpoints: tuple[dict[str, Any], ...] = ()
    end: dict[str, Any] | None = None
    last_step: int = 0
    tokens: int = 0
    training_seconds: float = NAN
    unreadable_lines: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    log_tail: str = ""
    locked: bool = False
    """A process is at work on it: the lock has been touched within BEATS_SECONDS."""

    @property
    def name(self) -> str:
        """The configuration's name, else the folder's."""
        return str(self.config.get("name") or self.folder.resolve().name)

    def split_losses(self, split: str) -> Series:
        """The losses of a split as a curve."""
        return _series([(e.step, e.loss) for e in self.evaluations if e.split == split])

    def best(self) -> Evaluation | None:
        """The validation with the lowest loss."""
        finite = [e for e in self.evaluations if e.split == "val" and math.isfinite(e.loss)]
        return min(finite, key=lambda e: e.loss, default=None)


def read_run(folder: Path) -> RecordedRun:
    """Everything the run folder holds.

    Raises:
        StorageError: there is no such folder, or it cannot be read. A missing or damaged file
            inside it is not an error.
    """
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a run folder: there is no such folder")
    events, unreadable = _read_events(folder / "metrics.jsonl")
    train = _latest(events, "train")
    sessions = [e for e in events if e.get("event") in ("start", "resume", "end")]
    starts = [e for e in sessions if e["event"] != "end"]
    end = sessions[-1] if sessions and sessions[-1]["event"] == "end" else None
    start: dict[str, Any] = {}
    for event in starts:  # a resume repeats what may have changed: device, precision
        start.update({k: v for k, v in event.items() if k not in ("event", "step")})
    evaluations = tuple(
        Evaluation(
            event["step"],
            str(event.get("split") or "val"),
            *(number(event.get(key)) for key in ("loss", "perplexity", "bits_per_byte")),
        )
        for event in _latest(events, "eval", "split")
    )
    elapsed = _elapsed_seconds(train)
    seconds = number((end or {}).get("seconds"))  # a run that ended says so itself
    if not math.isfinite(seconds):
        seconds = elapsed.values[-1] if len(elapsed) else NAN
    last_step = max(
        *(e["step"] for e in train[-1:]),
        *(e.step for e in evaluations),
        _integer((end or {}).get("step")),  # the lines of `train` may end before it
        0,
    )
    return RecordedRun(
        folder=folder,
        start=start,
        train={
            key: _series([(e["step"], number(e[key])) for e in train if key in e]) for key in CURVES
        }
        | {"elapsed_seconds": elapsed},
        evaluations=evaluations,
        marks=tuple(
            sorted(
                (_integer(e.get("step")), str(e["event"]), str(e.get("reason") or ""))
                for e in events
                if e.get("event") in ("resume", "skip", "rollback")
            )
        ),
        checkpoints=tuple(_checkpoints(folder, events)),
        end=end,
        last_step=last_step,
        tokens=max((_integer(e.get("tokens")) for e in train), default=0),
        training_seconds=seconds,
        unreadable_lines=unreadable,
        config=_read_table(folder / "config.toml", tomllib.loads),
        plan=_read_table(folder / "plan.json", json.loads),
        environment=_read_table(folder / "environment.json", json.loads),
        samples=tuple(_samples(folder / "samples")),
        log_tail=_read_text(folder / "log.txt")[-MAX_LOG_CHARACTERS:],
        locked=_is_beating(folder / "run.lock"),
    )


def _read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are JSON objects, and how many are not (a last line half written)."""
    events: list[dict[str, Any]] = []
    unreadable = 0
    for line in _read_text(path).split("\n"):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        else:
            unreadable += 1
    return events, unreadable


def _latest(events: list[dict[str, Any]], kind: str, *keys: str) -> list[dict[str, Any]]:
    """Events of a kind in the order of their steps; of a repeated step, or of one with the same
    values of `keys`, the later one."""
    latest = {
        (_integer(event.get("step")), *(str(event.get(key)) for key in keys)): event
        for event in events
        if event.get("event") == kind and "step" in event
    }
    return [{**event, "step": place[0]} for place, event in sorted(latest.items())]


def _series(points: list[tuple[int, float]]) -> Series:
    """The curve of points whose steps rise."""
    finite = [point for point in points if math.isfinite(point[1])]
    return Series(
        tuple(step for step, _ in finite),
        tuple(value for _, value in finite),
        len(points) - len(finite),
    )


def _elapsed_seconds(train: list[dict[str, Any]]) -> Series:
    """Seconds of training until each line: the tokens between two lines over the tokens per second
    of the later one, summed."""
    points: list[tuple[int, float]] = []
    total, previous_tokens = 0.0, 0
    for event in train:
        tokens, rate = _integer(event.get("tokens")), number(event.get("tokens_per_second"))
        if tokens > previous_tokens and math.isfinite(rate) and rate > 0:
            total += (tokens - previous_tokens) / rate
            points.append((event["step"], total))
        previous_tokens = max(previous_tokens, tokens)
    return _series(points)


def _checkpoints(folder: Path, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The checkpoints that were written, each with `kept`: whether its folder is still there."""
    for event in _latest(events, "checkpoint"):
        name = Path(str(event.get("path") or f"step-{event['step']:08d}")).name
        kept = bool(name) and (folder / "checkpoints" / name).is_dir()
        yield {**event, "name": name, "kept": kept}


def _samples(folder: Path) -> Iterator[Sample]:
    for path in sorted(folder.glob("step-*.txt"), key=lambda path: (len(path.name), path.name)):
        if (step := path.stem.removeprefix("step-")).isdecimal():
            text = _read_text(path)
            omitted = max(0, len(text) - MAX_SAMPLE_CHARACTERS)
            yield Sample(int(step), text[:MAX_SAMPLE_CHARACTERS], omitted)


def _is_beating(lock: Path) -> bool:
    try:
        return time.time() - lock.stat().st_mtime < BEATS_SECONDS
    except OSError:
        return False


def _read_text(path: Path) -> str:
    """The file's text with bytes that are not UTF-8 replaced, "" when it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_table(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The file's top-level table, {} when it is not one. Both parsers' errors are ValueErrors."""
    try:
        return as_table(parse(_read_text(path)))
    except ValueError:
        return {}


def as_table(value: object) -> dict[str, Any]:
    """`value` if it is a table, else an empty one: files may be damaged."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float:
    """A float; NaN for what is none. `"NaN"` and `"inf"` are how strict JSON spells those."""
    if type(value) is float:  # nearly all are: a long run has a million of them
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return NAN
    try:
        return float(value)
    except (ValueError, OverflowError):
        return NAN


def _integer(value: object) -> int:
    if type(value) is int and abs(value) < 2**63:
        return value
    as_float = number(value)
    return int(as_float) if math.isfinite(as_float) else 0
