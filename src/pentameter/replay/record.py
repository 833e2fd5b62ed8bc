"""A run folder's record of the run's steps: logged numbers, skips, rollbacks, checkpoints and
starts. From these follows which steps must be computed to replay a given one. Nothing is
written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pentameter.checkpoint.folders.opening import (
    Check,
    Checkpoint,
    open_checkpoint,
    read_own_manifest,
)
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config, ScheduleConfig
from pentameter.disk.atomic import read_own_json
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.planning.layouts.layout import parse_parallel
from pentameter.record.checkpoints import list_checkpoints, step_folder_name
from pentameter.record.event_reader import read_events
from pentameter.record.events import UNKNOWN, Rollback, SkippedStep, StepMetrics, number
from pentameter.record.identity import RunIdentity, read_identity
from pentameter.record.reading import as_table, check_run_folder


@dataclass(frozen=True)
class StepNumbers:
    """A step's loss in nats per target token, its gradient norm before clipping, and whether its
    update was made. A run records no numbers for a skipped step: they are NaN."""

    loss: float
    grad_norm: float
    made: bool = True


@dataclass(frozen=True)
class Route:
    """The steps that must be computed to replay one of them: begin with the checkpoint at step
    `base`, and make `steps` in order. A frozen record.

    If `base` is 0 and there is no such checkpoint, begin with the initial weights. `steps` are not
    consecutive where the run rolled back in between. The run recorded something about the last one,
    so that the result can be compared.
    """

    base: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder records it. Steps count from 1, as in metrics.jsonl."""

    folder: Path
    config: Config
    run_id: str
    begins_with: str | None
    """Phrase for what the run began with, such as another model's weights; None if it began with
    random weights, which follow from its seed."""
    numbers: Mapping[int, StepNumbers]
    """Recorded step → its numbers, skipped steps included."""
    skips: Mapping[int, str]
    """Skipped step → the reason that was recorded."""
    rollbacks: Mapping[int, int]
    """Step after which the run rolled back → step to which it returned."""
    rates: Mapping[int, float]
    """Recorded step → its learning rate."""
    checkpoints: tuple[int, ...]
    """Steps of the run's checkpoints, ascending."""
    damaged: dict[int, CorruptError] = field(default_factory=dict)
    """Step of a checkpoint known to be damaged → the damage."""
    starts: Sequence[Mapping[str, Any]] = ()
    """The entries of environment.json, one for each start of the run, oldest first."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Content of plan.json, as the latest start wrote it."""

    @property
    def last_step(self) -> int:
        """The last step of which numbers or a checkpoint are recorded."""
        return max((*self.numbers, *self.checkpoints), default=0)

    def route(self, step: int) -> Route:
        """Return the Route that computes `step` again. It begins with the nearest intact checkpoint
        before the step, and ends with the first step, from `step` on, about which something is
        recorded.

        Raises ConfigError if the run has not made the step, or there is nothing to begin with;
        CorruptError if that is because every checkpoint before the step is damaged.
        """
        if not 1 <= step <= self.last_step:
            raise ConfigError(
                f"--step {step} is no step that {self.folder} records: it has made the steps 1 … "
                f"{self.last_step}"
            )
        steps, base = [step], self._weights_before(step)
        while base is None:
            steps.insert(0, self._step_before(steps[0]))
            base = self._weights_before(steps[0])
        if base == 0 and not self.has_checkpoint(0):
            self._check_beginning(step)
        while not self.is_recorded(steps[-1]):
            if steps[-1] in self.rollbacks:  # what follows does not begin with it
                break
            steps.append(steps[-1] + 1)
        return Route(base, tuple(steps))

    def is_recorded(self, step: int) -> bool:
        """Return True if the run has logged the step's numbers, skipped it, or saved its
        weights."""
        return step in self.numbers or self.saves_result_of(step)

    def has_checkpoint(self, step: int) -> bool:
        """Return True if there is a checkpoint at `step` that is not known to be damaged."""
        return step in self._intact

    def saves_result_of(self, step: int) -> bool:
        """Return True if a checkpoint holds the weights after this step's update: there is an
        intact one at this step, and the run did not roll back there."""
        return step in self._intact and step not in self.rollbacks

    def undone_by(self, step: int) -> int | None:
        """If a rollback undid this step's update, return the step after which the run rolled back;
        else None."""
        return next((last for last, first in self.rollbacks.items() if first < step <= last), None)

    def open_checkpoint(self, step: int, check: Check) -> Checkpoint:
        """Open the checkpoint at `step`, verified by `check`. Raises CorruptError if it is
        damaged."""
        try:
            return open_checkpoint(self.folder / "checkpoints" / step_folder_name(step), check)
        except ConfigError as error:  # a run removes old ones
            raise CorruptError(f"the checkpoint at step {step} was removed meanwhile") from error

    def open_any_checkpoint(self, check: Check) -> Checkpoint | None:
        """Open the run's earliest checkpoint that is intact, verified by `check`; return None if
        there is none."""
        for step in self.checkpoints:
            with suppress(CorruptError):
                return self.open_checkpoint(step, check)
        return None

    def without(self, step: int, damage: CorruptError) -> RunRecord:
        """Return a copy of this record in which the checkpoint at `step` counts as damaged, for the
        reason `damage`."""
        return replace(self, damaged={**self.damaged, step: damage})

    def start_of(self, step: int) -> Mapping[str, Any]:
        """Return the entry of environment.json for the start of the run that made `step`. That is
        the latest start from an earlier step, because a start makes all later steps again. Entries
        by an earlier version have no step; then it is the latest one."""
        for start in reversed(self.starts):
            if number(start.get("step", 0)) < step:
                return start
        return {}

    def layout_of(self, step: int) -> tuple[str, int | None]:
        """Return the layout in which the run made `step`, as text, and the number of rows in a
        micro-batch (None if not recorded). If the start did not record a layout, that of plan.json
        is taken."""
        start = self.start_of(step)
        layout, micro_batch_size = start.get("layout"), start.get("micro_batch_size")
        if isinstance(layout, str) and isinstance(micro_batch_size, int):
            return layout, micro_batch_size
        degrees = {k: v for k, v in as_table(self.plan.get("layout")).items() if k != "world_size"}
        batch = as_table(self.plan.get("batch"))
        text = ",".join(f"{name}={str(value).lower()}" for name, value in degrees.items())
        return text or "data=1", batch.get("micro_batch_size")

    def config_on(self, step: int, layout: str | None) -> Config:
        """Return the configuration for making `step` again, in the run's precision. `layout` is the
        layout as text; None for the layout and the micro-batches in which the run made the step."""
        own, micro_batch_size = self.layout_of(step)
        parallel = parse_parallel(layout or own, self.config.parallel)
        changes: dict[str, Any] = {"parallel": parallel}
        if layout is None and micro_batch_size is not None:
            changes["train.micro_batch_size"] = micro_batch_size
        precision = self.start_of(step).get("precision")
        if self.config.train.precision == "auto" and isinstance(precision, str):
            changes["train.precision"] = precision
        return self.config.updated(changes)

    @property
    def _intact(self) -> list[int]:
        return [step for step in self.checkpoints if step not in self.damaged]

    def _weights_before(self, step: int) -> int | None:
        """Return the step of the checkpoint that holds the weights before `step`, 0 for the initial
        weights; None if they are not saved."""
        before = (step - 1, self.rollbacks.get(step - 1, step - 1))
        return next((each for each in before if each == 0 or each in self._intact), None)

    def _step_before(self, step: int) -> int:
        """Return the step after which the run had the weights with which `step` began: the previous
        one, or the one to which the run had just rolled back."""
        return self.rollbacks.get(step - 1, step - 1)

    def _check_beginning(self, step: int) -> None:
        """Raise CorruptError or ConfigError unless a replay of `step` can begin with the initial
        weights."""
        for found in sorted(self.damaged, reverse=True):
            if found < step:
                raise self.damaged[found]
        if self.begins_with is not None:
            kept = ", ".join(map(str, self.checkpoints)) or "none"
            raise ConfigError(
                f"--step {step}: no checkpoint before it is left (those of {self.folder} are of "
                f"the steps {kept}), and the run began with {self.begins_with}; "
                "checkpoint.keep_last keeps more of them"
            )


