"""Hooks: objects with any of twelve methods, which the trainer calls in the order they were given.

    class PrintLoss:
        def on_step(self, trainer, step): print(step.step, step.loss)

    Trainer(config, hooks=[PrintLoss()]).fit()

A hook may read everything that `TrainingRun` (`run.py`) names and call `stop(reason)`. An exception
in a hook ends the run like any other error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pentameter.errors import did_you_mean
from pentameter.train.run import TrainingRun

HOOK_METHODS = (
    *("on_start", "on_step", "on_experts", "on_ranks", "on_skip", "on_rollback", "on_epoch"),
    *("on_eval", "on_sample", "on_checkpoint", "on_copy", "on_end", "on_error"),
)


@dataclass(frozen=True)
class SampledText:
    """A sampled `text`, prompt included, from the model after `step` steps. Exists on rank 0 only,
    so `on_sample` is called there alone."""

    step: int
    text: str


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
