"""A run folder read into a RecordedRun, whatever its state: half a line, half a run, foreign files.

Only regular files with bounded size are read, and no symlink is followed: the folder may come from
elsewhere, and its page goes to others. `unread` names the files left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pentameter.config.files.load import DEEPEST, LARGEST_FILE_BYTES, parse_config
from pentameter.disk.atomic import MissingFileError, open_regular, read_regular, storage_errors
from pentameter.disk.lock import is_held
from pentameter.errors import ConfigError, CorruptError, StorageError, near_run
from pentameter.record.curves import Series
from pentameter.record.event_reader import EventReader, read_events
from pentameter.record.events import (
    NAN,
    UNKNOWN,
    CheckpointMetrics,
    CopyMetrics,
    EvalMetrics,
    Event,
    ExpertMetrics,
    RankMetrics,
    Rollback,
    RunEnd,
    RunResume,
    RunStart,
    SkippedStep,
    StepMetrics,
    number,
    recorded,
)
from pentameter.record.expert_loads import LayerLoads, layer_loads
from pentameter.record.sessions import Session, extends, sessions_of

E = TypeVar("E", bound=Event)

CURVES = (*(name for name in recorded(StepMetrics) if name != "step"), "time")
"""Fields of `train` events, which are drawn or summed up."""
MAX_SAMPLE_CHARACTERS = 4000
MAX_LOG_CHARACTERS = 6000
SAMPLE = "val-sample"
"""Name of the evaluation on a sample of the validation split (`train.eval_tokens`)."""
CHANGED_BY_RESUME = {"steps": " steps", "layout": "", "device": "", "precision": ""}
"""Values of start and resume events that a resume may change, each with its unit."""
RUN_FILES = ("config.toml", "metrics.jsonl")
"""Files by which a run folder is recognized; one of them is enough."""
JSON_BYTES = 2**24  # environment.json gains some kilobytes with every start
SAMPLE_BYTES = 2**20
LAST_STEP = 2**31 - 1  # steps are indexed by 32-bit words
LARGEST_DRAWN = 1e100  # the arithmetic of a plot overflows where its values come near 1e308


@dataclass(frozen=True)
class Sample:
    """Text sampled after a step; `omitted_characters` were cut off at its end."""

    step: int
    text: str
    omitted_characters: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """Everything that a run folder records, a frozen record; any field may be empty. `end` is the
    event that ended the run, None if it goes on or broke off. `last_step`, `tokens`, `loss_tokens`
    and `training_seconds` are those reached so far. `log_tail` is the end of log.txt."""

    folder: Path
    start: RunStart
    """The latest start or resume; values that it lacks are those of earlier ones."""
    starts: tuple[RunStart, ...]
    """Starts and resumes, in order."""
    sessions: tuple[Session, ...]
    """The run's sessions, each from a start or resume to the next; empty if these have no times."""
    train: dict[str, Series]
    """Curves by name: those in CURVES; `elapsed_seconds`, the training time so far; `waited`, the
    fraction of a step for which the other ranks waited for the slowest one."""
    slowest_ranks: tuple[tuple[int, str], ...]
    """(Slowest rank, its machine) at each point of `waited`."""
    expert_loads: tuple[LayerLoads, ...]
    """The loads of each layer with experts."""
    evaluations: tuple[EvalMetrics, ...]
    marks: tuple[tuple[int, str, str], ...]
    """(step, "resume", "layout", "extended", "skip", "rollback" or "copy failed", reason) for each
    such event; "layout" is a resume in another layout, "extended" one of a complete run."""
    checkpoints: tuple[CheckpointMetrics, ...]
    kept_checkpoints: tuple[int, ...]
    """Steps of the checkpoints whose folders are still there."""
    end: RunEnd | None
    last_step: int
    tokens: int
    """Tokens seen."""
    loss_tokens: int
    """Tokens that counted in the loss."""
    training_seconds: float
    unreadable_lines: int
    unread: tuple[str, ...]
    """Reasons for which files were not read, one each."""
    config: dict[str, Any]
    plan: dict[str, Any]
    environment: dict[str, Any]
    samples: tuple[Sample, ...]
    log_tail: str
    locked: bool
    """True while a process trains this run."""

    @property
    def name(self) -> str:
        """The configuration's name, else the folder's."""
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def sample(self) -> EvalMetrics | None:
        """The latest evaluation on a sample of the validation split, by which the run's best is
        chosen; None if the run is evaluated on the whole."""
        if not isinstance(as_table(self.config.get("train")).get("eval_tokens"), int):
            return None  # an absent key is written as a word
        return next((each for each in reversed(self.evaluations) if each.split == SAMPLE), None)

    @property
    def validations(self) -> list[EvalMetrics]:
        """Evaluations on the validation split by which the run's best is chosen, by step: all on
        the whole split, or all on the same sample of it."""
        sample = self.sample
        if sample is None:
            return [each for each in self.evaluations if each.split == "val"]
        same = (SAMPLE, sample.tokens)
        return [each for each in self.evaluations if (each.split, each.tokens) == same]

    @property
    def whole_validation(self) -> EvalMetrics | None:
        """The evaluation of the whole validation split at the end of a run that was evaluated on a
        sample of it; None if there is none yet."""
        if self.sample is None:
            return None
        return next((each for each in reversed(self.evaluations) if each.split == "val"), None)

    def validation_losses(self) -> Series:
        """Return the validation losses as a curve."""
        return _series([(each.step, each.loss) for each in self.validations])

    def best(self) -> EvalMetrics | None:
        """Return the evaluation with the lowest validation loss; None without a finite one."""
        finite = [each for each in self.validations if math.isfinite(each.loss)]
        return min(finite, key=lambda each: each.loss, default=None)


