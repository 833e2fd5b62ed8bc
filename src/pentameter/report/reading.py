"""A run folder read into values, whatever its state: half a line, half a run, foreign files.

Only regular files with bounded size are read, and no link is followed: the folder may come from
elsewhere, and its page goes to others. `unread` names the files left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from pentameter.config.load import DEEPEST, LARGEST_FILE_BYTES, parse_toml
from pentameter.disk.atomic import MissingFileError, open_regular, read_regular
from pentameter.disk.lock import is_held
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
"""Files that identify a run folder; one is enough."""
METRICS_BYTES = 2**29  # well over a million lines
JSON_BYTES = 2**24  # environment.json gains some kilobytes with every start
SAMPLE_BYTES = 2**20
LONGEST_LINE_BYTES = 2**20
MOST_UNREADABLE = 100_000  # lines, beyond which metrics.jsonl is another kind of file
EVENTS = ("start", "resume", "end", "train", "eval", "checkpoint", "skip")
"""Events in metrics.jsonl that are read; hooks may record others."""
LAST_STEP = 2**31 - 1  # steps are indexed by 32-bit words
LARGEST_DRAWN = 1e100  # the arithmetic of a plot overflows where its values come near 1e308


@dataclass(frozen=True)
class Evaluation:
    """Metrics from one pass over a split."""

    step: int
    split: str
    loss: float
    perplexity: float
    bits_per_byte: float
    accuracy: float = NAN
    """Fraction of questions answered right; NaN for text."""


@dataclass(frozen=True)
class Sample:
    """Text sampled after a step; `omitted_characters` were cut from its end here."""

    step: int
    text: str
    omitted_characters: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded in its folder; every field may be empty."""

    folder: Path
    start: dict[str, Any] = field(default_factory=dict)
    """Values from its latest start."""
    starts: tuple[dict[str, Any], ...] = ()
    """Start and resume events, in order."""
    train: dict[str, Series] = field(default_factory=dict)
    """Curve by name: CURVES, and elapsed_seconds, the time spent in steps. One without values is
    empty or absent."""
    evaluations: tuple[Evaluation, ...] = ()
    marks: tuple[tuple[int, str, str], ...] = ()
    """(step, kind, reason) for each resume and skip."""
    checkpoints: tuple[dict[str, Any], ...] = ()
    end: dict[str, Any] | None = None
    last_step: int = 0
    tokens: int = 0
    training_seconds: float = NAN
    unreadable_lines: int = 0
    unread: tuple[str, ...] = ()
    """Files left out, each with the reason."""
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    log_tail: str = ""
    locked: bool = False
    """Whether a process works on it; False once it has ended."""

    @property
    def name(self) -> str:
        """Configuration's name, else the folder's."""
        return str(self.config.get("name") or self.folder.resolve().name)

    def split_losses(self, split: str) -> Series:
        """Return a split's losses as a curve."""
        return _series([(e.step, e.loss) for e in self.evaluations if e.split == split])

    def best(self) -> Evaluation | None:
        """Return the validation with the lowest loss."""
        finite = [e for e in self.evaluations if e.split == "val" and math.isfinite(e.loss)]
        return min(finite, key=lambda e: e.loss, default=None)


def read_run(folder: Path) -> RecordedRun:
    """Read everything in a run folder.

    Raises:
        StorageError: the folder does not exist or cannot be read. Missing or damaged files inside
            are no error.
    """
    if not _is_folder(folder):
        raise StorageError(f"{folder} is not a run folder: there is no such folder")
    files = _RunFiles(folder)
    return _recorded(files, *files.events("metrics.jsonl"))


def read_beside(
    folder: Path, events: list[dict[str, Any]], unreadable: int, unread: Sequence[str] = ()
) -> RecordedRun:
    """Read everything in a run folder but metrics.jsonl, whose events are known.

    unreadable: lines that are no event. unread: why the file was left out. Raises like `read_run`.
    """
    files = _RunFiles(folder)
    files.unread += unread
    return _recorded(files, events, unreadable)


def _recorded(files: _RunFiles, events: list[dict[str, Any]], unreadable: int) -> RecordedRun:
    """Return the record of a run's files and events."""
    folder, train = files.folder, _latest(events, "train")
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
            *(
                number(event.get(key))
                for key in ("loss", "perplexity", "bits_per_byte", "accuracy")
            ),
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
                if e.get("event") in ("resume", "skip")
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
        locked=end is None and is_held(folder / "run.lock"),
        unread=tuple(files.unread),
    )


def holds_run(folder: Path) -> bool:
    """Return whether a file that identifies a run folder is there. Raises OSError."""
    return any((folder / name).is_file() for name in RUN_FILES)


def check_run_folder(folder: Path) -> None:
    """Raise ConfigError, naming runs inside if there are any, unless the folder holds a run;
    StorageError if it cannot be read."""
    try:
        if holds_run(folder):
            return
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; a run is a folder runs/NAME")
        inside = sorted(str(child) for child in folder.iterdir() if holds_run(child))
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror or error}") from error
    hint = f"; the runs in it: {', '.join(inside[:10])}" if inside else ""
    raise ConfigError(f"{folder} holds no run: it has neither {' nor '.join(RUN_FILES)}{hint}")


