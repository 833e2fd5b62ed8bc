"""Hooks: objects with any of nine methods, called by the trainer in the order they were given.

    class PrintLoss:
        def on_step(self, trainer, step): print(step.step, step.loss)

    Trainer(config, hooks=[PrintLoss()]).fit()

A hook may read what `TrainingRun` names and call `stop(reason)`; an exception in a hook ends the
run like any other error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.config.schema import Config
from pentameter.errors import nearest

if TYPE_CHECKING:
    from pentameter.data.batches.step import TrainingBatches
    from pentameter.data.shards.dataset import Dataset, TokenSplit
    from pentameter.generation.loop import Prompt
    from pentameter.optim.build import AnyOptimizer
    from pentameter.parallel.compute import Compute
    from pentameter.parallel.engine import Engine
    from pentameter.planning.plan import Plan
    from pentameter.processes.world import World
    from pentameter.train.console import Console
    from pentameter.train.run_folder import RunFolder
    from pentameter.train.state import TrainState
    from pentameter.train.supplied import OwnBatches, Supplied

HOOK_METHODS = (
    "on_start",
    "on_step",
    "on_skip",
    "on_epoch",
    "on_eval",
    "on_sample",
    "on_checkpoint",
    "on_end",
    "on_error",
)


class TrainingRun(ABC):
    """The running run that a hook is given, to read and to call; `Trainer` is one.

    `train/start.py` fills it in.
    """

    config: Config
    """The configuration with every value that the Plan derived."""
    plan: Plan
    supplied: Supplied
    """The parts that the user gave in the place of the configuration's."""
    dataset: Dataset
    batches: TrainingBatches | OwnBatches
    evaluations: Mapping[str, TokenSplit]
    """The splits that each evaluation passes over, by name; `val` is what is held out."""
    prompt: Prompt
    """What samples continue."""
    compute: Compute
    run_dir: Path
    folder: RunFolder
    engine: Engine
    optimizer: AnyOptimizer
    state: TrainState
    world: World
    console: Console
    """The console and log.txt; `say` prints a line in the main process, and logs it in every."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the run after the current step, as if it were complete."""

    @abstractmethod
    def record(self, event: str, **values: float | str | None) -> None:
        """Add a line to metrics.jsonl, and tell the trackers; `values` hold its step."""


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, just completed. `step` counts completed steps, so the first is 1."""

    step: int
    tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_memory_bytes: int
    eta_seconds: float


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was not applied, and why."""

    step: int
    reason: str


@dataclass(frozen=True)
class EpochMetrics:
    """A pass over the training split, just completed. `epoch` counts completed passes; `loss` is
    the mean over its target tokens, each as it was when it was trained on."""

    epoch: int
    step: int
    loss: float
    perplexity: float
    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class SampledText:
    """A prompt and its continuation by the model after `step` steps. Only the main process has it,
    and only its hooks are called."""

    step: int
    text: str


@dataclass(frozen=True)
class CheckpointMetrics:
    """A checkpoint that is now on disk."""

    step: int
    path: Path
    bytes: int
    seconds: float
    again: bool = False
    """It replaces the checkpoint of the same step, which a signal had asked for too early."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: `reason` is completed, patience, a signal's name, or a hook's word."""

    step: int
    reason: str
    seconds: float


def is_logged(step: int, config: Config) -> bool:
    """True if a step is logged: every `log.interval` steps, and the first and the last."""
    return step == 1 or step % config.log.interval == 0 or step == config.train.steps


def check_hook(hook: object) -> None:
    """Raise TypeError for an object without hook methods, or with one that nothing would call."""
    known = ", ".join(HOOK_METHODS)
    for name in dir(hook):
        if not name.startswith("on_") or name in HOOK_METHODS or not callable(getattr(hook, name)):
            continue
        near = nearest(name, HOOK_METHODS)
        raise TypeError(
            f"{hook!r} has a method {name}, which is never called"
            f"{f'; did you mean {near}?' if near else '.'} Hooks have any of {known}, and no other "
            "method that begins with on_"
        )
    if not any(hasattr(hook, name) for name in HOOK_METHODS):
        raise TypeError(f"{hook!r} is no hook: it has none of {known}")


class Hooks:
    """The hooks of a run, in order; calls one method on every hook that has it."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self._hooks = tuple(hooks)

    def call(self, method: str, *arguments: Any) -> None:
        """Call `hook.method(*arguments)` for each hook that defines it, in order."""
        for hook in self._hooks:
            function = getattr(hook, method, None)
            if function is not None:
                function(*arguments)

    def tell_error(self, run: TrainingRun, error: Exception) -> None:
        """Call `hook.on_error(run, error)` for each hook that defines it. One that raises only
        gets a warning: the run ends with the first error, and the other hooks hear of it too."""
        for hook in self._hooks:
            try:
                Hooks((hook,)).call("on_error", run, error)
            except Exception as another:
                run.console.say(f"warning: on_error of {type(hook).__name__}: {another!r}")