def read_run(folder: Path, events: EventReader | None = None) -> RecordedRun:
    """Read everything in a run folder. `events` are those already read from its metrics.jsonl; None
    reads them.

    Raises:
        StorageError: the folder does not exist or cannot be read. Missing or damaged files inside
            are no error.
    """
    if not _is_folder(folder):
        raise StorageError(
            f"{folder} is not a run folder: there is no such folder{near_run(folder)}"
        )
    reader = events or read_events(folder)
    files = _RunFiles(folder)
    files.unread += filter(None, [reader.unread])
    return _recorded(files, reader)


def _marks(events: EventReader) -> Iterator[tuple[int, str, str]]:
    """Yield (step, word, reason) for each event that is marked on a run's curves; the word is
    "resume", "layout", "extended", "skip", "rollback" or "copy failed". A resume's reason is what
    it changed: "712 → 1,923 steps"; it is a "layout" if the layout is among that, and "extended" if
    the run was complete before."""
    before: dict[str, Any] = {}
    for start in starts_of(events):
        values = {key: getattr(start, key) for key in CHANGED_BY_RESUME}
        now = {key: value for key, value in values.items() if value is not None}
        changed = {key: now[key] for key in now if before.get(key, now[key]) != now[key]}
        if isinstance(start, RunResume):
            reason = start.reason or ", ".join(
                f"{_grouped(before[key])} → {_grouped(value)}{CHANGED_BY_RESUME[key]}"
                for key, value in changed.items()
            )
            kind = "extended" if extends(start, before.get("steps")) else "resume"
            if now.get("layout", before.get("layout")) != before.get("layout"):
                kind = "layout"
            yield max(0, start.step), kind, reason
        before |= now
    for skip in events.of(SkippedStep):
        yield max(0, skip.step), skip.EVENT, skip.reason
    for rollback in events.of(Rollback):
        yield max(0, rollback.step), rollback.EVENT, rollback.reason
    for copy in events.of(CopyMetrics):
        if copy.error:
            yield max(0, copy.step), "copy failed", copy.error


def starts_of(events: EventReader) -> list[RunStart]:
    """Return the starts and resumes among a run's events, in order."""
    return [each for each in events.sessions() if isinstance(each, RunStart)]