class _RunFiles:
    """A run folder's files, by name. A damaged one reads as empty and adds a line to `unread`; a
    missing one reads as empty. Methods raise StorageError if an intact file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unread: list[str] = []

    def text(self, name: str, max_bytes: int) -> str:
        """Return a file's text, if it has at most `max_bytes`; bytes that are not UTF-8 are
        replaced."""
        with self._collect_errors():
            content = read_regular(self.folder / name, max_bytes=max_bytes)
            return content.decode("utf-8", errors="replace")
        return ""

    def tail(self, name: str, n_characters: int) -> str:
        """Return the last `n_characters` from a text file with any length."""
        with self._collect_errors(), open_regular(self.folder / name) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * n_characters))  # UTF-8's longest
            return file.read().decode("utf-8", errors="replace")[-n_characters:]
        return ""

    def table(self, name: str) -> dict[str, Any]:
        """Return the top-level table in a TOML or JSON file."""
        is_toml = name.endswith(".toml")
        text = self.text(name, LARGEST_FILE_BYTES if is_toml else JSON_BYTES)
        try:
            if is_toml:
                return as_table(_portable(parse_toml(text.encode(), name)))
            return as_table(_portable(json.loads(text))) if text else {}
        except ConfigError as error:
            self.unread.append(str(error))
        except (ValueError, RecursionError) as error:
            self.unread.append(f"{name} is not JSON: {error}")
        return {}

    def events(self, name: str) -> tuple[list[dict[str, Any]], int]:
        """Return the lines that are EVENTS, and the number that are no event (such as a
        half-written last line)."""
        events: list[dict[str, Any]] = []
        n_unreadable = 0
        with self._collect_errors(), open_regular(self.folder / name) as file:
            if (n_bytes := os.fstat(file.fileno()).st_size) > METRICS_BYTES:
                raise CorruptError(
                    f"{file.name} has {n_bytes:,} bytes, and at most {METRICS_BYTES:,} are read"
                )
            for line in _lines(file):
                event = event_of(line)
                if event is None:
                    n_unreadable += 1
                    if n_unreadable > MOST_UNREADABLE:
                        raise CorruptError(f"{name} has over {MOST_UNREADABLE:,} unreadable lines")
                elif event["event"] in EVENTS:
                    events.append(event)
        return events, n_unreadable

    @contextmanager
    def _collect_errors(self) -> Iterator[None]:
        """Note the body's CorruptError instead of raising it; ignore a missing file."""
        try:
            yield
        except MissingFileError:
            pass
        except CorruptError as error:
            self.unread.append(str(error))


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """Yield a file's non-blank lines; a line that is too long comes in several blocks."""
    rest = b""
    while block := file.read(LONGEST_LINE_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        yield from filter(bytes.strip, lines)
        if len(rest) > LONGEST_LINE_BYTES:
            yield rest
            rest = b""
    if rest.strip():
        yield rest


def event_of(line: bytes) -> dict[str, Any] | None:
    """Return the event in a metrics.jsonl line, None without one."""
    try:
        event = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if event["event"] == "train":  # of which there may be a million: only what is drawn stays
        return {key: event[key] for key in ("event", "step", *CURVES) if key in event}
    return as_table(_portable(event))


def _portable(value: object, n_levels: int = DEEPEST) -> Any:
    """Return `value`, from TOML or JSON, without anything that a page, JSON or a float cannot hold:
    integers beyond 64 bits become floats, dates text, and tables below `n_levels` "…"."""
    if isinstance(value, dict | list) and not n_levels:
        return "…"
    if isinstance(value, dict):
        return {str(key): _portable(each, n_levels - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_portable(each, n_levels - 1) for each in value]
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else number(value)
    return str(value)


def _latest(events: list[dict[str, Any]], kind: str, *keys: str) -> list[dict[str, Any]]:
    """Return events with this kind, sorted by step; for a repeated step with equal values at
    `keys`, the later event."""
    latest = {
        (_integer(event["step"]), *(str(event.get(key)) for key in keys)): event
        for event in events
        if event["event"] == kind and "step" in event and 0 <= _integer(event["step"]) <= LAST_STEP
    }
    return [{**event, "step": step} for (step, *_), event in sorted(latest.items())]


def _series(points: list[tuple[int, float]]) -> Series:
    """Return the curve through points with rising steps."""
    finite = [point for point in points if abs(point[1]) <= LARGEST_DRAWN]  # NaN is not
    return Series(
        tuple(step for step, _ in finite),
        tuple(value for _, value in finite),
        len(points) - len(finite),
    )


def _elapsed_seconds(train: list[dict[str, Any]]) -> Series:
    """Return the training seconds up to each line: tokens between two lines over the later one's
    tokens per second, accumulated."""
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
    """Yield written checkpoints, each with `kept`: whether its folder still exists."""
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
    """Yield the texts in samples/, sorted by step."""
    folder = files.folder / "samples"
    if folder.is_symlink():
        files.unread.append(f"{folder} is a symbolic link, which could lead anywhere")
        return
    for path in sorted(folder.glob("step-*.txt"), key=lambda path: (len(path.name), path.name)):
        if (step := path.stem.removeprefix("step-")).isdecimal():
            text = files.text(f"samples/{path.name}", SAMPLE_BYTES)
            omitted = max(0, len(text) - MAX_SAMPLE_CHARACTERS)
            yield Sample(int(step), text[:MAX_SAMPLE_CHARACTERS], omitted)


def as_table(value: object) -> dict[str, Any]:
    """Return `value` if it is a table, else an empty one: files may be damaged."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float:
    """Return `value` as a float, NaN if it is none. `"NaN"` and `"inf"` are strict JSON's
    spellings."""
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
