"""Layouts compared with one process, number by number: what `pentameter verify` does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pentameter.config.schema import Config
from pentameter.errors import TrainingFailedError
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.layout import Layout
from pentameter.planning.outline import ModelOutline, outline_of_gpt
from pentameter.planning.plan import Plan, make_plan
from pentameter.verify.cases import MOST_PROCESSES, Case
from pentameter.verify.shrink import case_config
from pentameter.verify.workers import CaseFailedError, Job, Workers

if TYPE_CHECKING:  # which imports torch
    from pentameter.verify.proof import SentModel

TOLERANCE = 1e-10
"""Largest relative difference. Layouts add up in other orders, which in float64 costs some 1e-15;
the smallest fault costs some 1e-3. It is not for widening."""

GRADIENT_FLOOR = 1e-2
"""Smallest divisor of a gradient's error, as a fraction of the step's largest gradient.

Some gradients are 0 but for rounding, a key projection's bias among them: what it adds to the
scores of a query changes no probability. Their summands are as large as those of other gradients
and cancel, to some 1e-16 of the largest gradient, so that an error relative to their own values
means nothing. With the floor, up to TOLERANCE · GRADIENT_FLOOR = 1e-12 of the largest gradient
counts as rounding. A gradient of 1e-8 of the largest that is wrong by a thousandth is off by 1e-9
still."""

TIMEOUT_SECONDS = 120.0
"""Time for all steps of a case, which take a few seconds."""

Float64 = npt.NDArray[np.float64]
Kind = Literal["loss", "gradient", "gradient norm", "weight", "evaluation loss"]


@dataclass(frozen=True)
class StepNumbers:
    """One rank's results of one step, all tensors gathered to full size.

    A copy of a tied weight has the weight's name.
    """

    loss: float
    gradients: Mapping[str, Float64]
    """Before clipping."""
    gradient_norm: float
    weights: Mapping[str, Float64]
    """After clipping and the optimizer's step."""
    evaluation_loss: float
    """With those weights."""


@dataclass(frozen=True)
class Difference:
    """The relative error of one number or tensor of one rank, against that of the one process."""

    kind: Kind
    tensor: str
    """The parameter's name; the kind where there is none."""
    step: int
    rank: int
    error: float
    """Largest absolute difference ÷ largest absolute true value, of a gradient ÷ at least
    GRADIENT_FLOOR of the step's largest gradient; infinite where there is no comparing: something
    not finite, missing, or of another shape."""
    remark: str = ""

    @property
    def subject(self) -> str:
        """The name of what differs: `loss`, `gradient of head.weight`."""
        return self.kind if self.tensor == self.kind else f"{self.kind} of {self.tensor}"

    def __str__(self) -> str:
        what = self.remark or f"is off by {self.error:.1e}"
        return f"the {self.subject} {what} (step {self.step}, rank {self.rank})"


@dataclass(frozen=True)
class Outcome:
    """The result of comparing a case with one process. Errors are relative; None for no numbers."""

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
        """True if the layout gave all numbers, and all of them equal the one process's."""
        return self.failure is None and self.first is None

    @property
    def problem(self) -> str | None:
        """The fault, in a sentence without a full stop; None where there is none."""
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
    model: SentModel | None = None,
    outline_of: Callable[[Config], ModelOutline] = outline_of_gpt,
) -> Iterator[Outcome]:
    """The outcome of each case, one after another; a case that fails does not end the others.

    `small` is what `shrink` made of a configuration for these cases. `prepare` (`module:function`)
    is called in each process of a case before it computes, but not in the one process. `model` is
    somebody's own, and `outline_of` outlines it. Raises TrainingFailedError where the one process
    fails, as there is then nothing to compare with.
    """

    def compute(case: Case, prepare: str | None = None) -> list[list[StepNumbers]]:
        """The numbers of each step, by rank."""
        file, n_processes = workers.new_file(), case.layout.world_size
        config = case_config(small, case)
        seconds = timeout_seconds * max(1.0, n_processes / MOST_PROCESSES)  # they share the machine
        return workers.run(
            [
                Job(config, n_steps, rank, n_processes, file, seconds, prepare, model)
                for rank in range(n_processes)
            ]
        )

    references: dict[bool | None, list[StepNumbers]] = {}
    for case in cases:
        started = time.monotonic()
        if case.tied_head not in references:
            references[case.tied_head] = _reference(compute, case.tied_head)
            started = time.monotonic()
        try:
            numbers = compute(case, prepare)
        except CaseFailedError as error:
            seconds = time.monotonic() - started
            trace = error.worker_traceback
            yield Outcome(case, seconds, failure=str(error), worker_traceback=trace)
            continue
        plan = make_plan(case_config(small, case), outline_of=outline_of)
        found = list(differences(references[case.tied_head], numbers, plan))
        yield Outcome(
            case,
            time.monotonic() - started,
            loss_error=_largest(found, "loss", "evaluation loss"),
            gradient_error=_largest(found, "gradient", "gradient norm"),
            parameter_error=_largest(found, "weight"),
            worst=max(found, key=lambda difference: difference.error),
            first=next((each for each in found if each.error > TOLERANCE), None),
        )