def _grouped(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _recorded(files: _RunFiles, events: EventReader) -> RecordedRun:
    """Build a RecordedRun from a run's files and events."""
    folder, start = files.folder, _joined(starts_of(events))
    train = list(_counted(_latest(events.of(StepMetrics)), start.tokens_per_step or 0))
    ranks, evaluations = _latest(events.of(RankMetrics)), _latest(events.of(EvalMetrics))
    checkpoints = _latest(events.of(CheckpointMetrics))
    starts, sessions = starts_of(events), events.sessions()
    end = sessions[-1] if sessions and isinstance(sessions[-1], RunEnd) else None
    curves = _curves(train, ranks)
    elapsed = curves["elapsed_seconds"]
    seconds = NAN if end is None else end.seconds  # a run that ended says so itself
    if not math.isfinite(seconds):
        seconds = elapsed.values[-1] if len(elapsed) else NAN
    ends = [] if end is None else [end]  # the lines of `train` may end before it
    last_step = max([0, *(each.step for each in (*train[-1:], *evaluations, *ends))])
    return RecordedRun(
        folder=folder,
        start=start,
        starts=tuple(starts),
        sessions=sessions_of(starts, curves["time"], end, last_step),
        train=curves,
        slowest_ranks=tuple((each.slowest, each.host) for each in ranks),
        expert_loads=layer_loads(_latest(events.of(ExpertMetrics))),
        evaluations=tuple(evaluations),
        marks=tuple(sorted(_marks(events))),
        checkpoints=tuple(checkpoints),
        kept_checkpoints=tuple(each.step for each in checkpoints if _is_kept(folder, each)),
        end=end,
        last_step=last_step,
        tokens=max((each.tokens for each in train), default=0),
        loss_tokens=max((each.loss_tokens for each in train), default=0),
        training_seconds=seconds,
        unreadable_lines=events.n_unreadable,
        config=files.table("config.toml"),
        plan=files.table("plan.json"),
        environment=files.table("environment.json"),
        samples=tuple(_samples(files)),
        log_tail=files.tail("log.txt", MAX_LOG_CHARACTERS),
        locked=end is None and is_held(folder / "run.lock"),
        unread=tuple(files.unread),
    )


def _joined(starts: Sequence[RunStart]) -> RunStart:
    """Return the latest of a run's `starts`; where one of its values is None, that of the latest
    earlier start which has one."""
    joined = RunStart(step=0)
    for start in starts:
        said = {each.name: getattr(start, each.name) for each in fields(RunStart)}
        joined = replace(joined, **{key: v for key, v in said.items() if v is not None})
    return joined


def _counted(train: Sequence[StepMetrics], tokens_per_step: int) -> Iterator[StepMetrics]:
    """Yield the `train` events with the present meaning of their tokens. In an earlier version
    `tokens` were loss tokens, and tokens per second counted those. `tokens_per_step` is the tokens
    seen in a step, 0 if unknown."""
    step, n_learnt = 0, 0
    for event in train:
        is_earlier = event.loss_tokens == UNKNOWN
        n_loss = event.tokens if is_earlier else event.loss_tokens
        if is_earlier and tokens_per_step:
            share = (n_loss - n_learnt) / max(1, (event.step - step) * tokens_per_step)
            rate = event.tokens_per_second / (share if share > 0 else 1.0)
            seen = event.step * tokens_per_step
            yield replace(event, tokens=seen, loss_tokens=n_loss, tokens_per_second=rate)
        else:
            yield replace(event, loss_tokens=n_loss) if is_earlier else event
        step, n_learnt = event.step, n_loss


def _curves(train: Sequence[StepMetrics], ranks: Sequence[RankMetrics]) -> dict[str, Series]:
    """Return the curves of `RecordedRun.train` from the `train` and `ranks` events."""
    return {
        **{
            key: _series([(each.step, number(getattr(each, key))) for each in train])
            for key in CURVES
        },
        "elapsed_seconds": _elapsed_seconds(train),
        "waited": _series([(each.step, each.waited) for each in ranks]),
    }


def holds_run(folder: Path) -> bool:
    """Return True if a file in RUN_FILES is in `folder`. Raises OSError."""
    return any((folder / name).is_file() for name in RUN_FILES)


def check_run_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder holds a run; the message names runs in its sub-folders.
    Raises StorageError if it cannot be read."""
    with storage_errors(folder, "read"):
        if holds_run(folder):
            return
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: there is no such folder{near_run(folder)}; a run is a folder runs/NAME"
            )
        inside = sorted(str(child) for child in folder.iterdir() if holds_run(child))
    hint = f"; the runs in it: {', '.join(inside[:10])}" if inside else ""
    raise ConfigError(f"{folder} holds no run: it has neither {' nor '.join(RUN_FILES)}{hint}")


class _RunFiles:
    """Reads a run folder's files by name. Missing and damaged files read as empty; a damaged one
    adds a line to `unread`. Methods raise StorageError if an intact file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unread: list[str] = []

    def text(self, name: str, max_bytes: int) -> str:
        """Return a file's text; bytes that are not UTF-8 are replaced. A file larger than
        `max_bytes` counts as damaged."""
        with self._collect_errors():
            content = read_regular(self.folder / name, max_bytes=max_bytes)
            return content.decode("utf-8", errors="replace")
        return ""

    def tail(self, name: str, n_characters: int) -> str:
        """Return a text file's last `n_characters`, whatever its size."""
        with self._collect_errors(), open_regular(self.folder / name) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * n_characters))  # UTF-8's longest
            return file.read().decode("utf-8", errors="replace")[-n_characters:]
        return ""

    def table(self, name: str) -> dict[str, Any]:
        """Return a TOML or JSON file's content as a dict, empty for a missing or damaged file."""
        is_toml = name.endswith(".toml")
        text = self.text(name, LARGEST_FILE_BYTES if is_toml else JSON_BYTES)
        try:
            if is_toml:
                return as_table(portable(parse_config(text.encode(), name)))
            return as_table(portable(json.loads(text))) if text else {}
        except ConfigError as error:
            self.unread.append(str(error))
        except (ValueError, RecursionError) as error:
            self.unread.append(f"{name} is not JSON: {error}")
        return {}

    @contextmanager
    def _collect_errors(self) -> Iterator[None]:
        """Context manager: add a CorruptError in the block to `unread`, and ignore a missing
        file."""
        try:
            yield
        except MissingFileError:
            pass
        except CorruptError as error:
            self.unread.append(str(error))


