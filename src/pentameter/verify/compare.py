"""Comparison of every number in a step (losses, gradients, weights) on each layout with one
process's: the work behind `pentameter verify`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pentameter.config.schema import Config
from pentameter.errors import ConfigError, TrainingFailedError
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.outline import ModelOutline, outline_of_gpt
from pentameter.planning.plan import Plan, make_plan
from pentameter.record.events import strict
from pentameter.verify.cases import MOST_PROCESSES, Case
from pentameter.verify.jobs import Float64, Job, StepNumbers
from pentameter.verify.sent_model import SentModel
from pentameter.verify.shrink import case_config
from pentameter.verify.workers import CaseFailedError, Workers

TOLERANCE = 1e-10
"""Largest relative difference that counts as equal. Layouts sum in another order, which in float64
costs some 1e-15; the smallest fault costs some 1e-3. Do not widen it."""

GRADIENT_FLOOR = 1e-2
"""Smallest divisor for a gradient's error, as a fraction of the step's largest gradient.

Some gradients are 0 except for rounding, among them a key projection's bias: its contribution to a
query's scores changes no probability. Their summands are as large as those in other gradients and
cancel to some 1e-16 of the largest gradient, so an error relative to their own values means
nothing. With this floor, up to TOLERANCE · GRADIENT_FLOOR = 1e-12 of the largest gradient counts as
rounding. A gradient that is 1e-8 of the largest and wrong by a thousandth is still off by 1e-9.
"""

TIMEOUT_SECONDS = 120.0
"""Seconds after which a case (all its steps on all ranks) counts as hanging; it takes a few."""

Kind = Literal[
    "loss", "gradient", "gradient norm", "weight", "evaluation loss", "row losses", "next logits"
]


READ: tuple[Kind, ...] = ("loss", "evaluation loss", "row losses", "next logits")
"""Kinds of numbers that a forward pass gives."""


@dataclass(frozen=True)
class Difference:
    """The distance of one number or tensor, on one rank in one step, from the one process's: its
    relative error."""

    kind: Kind
    tensor: str
    """The parameter's name; for a number (loss, norm), the same as `kind`."""
    step: int
    rank: int
    error: float
    """Largest absolute difference ÷ largest absolute true value. For a gradient the divisor is at
    least GRADIENT_FLOOR times the step's largest gradient. Infinite if there is no comparison: a
    value is not finite, missing, or has another shape."""
    remark: str = ""

    @property
    def subject(self) -> str:
        """The quantity that differs, in words: `loss`, `gradient of head.weight`."""
        return self.kind if self.tensor == self.kind else f"{self.kind} of {self.tensor}"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `verify --json` prints; an infinite error is null."""
        names = ("kind", "tensor", "step", "rank", "error")
        return strict({name: getattr(self, name) for name in names})

    def __str__(self) -> str:
        verb = "are" if self.kind in ("row losses", "next logits") else "is"
        what = self.remark or f"{verb} off by {self.error:.1e}"
        return f"the {self.subject} {what} (step {self.step}, rank {self.rank})"


@dataclass(frozen=True)
class Outcome:
    """Result of comparing one case with one process. Errors are relative, and the largest over
    steps, ranks and tensors. They are None if the case failed and gave no numbers."""

    case: Case
    seconds: float
    loss_error: float | None = None
    """Largest error in a loss, in training or evaluation, or in logits."""
    gradient_error: float | None = None
    """Largest error in a gradient before clipping, or in the gradients' norm."""
    parameter_error: float | None = None
    """Largest error in a weight after an update."""
    worst: Difference | None = None
    """The largest difference, even if within TOLERANCE; None if the case failed."""
    first: Difference | None = None
    """The first difference beyond TOLERANCE, in the order in which a step computes its numbers,
    which is the one closest to the fault; None if there is none."""
    failure: str | None = None
    """Sentence that says why there are no numbers: a process failed, died or hangs. None if there
    are numbers."""
    worker_traceback: str = ""

    @property
    def passed(self) -> bool:
        """True if the layout gave all numbers, and all equal the one process's within TOLERANCE."""
        return self.failure is None and self.first is None

    @property
    def problem(self) -> str | None:
        """The failure or the first difference, as a sentence without a full stop; None if
        the case passed."""
        return self.failure or (None if self.first is None else str(self.first))

    def to_json(self) -> dict[str, Any]:
        """Return an element of `layouts` for `verify --json`. Infinite errors are null."""
        errors = ("loss_error", "gradient_error", "parameter_error")
        return {
            "layout": str(self.case),
            "name": self.case.name,
            "world_size": self.case.layout.world_size,
            **strict({name: getattr(self, name) for name in errors}),
            "worst_tensor": None if self.worst is None else self.worst.tensor,
            "worst": None if self.worst is None else self.worst.to_json(),
            "first_difference": None if self.first is None else self.first.to_json(),
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
    """Compute `n_steps` steps for each case and for one process, and yield each case's Outcome, in
    order. A case that fails does not end the others.

    Args:
        small: the configuration that `shrink` made for these cases.
        cases: the layouts and settings to compare with one process.
        workers: the started worker processes.
        n_steps: number of optimizer steps.
        prepare: `module:function`, called in each process of a case before it computes, but not
            in the one process; tests plant faults with it. None calls nothing.
        timeout_seconds: longest time for one case with up to MOST_PROCESSES ranks; in proportion
            longer for more.
        model: a custom model; None for the built-in GPT.
        outline_of: function from a configuration to the model's outline (its parameters, and how
            they may be sharded).

    Raises ConfigError for less than one step, and TrainingFailedError if the one process fails, as
    there is then no reference.
    """
    if n_steps < 1:
        raise ConfigError(f"steps={n_steps} must be 1 or more: there is nothing to compare")

    def compute(case: Case, prepare: str | None = None) -> list[list[StepNumbers]]:
        """Return each rank's loss, gradients and weights after each step, indexed by rank. A
        worker calls the function `prepare` ("module:name") before it builds the model."""
        file, n_processes = workers.new_file(), case.layout.world_size
        is_layout = case != case.alone
        config = case_config(small, case)
        seconds = timeout_seconds * max(1.0, n_processes / MOST_PROCESSES)  # on the same cores
        return workers.run(
            [
                Job(config, n_steps, rank, n_processes, file, seconds, prepare, model, is_layout)
                for rank in range(n_processes)
            ]
        )

    references: dict[Case, list[StepNumbers]] = {}
    for case in cases:
        started = time.monotonic()
        if case.alone not in references:
            references[case.alone] = _reference(compute, case.alone)
            started = time.monotonic()
        try:
            numbers = compute(case, prepare)
        except CaseFailedError as error:
            seconds = time.monotonic() - started
            trace = error.worker_traceback
            yield Outcome(case, seconds, failure=str(error), worker_traceback=trace)
            continue
        plan = make_plan(case_config(small, case), outline_of=outline_of)
        found = list(differences(references[case.alone], numbers, plan))
        yield Outcome(
            case,
            time.monotonic() - started,
            loss_error=_largest(found, *READ),
            gradient_error=_largest(found, "gradient", "gradient norm"),
            parameter_error=_largest(found, "weight"),
            worst=max(found, key=lambda difference: difference.error),
            first=next((each for each in found if each.error > TOLERANCE), None),
        )


def _reference(
    compute: Callable[[Case], list[list[StepNumbers]]], alone: Case
) -> list[StepNumbers]:
    """Compute the one process's steps without micro-batches, the case `alone`, and return its
    numbers for each step. `compute` runs a case and returns each rank's numbers by step. Raises
    TrainingFailedError if the process fails, or a loss or norm is not finite."""
    try:
        (numbers,) = compute(alone)
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


# -- number by number ---------------------------------------------------------------------------


def differences(
    reference: Sequence[StepNumbers], ranks: Sequence[Sequence[StepNumbers]], plan: Plan
) -> Iterator[Difference]:
    """Yield the Difference between each number on each rank and the one process's.

    reference: the one process's numbers, by step. ranks: each rank's numbers, by step. plan: the
    case's, which says which parameters each rank holds. Differences come in the order in which a
    step computes the numbers, so that the first one beyond the tolerance is closest to the fault:
    loss, gradients from the head to the embedding, their norm, weights; evaluation loss, row losses
    and next logits.
    """
    names = [spec.name for spec in plan.table]
    specs = [_specs(plan, rank) for rank in range(len(ranks))]
    expected = [{spec.name for spec in of_rank} for of_rank in specs]
    trained = [{spec.name for spec in of_rank if spec.is_trained} for of_rank in specs]
    for step, true in enumerate(reference):
        by_rank = [numbers[step] for numbers in ranks]
        yield from _scalars("loss", step, [n.loss for n in (true, *by_rank)])
        gradients = [n.gradients for n in by_rank]
        floor = GRADIENT_FLOOR * max(map(_largest_value, true.gradients.values()), default=0.0)
        yield from _tensors(
            "gradient", step, true.gradients, gradients, names[::-1], trained, floor=floor
        )
        yield from _scalars("gradient norm", step, [n.gradient_norm for n in (true, *by_rank)])
        weights = [n.weights for n in by_rank]
        yield from _tensors("weight", step, true.weights, weights, names, expected)
        yield from _scalars("evaluation loss", step, [n.evaluation_loss for n in (true, *by_rank)])
        if true.row_losses is not None and true.next_logits is not None:
            yield from _scalars("row losses", step, [n.row_losses for n in (true, *by_rank)])
            yield from _scalars("next logits", step, [n.next_logits for n in (true, *by_rank)])


def _specs(plan: Plan, rank: int) -> list[ParameterSpec]:
    """Return the parameters that `rank` holds under the plan, including its replica of a tied
    one."""
    stages = plan.layout.stages_of(plan.layout.coordinates(rank)["pipeline"])
    names = frozenset().union(*(plan.stage_names[number] for number in stages))
    return [spec for spec in plan.table if spec.name in names]


def _scalars(
    kind: Kind, step: int, values: Sequence[float | Float64 | None]
) -> Iterator[Difference]:
    """Compare one number (or one array without a name) of step `step` between a one-process run and
    each rank of a parallel one; yield a Difference for each rank. `values` has the one process's
    value first, then each rank's, None where it is missing."""
    true, *of_ranks = values
    assert true is not None
    for rank, value in enumerate(of_ranks):
        if value is None or np.shape(value) != np.shape(true):
            remark = f"are {'missing' if value is None else f'of shape {np.shape(value)}'}"
            yield Difference(kind, kind, step, rank, math.inf, remark)
        else:
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
    """Return the largest absolute difference ÷ the largest absolute true value. The divisor is at
    least `floor`; it is 1 if both are 0.

    `value` and `true` are numbers, or arrays of the same shape. Returns infinity if either holds a
    value that is not finite.
    """
    value, true = np.asarray(value), np.asarray(true)
    if not (np.isfinite(value).all() and np.isfinite(true).all()):
        return math.inf
    return _largest_value(value - true) / (max(_largest_value(true), floor) or 1.0)


def _largest_value(array: Float64) -> float:
    return float(np.abs(array).max(initial=0.0))
