"""Layouts against one process: what `pentameter verify` does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pentameter.config.schema import Config
from pentameter.errors import TrainingFailedError
from pentameter.planning.layout import Layout
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import MOST_PROCESSES, Case
from pentameter.verify.job import Job
from pentameter.verify.numbers import TOLERANCE, Difference, Kind, StepNumbers, differences
from pentameter.verify.shrink import case_config
from pentameter.verify.workers import CaseFailedError, Workers

TIMEOUT_SECONDS = 120.0
"""For all steps of a case, which take a few seconds."""


@dataclass(frozen=True)
class Outcome:
    """How a case compares with one process. Errors are relative; None where there are none."""

    case: Case
    seconds: float
    loss_error: float | None = None
    """The largest of the losses, in training and in evaluation."""
    gradient_error: float | None = None
    """The largest of the gradients and their norm."""
    parameter_error: float | None = None
    """The largest of the weights."""
    worst: Difference | None = None
    first: Difference | None = None
    """The first beyond TOLERANCE, in the order of a step's computation."""
    failure: str | None = None
    """Why there are no numbers."""
    worker_traceback: str = ""

    @property
    def passed(self) -> bool:
        """Whether the layout gave all numbers, and all of them the one process's."""
        return self.failure is None and self.first is None

    @property
    def problem(self) -> str | None:
        """What is wrong, in a sentence without a full stop; None where nothing is."""
        return self.failure or (None if self.first is None else str(self.first))

    def to_json(self) -> dict[str, Any]:
        """An element of `layouts` in what `verify --json` prints. Infinite errors are null."""
        return {
            "layout": str(self.case),
            "name": self.case.name,
            "world_size": self.case.layout.world_size,
            "loss_error": _finite(self.loss_error),
            "gradient_error": _finite(self.gradient_error),
            "parameter_error": _finite(self.parameter_error),
            "worst_tensor": None if self.worst is None else self.worst.tensor,
            "worst": _difference_json(self.worst),
            "first_difference": _difference_json(self.first),
            "problem": self.problem,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
        }


def verify_layouts(
    small: Config,
    cases: Sequence[Case],
    workers: Workers,
    *,
    n_steps: int = 3,
    prepare: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[Outcome]:
    """The outcome of each case, one after another; a case that fails does not end the others.

    `small` is what `shrink` made of a configuration for these cases. `prepare` (`module:function`)
    is called in each process of a case before it computes, but not in the one process. Raises
    TrainingFailedError where that one fails, as there is then nothing to compare with.
    """
    references: dict[bool | None, list[StepNumbers]] = {}
    for case in cases:
        started = time.monotonic()
        if case.tied_head not in references:
            references[case.tied_head] = _reference(
                small, case.tied_head, workers, n_steps, timeout_seconds
            )
            started = time.monotonic()
        try:
            numbers = _compute(small, case, workers, n_steps, timeout_seconds, prepare)
        except CaseFailedError as error:
            yield Outcome(
                case,
                time.monotonic() - started,
                failure=str(error),
                worker_traceback=error.worker_traceback,
            )
            continue
        plan = make_plan(case_config(small, case))
        found = list(differences(references[case.tied_head], numbers, plan))
        yield _outcome(case, time.monotonic() - started, found)


def _reference(
    small: Config, tied_head: bool | None, workers: Workers, n_steps: int, timeout_seconds: float
) -> list[StepNumbers]:
    """One process's numbers, its batch in one piece."""
    alone = Case(Layout(), tied_head=tied_head)
    try:
        (numbers,) = _compute(small, alone, workers, n_steps, timeout_seconds)
    except CaseFailedError as error:
        raise TrainingFailedError(
            f"the one process that layouts are compared with failed: {error}"
        ) from error
    for step, each in enumerate(numbers):
        if not math.isfinite(each.loss + each.gradient_norm):
            raise TrainingFailedError(
                f"the one process that layouts are compared with has loss {each.loss} and gradient "
                f"norm {each.gradient_norm} in step {step}; lower optimizer.learning_rate"
            )
    return numbers


def _compute(
    small: Config,
    case: Case,
    workers: Workers,
    n_steps: int,
    timeout_seconds: float,
    prepare: str | None = None,
) -> list[list[StepNumbers]]:
    """The numbers of each step, by rank."""
    meeting, n_processes = workers.new_file(), case.layout.world_size
    config = case_config(small, case)
    timeout_seconds *= max(1.0, n_processes / MOST_PROCESSES)  # they share this machine
    jobs = [
        Job(config, n_steps, rank, n_processes, meeting, timeout_seconds, prepare)
        for rank in range(n_processes)
    ]
    return workers.run(jobs, timeout_seconds=timeout_seconds)


def _outcome(case: Case, seconds: float, found: Sequence[Difference]) -> Outcome:
    return Outcome(
        case,
        seconds,
        loss_error=_largest(found, "loss", "evaluation loss"),
        gradient_error=_largest(found, "gradient", "gradient norm"),
        parameter_error=_largest(found, "weight"),
        worst=max(found, key=lambda difference: difference.error),
        first=next((each for each in found if each.error > TOLERANCE), None),
    )


def _largest(found: Iterable[Difference], *kinds: Kind) -> float:
    return max(each.error for each in found if each.kind in kinds)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _difference_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "kind": difference.kind,
        "tensor": difference.tensor,
        "step": difference.step,
        "rank": difference.rank,
        "error": _finite(difference.error),
    }
