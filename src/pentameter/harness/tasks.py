"""`lm-eval` tasks, found by name and run with a `HarnessModel`. Errors are in plain words."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from pentameter.errors import ConfigError, PentameterError, either, printable
from pentameter.harness.model import HarnessModel

LONGEST_LINE = 300
"""Maximum number of characters quoted of another library's message."""


@dataclass(frozen=True)
class TaskResult:
    """The metrics of a task, or of a group of tasks. `examples` is the number of questions (None:
    not counted), `version` the harness's version of the task."""

    name: str
    metrics: dict[str, float]
    """Metric name in the harness → value, such as `acc` and `acc_stderr`; `NAME,FILTER` if the task
    filters answers."""
    n_shot: int | None
    """Solved examples before each question; None for a group."""
    examples: int | None
    version: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, with `n_shot`, `examples` and `version` beside them."""
        about = {"n_shot": self.n_shot, "examples": self.examples, "version": self.version}
        return {**self.metrics, **about}

    def __str__(self) -> str:
        """Format as a line: name, each metric ± its standard error, shots, number of examples."""
        figures = []
        for key, value in self.metrics.items():
            name, comma, filtered = key.partition(",")
            if not name.endswith("_stderr"):
                error = self.metrics.get(f"{name}_stderr{comma}{filtered}")
                spread = "" if error is None or math.isnan(error) else f" ± {error:.4f}"
                figures.append(f"{key} {value:.4f}{spread}")
        shots = [] if self.n_shot is None else [f"{self.n_shot}-shot"]
        counted = [] if self.examples is None else [f"{self.examples:,} examples"]
        return f"{self.name}: " + " · ".join([*figures, *shots, *counted])


def run_tasks(
    model: HarnessModel, tasks: Sequence[Any], *, n_fewshot: int | None, limit: int | None
) -> list[TaskResult]:
    """Run tasks and groups from `find_tasks`; return a result for each, and for each task in a
    group, in the harness's order.

    n_fewshot: solved examples before each question; None for each task's own number. limit:
    questions per task, from its first; None for all. Raises ConfigError if a task fails or a text
    cannot be scored.
    """
    try:
        found = simple_evaluate(
            model, tasks=list(tasks), num_fewshot=n_fewshot, limit=limit, log_samples=False
        )
    except PentameterError:
        raise
    except Exception as error:  # a task may be code, and its metrics other libraries
        raise ConfigError(f"lm-eval cannot run the tasks: {_first_line(error)}") from error
    assert found is not None  # in the only process
    return [_result(name, found) for name in found["results"]]


def _result(name: str, found: Any) -> TaskResult:
    metrics, counts = found["results"][name], found.get("n-samples", {}).get(name)
    version = found.get("versions", {}).get(name)
    return TaskResult(
        name=name,
        metrics={
            key.removesuffix(",none"): float(value)
            for key, value in metrics.items()
            if "," in key and isinstance(value, Real)  # NumPy's too
        },
        n_shot=found.get("n-shot", {}).get(name),
        examples=None if counts is None else counts["effective"],
        version=None if version is None else str(version),
    )


def find_tasks(names: Sequence[str], folder: Path | None) -> list[Any]:
    """Load the tasks and groups with these names, with their data, from the harness's own and the
    YAML files in `folder` (None: the harness's own alone).

    Raises ConfigError for an unknown name, suggesting similar ones, and for a task that cannot be
    opened, such as one whose data would have to be downloaded.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tasks-dir {folder} is no folder; give one of tasks' YAML files")
    if folder is not None:
        # Reading the harness's own thousands of files takes seconds.
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if all(name in own.task_index for name in names):
            with suppress(ConfigError):  # a group here may name tasks there
                return [each for name in names for each in _opened(own, name)]
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name[:100], manager.task_index, n=3)
            hint = f" (did you mean {either(near)}?)" if near else ""
            raise ConfigError(
                f"--tasks {printable(name)}: lm-eval knows no such task{hint}; one of your own is "
                "a YAML file in --tasks-dir"
            )
    return [each for name in names for each in _opened(manager, name)]


def _opened(manager: TaskManager, name: str) -> list[Any]:
    """Load the group, the task, or the tasks behind the tag that `name` denotes. Raises ConfigError
    if one cannot be opened."""
    try:
        found = manager.load([name])
    except Exception as error:  # a task may be code, and libraries open its data
        raise ConfigError(
            f"the task {name} cannot be opened: {_first_line(error)}. The data of lm-eval's own "
            "tasks is downloaded from the Hugging Face hub at first: that takes a network, or its "
            "cache from a machine with one (HF_HOME); a task in --tasks-dir may read local files"
        ) from error
    group = found["groups"].get(name)
    return list(found["tasks"].values()) if group is None else [group]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {printable(lines[0])[:LONGEST_LINE].rstrip('.')}"