def read_record(folder: Path) -> RunRecord:
    """Read the record of the run in `folder`. Raises ConfigError if it holds no run, CorruptError
    if a file that it needs is damaged."""
    check_run_folder(folder)
    config = load_config(folder / "config.toml")
    identity = read_identity(folder)
    assert identity is not None  # there is a config.toml
    events = read_events(folder)
    logged = [each for each in events.of(StepMetrics) if each.step != UNKNOWN]
    skips = {each.step: each.reason for each in events.of(SkippedStep) if each.step != UNKNOWN}
    numbers = {each.step: StepNumbers(each.loss, each.grad_norm) for each in logged}
    numbers.update({step: StepNumbers(float("nan"), float("nan"), made=False) for step in skips})
    return RunRecord(
        folder=folder,
        config=config,
        run_id=identity.run_id,
        begins_with=_begins_with(identity),
        numbers=numbers,
        skips=skips,
        rollbacks={
            each.step: each.to_step
            for each in events.of(Rollback)
            if UNKNOWN != each.to_step < each.step
        },
        rates={each.step: each.learning_rate for each in logged},
        checkpoints=tuple(sorted(set(_own_checkpoints(folder, identity.run_id)))),
        starts=_starts(folder),
        plan=read_own_json(folder / "plan.json"),
    )


