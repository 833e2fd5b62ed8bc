"""Hooks: objects with any of twelve methods, which the trainer calls in the order they were given.

    class PrintLoss:
        def on_step(self, trainer, step): print(step.step, step.loss)

    Trainer(config, hooks=[PrintLoss()]).fit()

A hook may read everything that `TrainingRun` names and call `stop(reason)`. An exception in a hook
ends the run like any other error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentameter.config.schema import Config
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.shards.dataset import Dataset, TokenSplit
from pentameter.errors import did_you_mean
from pentameter.evaluate.multiple_choice import EncodedQuestions
from pentameter.generation.loop import Prompt
from pentameter.optim.build import AnyOptimizer
from pentameter.parallel.engine import Engine
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World
from pentameter.record.events import OtherEvent
from pentameter.train.compute import Compute
from pentameter.train.keep.copying import CheckpointCopies
from pentameter.train.keep.run_folder import RunFolder
from pentameter.train.say.console import Console
from pentameter.train.say.event_log import EventLog
from pentameter.train.state import TrainState
from pentameter.train.user_components import CustomBatches, UserComponents

HOOK_METHODS = (
    "on_start",
    "on_step",
    "on_experts",
    "on_ranks",
    "on_skip",
    "on_rollback",
    "on_epoch",
    "on_eval",
    "on_sample",
    "on_checkpoint",
    "on_copy",
    "on_end",
    "on_error",
)


@dataclass(kw_only=True, eq=False)
class TrainingRun:
    """The current run, passed to every hook method: read any attribute, and call `stop` and
    `record`. Attributes change as the run goes on (`state` has the step)."""

    plan: Plan
    supplied: UserComponents
    """The user's own model, optimizer and batches, if given."""
    dataset: Dataset
    batches: TrainingBatches | CustomBatches
    evaluations: Mapping[str, TokenSplit | EncodedQuestions]
    """The split or questions that each evaluation covers, by name; `val` is the validation split.
    """
    prompt: Prompt
    """The prompt that samples continue."""
    compute: Compute
    folder: RunFolder
    engine: Engine
    optimizer: AnyOptimizer
    state: TrainState
    world: World
    console: Console
    """The console and the log; `say` prints a line on rank 0, and logs it on every rank."""
    events: EventLog
    copies: CheckpointCopies
    """The copies of this run's checkpoints in `checkpoint.copy_to`."""
    stop_reason: str | None = field(default=None, init=False)
    """The reason given by a hook on this rank that asked the run to end; None if none did."""

    @property
    def config(self) -> Config:
        """The configuration with every derived value filled in."""
        return self.plan.config

    @property
    def run_dir(self) -> Path:
        """The run folder's path."""
        return self.folder.path

    def stop(self, reason: str) -> None:
        """End the run after the current step, as complete; `reason` is printed and recorded. A call
        on any rank ends it on all."""
        self.stop_reason = reason

    def record(self, event: str, **values: float | str | None) -> None:
        """Append an event of your own to metrics.jsonl, and send it to the trackers. `values` must
        include `step`; the file's `time` is the run's own. On ranks other than 0, do nothing."""
        step = values.pop("step", None)
        if not isinstance(step, int):
            raise TypeError(f"record({event!r}, step={step!r}): an event has the number of a step")
        self.events.write(OtherEvent(step, event, values))


@dataclass(frozen=True)
class SampledText:
    """A sampled `text`, prompt included, from the model after `step` steps. Exists on rank 0 only,
    so `on_sample` is called there alone."""

    step: int
    text: str


def is_logged(step: int, config: Config) -> bool:
    """Return True if step `step`, counted from 1, is printed and recorded: every `log.interval`
    steps, the first and the last."""
    return step == 1 or step % config.log.interval == 0 or step == config.train.steps


MOST_LOADS = 200
"""Times that a run's expert loads are recorded, about, at most: as many as a picture shows. A model
with 48 layers of 128 experts takes some 50 kB each time."""


def records_loads(step: int, config: Config) -> bool:
    """Return True if the loads of the experts are recorded at step `step`, counted from 1: at the
    logged steps, or in a long run at every so many of them, with the first and the last."""
    if config.model.n_experts is None or not is_logged(step, config):
        return False
    n_steps, interval = config.train.steps, config.log.interval
    assert n_steps is not None  # resolved by the plan
    every = interval * -(-n_steps // (interval * MOST_LOADS))
    return step in (1, n_steps) or step % every == 0


def check_hook(hook: object) -> None:
    """Raise TypeError for an object without any method in HOOK_METHODS, or with another method
    whose name begins with `on_`: a misspelled one would never be called."""
    known = ", ".join(HOOK_METHODS)
    for name in dir(hook):
        if not name.startswith("on_") or name in HOOK_METHODS or not callable(getattr(hook, name)):
            continue
        raise TypeError(
            f"{hook!r} has a method {name}, which is never called"
            f"{did_you_mean(name, HOOK_METHODS) or '.'} Hooks have any of {known}, and no other "
            "method that begins with on_"
        )
    if not any(hasattr(hook, name) for name in HOOK_METHODS):
        raise TypeError(f"{hook!r} is no hook: it has none of {known}")


class Hooks:
    """A run's hooks, called in the order given."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self._hooks = tuple(hooks)

    def call(self, method: str, *arguments: Any) -> None:
        """Call `hook.method(*arguments)` for each hook that defines it, in order. An exception is
        not caught."""
        for hook in self._hooks:
            function = getattr(hook, method, None)
            if function is not None:
                function(*arguments)

    def tell_error(self, run: TrainingRun, error: Exception) -> None:
        """Call `hook.on_error(run, error)` for each hook that defines it. An exception in one is
        printed as a warning, so that the others are called too."""
        for hook in self._hooks:
            try:
                Hooks((hook,)).call("on_error", run, error)
            except Exception as another:
                run.console.say(f"warning: on_error of {type(hook).__name__}: {another!r}")
