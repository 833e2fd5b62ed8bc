"""What a run folder records of its steps: logged numbers, skips, rollbacks, checkpoints and starts;
and from it, which steps have to be made to compute one of them again. Nothing is written."""

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
    update was made. The numbers are NaN for a skipped step, of which a run records none."""

    loss: float
    grad_norm: float
    made: bool = True


@dataclass(frozen=True)
class Route:
    """The steps to make so that one is computed again: `steps` in order, from the weights of the
    checkpoint at step `base` (0, and there is none: the initial weights). They are not consecutive
    where a rollback lies between them. The last one is recorded, so that it can be compared."""

    base: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder records it. Steps count from 1, as in metrics.jsonl."""

    folder: Path
    config: Config
    run_id: str
    begins_with: str | None
    """What the run began with, in words, if it is not the initial weights that follow from its
    seed; None if it is."""
    numbers: Mapping[int, StepNumbers]
    """The recorded steps, skipped ones included."""
    skips: Mapping[int, str]
    """Skipped step → the recorded reason."""
    rollbacks: Mapping[int, int]
    """Step after which the run rolled back → the step that it rolled back to."""
    rates: Mapping[int, float]
    """Recorded step → its learning rate."""
    checkpoints: tuple[int, ...]
    """Steps of the run's checkpoints, ascending."""
    damaged: dict[int, CorruptError] = field(default_factory=dict)
    """Steps whose checkpoints are damaged → what is wrong with them, as far as it is known."""
    starts: Sequence[Mapping[str, Any]] = ()
    """What environment.json records of each start, oldest first."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """plan.json, which the latest start wrote."""

    @property
    def last_step(self) -> int:
        """The last step that is recorded, by a number or a checkpoint."""
        return max((*self.numbers, *self.checkpoints), default=0)

    def route(self, step: int) -> Route:
        """Return the way to compute `step` again, from the nearest intact checkpoint before it, and
        on to the first step from it on of which something is recorded.

        Raises ConfigError if the run has not made the step, or nothing is left to begin with;
        CorruptError if that is so because every checkpoint before the step is damaged.
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
        """Return True if there is a checkpoint at `step`, as far as is known not a damaged one."""
        return step in self._intact

    def saves_result_of(self, step: int) -> bool:
        """Return True if a checkpoint holds the weights that this step left: one at this step, at
        which the run did not roll back."""
        return step in self._intact and step not in self.rollbacks

    def undone_by(self, step: int) -> int | None:
        """Return the step after which a rollback undid this step's update; None if it stands."""
        return next(
            (last for last, first in self.rollbacks.items() if first < step <= last),
            None,
        )

    def open_checkpoint(self, step: int, check: Check) -> Checkpoint:
        """Open the checkpoint at `step`, verified by `check`. Raises CorruptError if it is
        damaged."""
        try:
            return open_checkpoint(self.folder / "checkpoints" / step_folder_name(step), check)
        except ConfigError as error:  # a run removes old ones
            raise CorruptError(f"the checkpoint at step {step} was removed meanwhile") from error

    def open_any_checkpoint(self, check: Check) -> Checkpoint | None:
        """Open an intact checkpoint of the run, as `check` says, the earliest; None without one."""
        for step in self.checkpoints:
            with suppress(CorruptError):
                return self.open_checkpoint(step, check)
        return None

    def without(self, step: int, damage: CorruptError) -> RunRecord:
        """Return the record for which the checkpoint at `step` counts as damaged."""
        return replace(self, damaged={**self.damaged, step: damage})

    def start_of(self, step: int) -> Mapping[str, Any]:
        """Return what environment.json records of the start that made `step`: the latest one that
        went on from an earlier step, as each start makes the steps behind it again. An earlier
        version did not record steps; then it is the latest start."""
        for start in reversed(self.starts):
            if number(start.get("step", 0)) < step:
                return start
        return {}

    def layout_of(self, step: int) -> tuple[str, int | None]:
        """Return the layout in which `step` was made, as text, and its rows of a micro-batch; None
        if these are not recorded."""
        start = self.start_of(step)
        layout, micro_batch_size = start.get("layout"), start.get("micro_batch_size")
        if isinstance(layout, str) and isinstance(micro_batch_size, int):
            return layout, micro_batch_size
        degrees = {k: v for k, v in as_table(self.plan.get("layout")).items() if k != "world_size"}
        batch = as_table(self.plan.get("batch"))
        text = ",".join(f"{name}={str(value).lower()}" for name, value in degrees.items())
        return text or "data=1", batch.get("micro_batch_size")

    def config_on(self, step: int, layout: str | None) -> Config:
        """Return the configuration with which to make `step` again: in `layout`, or for None in the
        layout and the micro-batches in which the run made it; in the run's precision."""
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
        """Return the step of the checkpoint that holds the weights with which `step` began, 0 for
        the initial weights; None if they are not saved."""
        before = (step - 1, self.rollbacks.get(step - 1, step - 1))
        return next((each for each in before if each == 0 or each in self._intact), None)

    def _step_before(self, step: int) -> int:
        """Return the step whose update made the weights with which `step` began."""
        return self.rollbacks.get(step - 1, step - 1)

    def _check_beginning(self, step: int) -> None:
        """Raise CorruptError or ConfigError if the steps cannot be made from the initial
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
    """Return the schedule by which each of `steps` was made: `latest`, the run's, or for a step
    before it was extended (`schedule.start_step`) that in the first checkpoint behind the step,
    which was saved under it, or else in the last one before.

    Raises ConfigError if no checkpoint tells.
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
    """Return the schedule in the configuration of the checkpoint at `step`; None if it is damaged
    or was removed meanwhile."""
    path = folder / "checkpoints" / step_folder_name(step)
    with suppress(CorruptError, StorageError):
        Checkpoint(path, read_own_manifest(path), {}).read("config.toml")  # raises if damaged
        return load_config(path / "config.toml").schedule
    return None


def _begins_with(identity: RunIdentity) -> str | None:
    """Return in words what a run with this identity began with; None for random weights."""
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
    """Return what environment.json records of each start, oldest first; none if it is missing or
    damaged, as only people read it otherwise."""
    with suppress(CorruptError, StorageError):
        latest = read_own_json(folder / "environment.json")
        earlier = latest.pop("earlier_starts", [])
        return [*map(as_table, earlier if isinstance(earlier, list) else []), latest]
    return []