def schedules_of(
    record: RunRecord, steps: Sequence[int], latest: ScheduleConfig
) -> dict[int, ScheduleConfig]:
    """Return step → the schedule by which the run made it, for each of `steps`. `latest` is the
    run's present schedule.

    A schedule that was extended (`schedule.start_step`) does not apply to earlier steps. Theirs is
    read from the configuration in a checkpoint: in the first one from that step on that was saved
    under it, else in the last one before the step.

    Raises ConfigError if no checkpoint has it.
    """
    saved = cache(lambda step: _saved_schedule(record.folder, step))

    def of(step: int) -> ScheduleConfig:
        if latest.start_step < step:
            return latest
        intact = [each for each in record.checkpoints if record.has_checkpoint(each)]
        behind = [each for each in intact if each >= step]
        for each in (*behind, *reversed(intact[: len(intact) - len(behind)])):
            found = saved(each)
            if found is not None and found.start_step < step:
                return found
        raise ConfigError(
            f"step {step} of {record.folder} was made under a schedule that --resume extend has "
            f"replaced at step {latest.start_step}, and no checkpoint of that time is left, which "
            "would have it; checkpoint.keep_last keeps more of them"
        )

    return {step: of(step) for step in steps}


def _saved_schedule(folder: Path, step: int) -> ScheduleConfig | None:
    """Return the schedule in the configuration of the checkpoint at `step`; None if that checkpoint
    is damaged or was removed in the meantime."""
    path = folder / "checkpoints" / step_folder_name(step)
    with suppress(CorruptError, StorageError):
        Checkpoint(path, read_own_manifest(path), {}).read("config.toml")  # raises if damaged
        return load_config(path / "config.toml").schedule
    return None


def _begins_with(identity: RunIdentity) -> str | None:
    """Return a phrase that says what the run with this identity began with: the weights of a model,
    or another run's checkpoint. None for random weights."""
    if identity.init_from is not None:
        return f"the weights of {identity.init_from['path']}"
    parent = identity.parent
    return None if parent is None else f"step {parent.get('step')} of run {parent.get('run_id')}"


def _own_checkpoints(folder: Path, run_id: str) -> Iterator[int]:
    for candidate in list_checkpoints(folder / "checkpoints"):
        with suppress(CorruptError):  # it may have been removed by now
            if read_own_manifest(candidate.path).run_id != run_id:
                continue
        yield candidate.step


def _starts(folder: Path) -> list[Mapping[str, Any]]:
    """Return the entries of environment.json, one for each start, oldest first. Empty if the file
    is missing or damaged: otherwise only people read it."""
    with suppress(CorruptError, StorageError):
        latest = read_own_json(folder / "environment.json")
        earlier = latest.pop("earlier_starts", [])
        return [*map(as_table, earlier if isinstance(earlier, list) else []), latest]
    return []