def _reference(
    compute: Callable[[Case], list[list[StepNumbers]]], tied_head: bool | None
) -> list[StepNumbers]:
    """One process's numbers, its batch in one piece."""
    try:
        (numbers,) = compute(Case(Layout(), tied_head=tied_head))
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


# -- number by number ---------------------------------------------------------------------------


def differences(
    reference: Sequence[StepNumbers], ranks: Sequence[Sequence[StepNumbers]], plan: Plan
) -> Iterator[Difference]:
    """The differences of every number of every rank from the one process's.

    They come in the order in which a step computes the numbers, so that the first that is off is
    where a fault shows first: loss, gradients from the head to the embedding, their norm, weights,
    evaluation loss.
    """
    names = [spec.name for spec in plan.table]
    specs = [_specs(plan, rank) for rank in range(len(ranks))]
    expected = [{spec.name for spec in of_rank} for of_rank in specs]
    trained = [{spec.name for spec in of_rank if spec.is_trained} for of_rank in specs]
    for step, true in enumerate(reference):
        here = [numbers[step] for numbers in ranks]
        yield from _scalars("loss", step, [n.loss for n in (true, *here)])
        gradients = [n.gradients for n in here]
        floor = GRADIENT_FLOOR * max(map(_largest_value, true.gradients.values()), default=0.0)
        yield from _tensors(
            "gradient", step, true.gradients, gradients, names[::-1], trained, floor=floor
        )
        yield from _scalars("gradient norm", step, [n.gradient_norm for n in (true, *here)])
        weights = [n.weights for n in here]
        yield from _tensors("weight", step, true.weights, weights, names, expected)
        yield from _scalars("evaluation loss", step, [n.evaluation_loss for n in (true, *here)])


def _specs(plan: Plan, rank: int) -> list[ParameterSpec]:
    """The parameters that a rank has, a copy of a tied one included."""
    stages = plan.layout.stages_of(plan.layout.coordinates(rank)["pipeline"])
    names = frozenset().union(*(plan.stage_names[number] for number in stages))
    return [spec for spec in plan.table if spec.name in names]


def _scalars(kind: Kind, step: int, values: Sequence[float]) -> Iterator[Difference]:
    """The differences of ranks' numbers from the first, which is the one process's."""
    true, *of_ranks = values
    for rank, value in enumerate(of_ranks):
        yield Difference(kind, kind, step, rank, relative_error(value, true))


def _tensors(
    kind: Kind,
    step: int,
    true: Mapping[str, Float64],
    ranks: Sequence[Mapping[str, Float64]],
    names: Sequence[str],
    expected: Sequence[set[str]],
    *,
    floor: float = 0.0,
) -> Iterator[Difference]:
    for name in names:
        for rank, tensors in enumerate(ranks):
            if name not in tensors and name not in expected[rank]:
                continue
            remark = ""
            if name not in expected[rank]:
                remark = "should not be there"
            elif name not in tensors:
                remark = "is missing"
            elif tensors[name].shape != true[name].shape:
                remark = f"has shape {tensors[name].shape}, not {true[name].shape}"
            error = math.inf if remark else relative_error(tensors[name], true[name], floor)
            yield Difference(kind, name, step, rank, error, remark)
    for rank, tensors in enumerate(ranks):
        for name in sorted(set(tensors) - set(names)):
            yield Difference(kind, name, step, rank, math.inf, "should not be there")


def relative_error(value: Float64 | float, true: Float64 | float, floor: float = 0.0) -> float:
    """Largest absolute difference ÷ largest absolute true value, or ÷ `floor` where that is more
    (÷ 1 where both are 0); infinite where either holds something that is not finite."""
    value, true = np.asarray(value), np.asarray(true)
    if not (np.isfinite(value).all() and np.isfinite(true).all()):
        return math.inf
    return _largest_value(value - true) / (max(_largest_value(true), floor) or 1.0)


def _largest_value(array: Float64) -> float:
    return float(np.abs(array).max(initial=0.0))