def _latest(events: Sequence[E]) -> list[E]:
    """Return the events, all of a kind, sorted by step. If several are about the same, as after a
    resume, only the last is kept."""
    latest = {
        (event.step, *(getattr(event, name) for name in event.ONCE or ())): event
        for event in events
        if 0 <= event.step <= LAST_STEP
    }
    return [latest[key] for key in sorted(latest)]


def _series(points: list[tuple[int, float]]) -> Series:
    """Return the curve through (step, value) points. Values that are not finite, or beyond
    LARGEST_DRAWN, are left out and counted."""
    finite = [point for point in points if abs(point[1]) <= LARGEST_DRAWN]  # NaN is not
    return Series(
        tuple(step for step, _ in finite),
        tuple(value for _, value in finite),
        len(points) - len(finite),
    )


def _elapsed_seconds(train: Sequence[StepMetrics]) -> Series:
    """Return the training time up to each `train` event, in seconds: tokens since the last event ÷
    tokens per second, accumulated."""
    points: list[tuple[int, float]] = []
    total, previous_tokens = 0.0, 0
    for event in train:
        tokens, rate = event.tokens, event.tokens_per_second
        if tokens > previous_tokens and math.isfinite(rate) and rate > 0:
            total += (tokens - previous_tokens) / rate
            points.append((event.step, total))
        previous_tokens = max(previous_tokens, tokens)
    return _series(points)


def _is_kept(folder: Path, checkpoint: CheckpointMetrics) -> bool:
    """Return True if the checkpoint's folder is still there."""
    name = checkpoint.path.name
    return name.startswith("step-") and _is_folder(folder / "checkpoints" / name)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _samples(files: _RunFiles) -> Iterator[Sample]:
    """Yield the texts in samples/, sorted by step, each cut to MAX_SAMPLE_CHARACTERS."""
    folder = files.folder / "samples"
    if folder.is_symlink():
        files.unread.append(f"{folder} is a symbolic link, which could lead anywhere")
        return
    for path in sorted(folder.glob("step-*.txt"), key=lambda path: (len(path.name), path.name)):
        if (step := path.stem.removeprefix("step-")).isdecimal():
            text = files.text(f"samples/{path.name}", SAMPLE_BYTES)
            omitted = max(0, len(text) - MAX_SAMPLE_CHARACTERS)
            yield Sample(int(step), text[:MAX_SAMPLE_CHARACTERS], omitted)


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
