"""The events of a run: a frozen dataclass for each kind of line in its metrics.jsonl.

A line is a JSON object with the kind under `event`, the fields of that kind's class, and the `time`
at which it was written. Here alone stand these keys, their units, and what a missing one means in a
file of an earlier version. Kinds that are not in KINDS are a hook's own; they and unknown fields
are left as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, partial
from operator import is_not
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

NAN = math.nan
UNKNOWN = -1
"""A number that a damaged line, or one of an earlier version, does not have."""
_LACKING = {"missing": UNKNOWN}
_UNRECORDED = {"is_recorded": False}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of metrics.jsonl: something that happened in a run. Base class of the kinds of
    events; each is a frozen dataclass with the line's values as fields."""

    EVENT: ClassVar[str]
    """The word of this kind, under `event`."""
    ONCE: ClassVar[tuple[str, ...] | None] = ()
    """A run records such an event once for each step and each value of these fields; None if it may
    do so any number of times."""

    step: int = field(metadata=_LACKING)
    """Number of optimizer steps completed by then; the first is step 1. -1 in a damaged line."""
    time: float = field(default=NAN, kw_only=True)
    """Time at which it was written, in seconds since 1970 (UTC); NaN until it is, and in
    earlier versions' files."""

    @property
    def event(self) -> str:
        """The word that names this event's kind in metrics.jsonl, such as `train`."""
        return self.EVENT

    def values(self) -> dict[str, Any]:
        """Return the line's values by key, as JSON values, without the kind of event and the
        time."""
        kind: Any = type(self)  # mypy finds no hash of a class of frozen objects
        return {name: getattr(self, name) for name in recorded(kind)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the event that a line's JSON object, `record`, describes. A value that is missing
        or has another type becomes the field's default; without a default, NaN, 0, "", None or
        empty, by the field's type. A missing `step` is UNKNOWN."""
        record = cls.completed(record)
        kind: Any = cls
        event, get, put = cls.__new__(cls), record.get, object.__setattr__
        for name, exact, read in _readers(kind):  # a long run has a million lines
            value = get(name)
            put(event, name, value if type(value) is exact else read(value))
        return event

    @classmethod
    def completed(cls, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a line's JSON object, `record`, with values added that an earlier version of this
        program did not write."""
        return record


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStart(Event):
    """A new run that is ready for its first step. Values may be None in earlier versions' files."""

    EVENT = "start"
    ONCE = None

    run_id: str | None = None
    """Identity of the run, which stays over its resumes."""
    name: str | None = None
    """`name` in its configuration."""
    parameters: int | None = None
    """Number of parameters of the model."""
    tokens_per_step: int | None = None
    """Tokens of a step's batch, padding included."""
    steps: int | None = None
    """Number of steps that the run is to make."""
    flops_per_token: float | None = None
    """FLOPs of a token in training, by the convention that plan.json names."""
    device: str | None = None
    """Name of the device."""
    precision: str | None = None
    """Precision of the matmuls."""
    layout: str | None = None
    """The layout, as in `data=2,tensor=2`."""
    world_size: int | None = None
    """Number of ranks."""
    n_nodes: int | None = None
    """Number of machines."""
    reached_step: int | None = None
    """Highest step that an earlier start of the run had recorded; None if there was none."""
    reached_time: float | None = None
    """Time at which that start recorded its last event, in seconds since 1970 (UTC)."""
    compiled: bool | None = None
    """True if the blocks are compiled."""
    ceiling_flops: float | None = None
    """FLOPs per second of one device's fastest matmul, published or measured: an MFU of 1."""
    entropy_rate: float | None = None
    """Lowest loss that any model can reach on the corpus, in nats per token, where it is known."""
    reason: str = field(default="", metadata=_UNRECORDED)
    """Why a run was resumed; only earlier versions wrote it."""


@dataclass(frozen=True, slots=True)
class RunResume(RunStart):
    """A run that goes on from a checkpoint, with the same values."""

    EVENT = "resume"


class EndKind(StrEnum):
    """The kinds of end of a run, recorded in the event `end` next to its `reason` in words."""

    COMPLETED = "completed"
    """All steps are done."""
    PATIENCE = "patience"
    """`train.patience` evaluations in a row brought no new best loss."""
    HOOK = "hook"
    """A hook called `stop` with its own reason."""
    SIGNAL = "signal"
    """A stop signal, whose name is the reason; the same command resumes the run."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RunEnd(Event):
    """The end of a run, after its last step."""

    EVENT = "end"
    ONCE = None

    reason: str
    """Why it ended, in words: a hook's, a signal's name, an error's message."""
    seconds: float
    """Training seconds over all starts; NaN after an error."""
    kind: EndKind
    """Its kind; derived from the reason in files of an earlier version."""

    @classmethod
    def completed(cls, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the object with the kind of end; a run by an earlier version did not record it,
        and it is derived from the reason."""
        if record.get("kind") in list(EndKind):
            return record
        reason = _text(record.get("reason")) or "completed"
        words = {
            "completed": EndKind.COMPLETED, "error": EndKind.ERROR, "SIG": EndKind.SIGNAL,
            "no better": EndKind.PATIENCE,
        }  # fmt: skip
        begun = (kind for word, kind in words.items() if reason.startswith(word))
        return {**record, "reason": reason, "kind": next(begun, EndKind.HOOK)}


# -- its steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepMetrics(Event):
    """An optimizer step that has just completed; recorded at logged steps."""

    EVENT = "train"

    tokens: int
    """Tokens seen so far, padding included; in earlier versions' files loss tokens."""
    loss_tokens: int = field(metadata=_LACKING)
    """Tokens that counted in the loss; -1 in earlier versions' files."""
    loss: float
    """Mean loss over the step's loss tokens, in nats per token."""
    learning_rate: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    step_seconds: float
    """Seconds that the step took, with reading its batch."""
    tokens_per_second: float
    """Tokens seen per second, on all ranks together; in earlier versions' files loss tokens."""
    mfu: float | None
    """Model FLOPs utilization, a fraction; None if unknown."""
    peak_memory_bytes: int
    """Rank 0's peak of memory so far, in bytes."""
    eta_seconds: float
    """Predicted seconds until the run ends."""


@dataclass(frozen=True, slots=True)
class ExpertMetrics(Event):
    """One layer of experts in a step that has just completed. A load is the number of tokens that
    chose an expert."""

    EVENT = "experts"
    ONCE = ("layer",)

    layer: int = field(metadata=_LACKING)
    """The layer, counted from 0; -1 in a damaged line."""
    max_over_mean: float
    """The largest load ÷ the mean load; 1 if all experts got equally many tokens."""
    entropy: float
    """Entropy of the loads as fractions of their sum, in nats; ln(experts) if all are equal."""
    idle: int
    """Experts that no token chose."""
    z: float
    """Mean over tokens of the squared log-sum-exp of the router's logits, which `router.z_loss`
    makes small."""
    logit_rms: float
    """Root mean square of the router's logits."""
    exchanged_bytes: float
    """Bytes of rows, outputs and their gradients that ranks sent one another for this layer."""
    loads: tuple[float, ...]
    """Tokens of each expert, over the whole step, also those left out for want of capacity."""

    @classmethod
    def of_totals(
        cls, step: int, layer: int, totals: Sequence[float], n_chosen: int
    ) -> ExpertMetrics:
        """Return the metrics for a layer's row of `ExpertLoads.total`, with at least one load
        above 0. Each token chooses `n_chosen` experts."""
        *counts, squared_sums, squares, n_bytes = totals
        loads = tuple(map(round, counts))
        total, n = sum(loads), len(loads)
        n_tokens = total / n_chosen
        return cls(
            step,
            layer,
            max_over_mean=max(loads) * n / total,
            entropy=sum(load / total * math.log(total / load) for load in loads if load),
            idle=loads.count(0),
            z=squared_sums / n_tokens,
            logit_rms=math.sqrt(squares / (n_tokens * n)),
            exchanged_bytes=round(n_bytes),
            loads=loads,
        )


@dataclass(frozen=True, slots=True)
class RankMetrics(Event):
    """The slowest rank over the last steps. Times are means over these steps."""

    EVENT = "ranks"

    n_steps: int
    """Number of steps that the times are means of."""
    slowest: int
    """Number of the slowest rank."""
    host: str
    """Name of its machine."""
    own_seconds: float
    """Seconds of a step in which the rank computes or reads its batch, and does not wait for
    others."""
    others_seconds: float
    """The same of the other ranks that do the same work, their median."""
    waited: float
    """Fraction of a step for which the others wait for this rank: the difference ÷ the step's
    time."""
    alike: bool = True
    """False if no other rank does the same work, in a pipeline with one rank per stage: then
    `others_seconds` is what the plan expects, by the other stages' times."""


@dataclass(frozen=True, slots=True)
class SkippedStep(Event):
    """A step whose update was not applied, as loss or gradient norm was not finite, or a spike."""

    EVENT = "skip"

    reason: str
    """The reason in words."""


@dataclass(frozen=True, slots=True)
class Rollback(Event):
    """A rollback after a step: weights and optimizer state are those of an earlier step again, and
    the updates of the steps since are undone."""

    EVENT = "rollback"

    to_step: int = field(metadata=_LACKING)
    """The earlier step; -1 in a damaged line."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, slots=True)
class EpochMetrics(Event):
    """An epoch that has just completed, at the end of a step; without skipped steps."""

    EVENT = "epoch"

    epoch: int
    """The epoch, counted from 1."""
    loss: float
    """Mean loss over its loss tokens, nats per token, each measured at the step that trained on
    it."""
    perplexity: float
    """exp(loss)."""
    loss_tokens: int
    """Its tokens that counted in the loss."""
    steps: int
    """Its steps."""
    seconds: float
    """Seconds of its steps."""


# -- between two steps -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalMetrics(Event):
    """A pass over a split after a step."""

    EVENT = "eval"
    ONCE = ("split",)

    split: str
    """Name of the split: `val`, `val-sample` (the same windows of it each time), `test`, or that of
    an entry of `data.evaluations`."""
    loss: float
    """Mean loss, in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Bits per UTF-8 byte of the split's text."""
    tokens: int
    """Loss tokens: those that counted."""
    seconds: float
    """Seconds that the pass took."""
    best: bool = False
    """True for the run's best validation loss so far."""

    @classmethod
    def completed(cls, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a line's JSON object, `record`, with `split` set to "val" if it lacks one: an
        earlier version, which evaluated a single split, did not write it."""
        return {**record, "split": _text(record.get("split")) or "val"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMetrics(EvalMetrics):
    """A pass over questions.

    The loss is that of the right choices given their contexts, in nats per token; `tokens` and
    bits_per_byte count those choices. Accuracies are fractions of questions whose right choice is
    the likeliest, by three measures; among equally likely choices the first is taken.
    """

    examples: int
    """Number of questions."""
    accuracy: float
    """Fraction right by log-probability, summed over the choice's tokens."""
    accuracy_per_token: float
    """Fraction right by log-probability per token in the choice."""
    accuracy_per_byte: float
    """Fraction right by log-probability per UTF-8 byte in the choice."""


@dataclass(frozen=True, slots=True)
class CheckpointMetrics(Event):
    """A checkpoint that is now on disk."""

    EVENT = "checkpoint"

    path: Path
    """Its folder; recorded relative to the run folder, which may be moved."""
    bytes: int
    """Size of all ranks' files."""
    seconds: float = NAN
    """Seconds from the decision to save until the checkpoint was on disk; NaN if not known."""
    stall_seconds: float = NAN
    """Seconds, included in `seconds`, for which training waited; NaN if not known."""
    again: bool = field(default=False, metadata=_UNRECORDED)
    """True if it replaces a checkpoint saved earlier at the same step, whose event stays the only
    one."""

    def values(self) -> dict[str, Any]:
        """Return the values with the path relative to the run folder."""
        return {**Event.values(self), "path": f"checkpoints/{self.path.name}"}

    @classmethod
    def completed(cls, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the object with a path, which follows from the step."""
        path = _text(record.get("path")) or f"checkpoints/step-{_integer(record.get('step')):08d}"
        return {**record, "path": path}


@dataclass(frozen=True, slots=True)
class CopyMetrics(Event):
    """A copy of a step's checkpoint in `checkpoint.copy_to` that was made, or has failed."""

    EVENT = "copy"
    ONCE = None

    bytes: int
    """Bytes written."""
    seconds: float
    """Seconds since it was asked for."""
    error: str | None
    """Why it failed; None for a copy that is there and was read back."""


@dataclass(frozen=True, slots=True)
class OtherEvent(Event):
    """An event of a hook's own."""

    EVENT = ""
    ONCE = None

    word: str
    """The word under `event`."""
    others: Mapping[str, Any]
    """Its values by key."""

    @property
    def event(self) -> str:
        """The word under `event`."""
        return self.word

    def values(self) -> dict[str, Any]:
        """Return its step and its values by key."""
        return {"step": self.step, **self.others}


KINDS: dict[str, type[Event]] = {
    kind.EVENT: kind
    for kind in (
        RunStart, RunResume, StepMetrics, ExpertMetrics, RankMetrics, SkippedStep, Rollback,
        EpochMetrics, EvalMetrics, CheckpointMetrics, CopyMetrics, RunEnd,
    )
}  # fmt: skip
"""The kinds of events that a run records, by their word under `event`."""


# -- lines -----------------------------------------------------------------------------------------


def line_of(event: Event, seconds: float | None) -> str:
    """Return an event's line for metrics.jsonl, without newline, with its time `seconds` if that is
    known; NaN and infinity become null."""
    values = {"event": event.event, **event.values()}
    if seconds is not None:
        values["time"] = round(seconds, 3)
    return json.dumps(strict(values), ensure_ascii=False, default=str)


def read_line(line: bytes) -> Event | None:
    """Return the event in a line; None if it holds none. Missing or damaged values are replaced as
    in `Event.of_record`."""
    try:
        record = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(word := record.get("event"), str):
        return None
    kind = KINDS.get(word)
    if kind is None:
        step, time = record.pop("step", None), record.pop("time", None)
        del record["event"]
        return OtherEvent(_integer(step, UNKNOWN), word, record, time=number(time))
    if kind is EvalMetrics and "accuracy" in record:
        kind = ChoiceMetrics
    return kind.of_record(record)


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` for strict JSON, which every reader accepts: NaN and infinity become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


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


def _integer(value: object, otherwise: int = 0) -> int:
    if type(value) is int and abs(value) < 2**63:
        return value
    as_float = number(value)
    return int(as_float) if abs(as_float) < 2**63 else otherwise  # NaN is not


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _numbers(value: object) -> tuple[float, ...]:
    return tuple(number(each) for each in value) if isinstance(value, list) else ()


_READ: dict[Any, Callable[[Any], Any]] = {
    int: _integer,
    float: number,
    str: _text,
    bool: bool,
    Path: Path,
    EndKind: EndKind,
    tuple[float, ...]: _numbers,
    int | None: lambda value: value if type(value) is int and abs(value) < 2**63 else None,
    float | None: lambda value: None if math.isnan(found := number(value)) else found,
    str | None: lambda value: value if isinstance(value, str) else None,
    bool | None: lambda value: value if isinstance(value, bool) else None,
}
"""Function that reads a field from any JSON value, by the field's type."""


@cache
def _readers(kind: type[Any]) -> list[tuple[str, type | None, Callable[[Any], Any]]]:
    """Return (name, type, function) for each field of an event's kind, by which values are read
    from JSON. A value of that type is taken unchanged; the function converts any other value, and
    None for a missing one."""
    types = get_type_hints(kind)
    found: list[tuple[str, type | None, Callable[[Any], Any]]] = []
    for each in fields(kind):
        name, read = each.name, _READ[types[each.name]]
        if "missing" in each.metadata:
            read = partial(_integer, otherwise=UNKNOWN)
        if each.default is True:
            read = partial(is_not, False)  # true where it is missing
        found.append((name, float if types[name] in (float, float | None) else None, read))
    return found


@cache
def recorded(kind: type[Any]) -> dict[str, str]:
    """Return the fields in a line of this kind, without its time: name → type, as in the source."""
    return {
        each.name: str(each.type)
        for each in fields(kind)
        if each.name != "time" and each.metadata.get("is_recorded", True)
    }
