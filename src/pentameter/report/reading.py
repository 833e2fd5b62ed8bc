"""A run folder as values. Reads whatever is there: half a line, half a run, what others put there.

Every file is a regular one of bounded size, or is not read, and no link is followed: the folder may
come from somebody else, and its page goes to others. What is not read is told in `unread`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from pentameter.config.load import DEEPEST, LARGEST_FILE_BYTES, parse_toml
from pentameter.disk.atomic import MissingFileError, open_regular, read_regular
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.report.curves import Series

NAN = math.nan
MAX_SAMPLE_CHARACTERS = 4000
MAX_LOG_CHARACTERS = 6000
# the fields of the `train` events that are drawn or summed up
CURVES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes",
    "tokens", "eta_seconds",
)  # fmt: skip
RUN_FILES = ("config.toml", "metrics.jsonl")
"""Files of which a run folder has at least one."""
METRICS_BYTES = 2**29  # well over a million lines
JSON_BYTES = 2**24  # environment.json gains some kilobytes with every start
SAMPLE_BYTES = 2**20
LONGEST_LINE_BYTES = 2**20
MOST_UNREADABLE = 100_000  # lines, beyond which metrics.jsonl is another kind of file
EVENTS = ("start", "resume", "end", "train", "eval", "checkpoint", "skip", "rollback")
"""Events of metrics.jsonl that are read; hooks may record others."""
LAST_STEP = 2**31 - 1  # steps are indexed by 32-bit words
LARGEST_DRAWN = 1e100  # the arithmetic of a plot overflows where its values come near 1e308
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
    """Values of its latest start."""
    starts: tuple[dict[str, Any], ...] = ()
    """Each start and resume, in order."""
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
    unread: tuple[str, ...] = ()
    """Files that are left out, each with the reason."""
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
    if not _is_folder(folder):
        raise StorageError(f"{folder} is not a run folder: there is no such folder")
    files = _RunFiles(folder)
    events, unreadable = files.events("metrics.jsonl")
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
        starts=tuple(starts),
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
        config=files.table("config.toml"),
        plan=files.table("plan.json"),
        environment=files.table("environment.json"),
        samples=tuple(_samples(files)),
        log_tail=files.tail("log.txt", MAX_LOG_CHARACTERS),
        locked=_is_beating(folder / "run.lock"),
        unread=tuple(files.unread),
    )


def check_run_folder(folder: Path) -> None:
    """Raise ConfigError, naming the runs in it if there are any, unless a folder holds a run;
    StorageError where it cannot be read."""
    try:
        if _holds_run(folder):
            return
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; a run is a folder runs/NAME")
        inside = sorted(str(child) for child in folder.iterdir() if _holds_run(child))
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror or error}") from error
    hint = f"; the runs in it: {', '.join(inside[:10])}" if inside else ""
    raise ConfigError(f"{folder} holds no run: it has neither {' nor '.join(RUN_FILES)}{hint}")


def _holds_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


class _RunFiles:
    """The files of a run folder, by name. One that is damaged is read as empty, and adds a line to
    `unread`; one that is not there does not. Methods raise StorageError where one that is sound
    cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unread: list[str] = []

    def text(self, name: str, max_bytes: int) -> str:
        """The text of a file of at most `max_bytes`; bytes that are not UTF-8 are replaced."""
        with self._told():
            content = read_regular(self.folder / name, max_bytes=max_bytes)
            return content.decode("utf-8", errors="replace")
        return ""

    def tail(self, name: str, n_characters: int) -> str:
        """The end of a text, which may be of any length."""
        with self._told(), open_regular(self.folder / name) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * n_characters))  # UTF-8's longest
            return file.read().decode("utf-8", errors="replace")[-n_characters:]
        return ""

    def table(self, name: str) -> dict[str, Any]:
        """The top-level table of a file of TOML or JSON."""
        is_toml = name.endswith(".toml")
        text = self.text(name, LARGEST_FILE_BYTES if is_toml else JSON_BYTES)
        try:
            if is_toml:
                return as_table(_plain(parse_toml(text.encode(), name)))
            return as_table(_plain(json.loads(text))) if text else {}
        except ConfigError as error:
            self.unread.append(str(error))
        except (ValueError, RecursionError) as error:
            self.unread.append(f"{name} is not JSON: {error}")
        return {}

    def events(self, name: str) -> tuple[list[dict[str, Any]], int]:
        """The lines of a file that are one of EVENTS, and how many are no event (a last line half
        written)."""
        events: list[dict[str, Any]] = []
        n_unreadable = 0
        with self._told(), open_regular(self.folder / name) as file:
            if (n_bytes := os.fstat(file.fileno()).st_size) > METRICS_BYTES:
                raise CorruptError(
                    f"{file.name} has {n_bytes:,} bytes, and at most {METRICS_BYTES:,} are read"
                )
            for line in _lines(file):
                event = _event(line)
                if event is None:
                    n_unreadable += 1
                    if n_unreadable > MOST_UNREADABLE:
                        raise CorruptError(f"{name} has over {MOST_UNREADABLE:,} unreadable lines")
                elif event["event"] in EVENTS:
                    events.append(event)
        return events, n_unreadable

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Note a CorruptError of the body instead of raising it; a missing file is none."""
        try:
            yield
        except MissingFileError:
            pass
        except CorruptError as error:
            self.unread.append(str(error))


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """The lines of a file that hold anything; one that is too long in several pieces."""
    rest = b""
    while block := file.read(LONGEST_LINE_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        yield from filter(bytes.strip, lines)
        if len(rest) > LONGEST_LINE_BYTES:
            yield rest
            rest = b""
    if rest.strip():
        yield rest


def _event(line: bytes) -> dict[str, Any] | None:
    """The event in a line of metrics.jsonl; None where there is none."""
    try:
        event = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if event["event"] == "train":  # of which there may be a million: only what is drawn stays
        return {key: event[key] for key in ("event", "step", *CURVES) if key in event}
    return as_table(_plain(event))


def _plain(value: object, n_levels: int = DEEPEST) -> Any:
    """`value`, of TOML or JSON, with nothing in it that a page, JSON or a float cannot hold:
    integers beyond 64 bits are floats, dates are text, what lies deeper than `n_levels` is "…"."""
    if isinstance(value, dict | list) and not n_levels:
        return "…"
    if isinstance(value, dict):
        return {str(key): _plain(each, n_levels - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, n_levels - 1) for each in value]
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else number(value)
    return str(value)


def _latest(events: list[dict[str, Any]], kind: str, *keys: str) -> list[dict[str, Any]]:
    """Events of a kind in the order of their steps; of a repeated step, or of one with the same
    values of `keys`, the later one."""
    latest = {
        (_integer(event["step"]), *(str(event.get(key)) for key in keys)): event
        for event in events
        if event["event"] == kind and "step" in event and 0 <= _integer(event["step"]) <= LAST_STEP
    }
    return [{**event, "step": place[0]} for place, event in sorted(latest.items())]


def _series(points: list[tuple[int, float]]) -> Series:
    """The curve of points whose steps rise."""
    finite = [point for point in points if abs(point[1]) <= LARGEST_DRAWN]  # NaN is not
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
        kept = name.startswith("step-") and _is_folder(folder / "checkpoints" / name)
        yield {**event, "name": name, "kept": kept}


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _samples(files: _RunFiles) -> Iterator[Sample]:
    """The texts in samples/, in the order of their steps."""
    folder = files.folder / "samples"
    if folder.is_symlink():
        files.unread.append(f"{folder} is a symbolic link, which could lead anywhere")
        return
    for path in sorted(folder.glob("step-*.txt"), key=lambda path: (len(path.name), path.name)):
        if (step := path.stem.removeprefix("step-")).isdecimal():
            text = files.text(f"samples/{path.name}", SAMPLE_BYTES)
            omitted = max(0, len(text) - MAX_SAMPLE_CHARACTERS)
            yield Sample(int(step), text[:MAX_SAMPLE_CHARACTERS], omitted)


def _is_beating(lock: Path) -> bool:
    try:
        return time.time() - lock.stat().st_mtime < BEATS_SECONDS
    except OSError:
        return False


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
