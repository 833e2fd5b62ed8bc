"""A run as its hooks see it, and at which of its steps something is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pentameter.config.schema import Config
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.shards.dataset import Dataset, TokenSplit
from pentameter.evaluate.multiple_choice import EncodedQuestions
from pentameter.evaluate.sampled_split import SampledSplit
from pentameter.generation.prompts import Prompt
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


@dataclass(kw_only=True, eq=False)
class TrainingRun:
    """The current run, passed to every hook method: read any attribute, and call `stop` and
    `record`. Attributes change as the run goes on (`state` has the step)."""

    plan: Plan
    supplied: UserComponents
    """The user's own model, optimizer and batches, if given."""
    dataset: Dataset
    batches: TrainingBatches | CustomBatches
    evaluations: Mapping[str, TokenSplit | SampledSplit | EncodedQuestions]
    """The split or questions that each evaluation covers, by name; `val` is the validation split,
    `val-sample` a sample of it."""
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
    """The reason that a hook on this rank gave to `stop`; None if none has called it."""

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


def is_logged(step: int, config: Config) -> bool:
    """Return True if step `step`, counted from 1, is printed and recorded: every `log.interval`
    steps, the first and the last."""
    return step == 1 or step % config.log.interval == 0 or step == config.train.steps


MOST_LOADS = 200
"""Number of times, about, that a long run records its experts' loads, which is as many as a figure
shows. A model with 48 layers of 128 experts takes some 50 kB each time."""


def records_loads(step: int, config: Config) -> bool:
    """Return True if the experts' loads are recorded at `step`, counted from 1. That is so at every
    logged step, or in a long run at some of them, evenly spaced, the first and the last
    included."""
    if config.model.experts.count is None or not is_logged(step, config):
        return False
    n_steps, interval = config.train.steps, config.log.interval
    assert n_steps is not None  # resolved by the plan
    every = interval * -(-n_steps // (interval * MOST_LOADS))
    return step in (1, n_steps) or step % every == 0
