"""What processes report of their steps, and how far that is from what one process reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pentameter.planning.architecture import parameter_table
from pentameter.planning.plan import Plan

TOLERANCE = 1e-10
"""Largest relative difference. Layouts add up in other orders, which in float64 costs some 1e-15;
the smallest fault costs some 1e-3. It is not for widening."""

Float64 = npt.NDArray[np.float64]
Kind = Literal["loss", "gradient", "gradient norm", "weight", "evaluation loss"]


@dataclass(frozen=True)
class StepNumbers:
    """What a process has of one step, tensors whole. A tied weight's copy has the weight's name."""

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
    """How far a number or tensor of one process is from the true one."""

    kind: Kind
    tensor: str
    """The parameter's name; the kind where there is none."""
    step: int
    rank: int
    error: float
    """Largest absolute difference ÷ largest absolute true value; infinite where there is no
    comparing: something not finite, missing, or of another shape."""
    remark: str = ""

    @property
    def subject(self) -> str:
        """What differs: `loss`, `gradient of head.weight`."""
        return self.kind if self.tensor == self.kind else f"{self.kind} of {self.tensor}"

    def __str__(self) -> str:
        what = self.remark or f"is off by {self.error:.1e}"
        return f"the {self.subject} {what} (step {self.step}, rank {self.rank})"


def differences(
    reference: Sequence[StepNumbers], ranks: Sequence[Sequence[StepNumbers]], plan: Plan
) -> Iterator[Difference]:
    """Every number of every process against one process's, in the order in which a step computes
    them: loss, gradients from the head to the embedding, their norm, weights, evaluation loss.

    So the first that is off is where a fault shows first.
    """
    names = [spec.name for spec in plan.table]
    expected = [_names(plan, rank) for rank in range(len(ranks))]
    for step, true in enumerate(reference):
        here = [numbers[step] for numbers in ranks]
        yield from _scalars("loss", step, true.loss, [n.loss for n in here])
        gradients = [n.gradients for n in here]
        yield from _tensors("gradient", step, true.gradients, gradients, names[::-1], expected)
        yield from _scalars(
            "gradient norm", step, true.gradient_norm, [n.gradient_norm for n in here]
        )
        weights = [n.weights for n in here]
        yield from _tensors("weight", step, true.weights, weights, names, expected)
        yield from _scalars(
            "evaluation loss", step, true.evaluation_loss, [n.evaluation_loss for n in here]
        )


def _names(plan: Plan, rank: int) -> set[str]:
    """The parameters that a process has, a copy of a tied one included."""
    stages = plan.layout.stages_of(plan.layout.coordinates(rank)["pipeline"])
    ranges = [plan.stages[number] for number in stages]
    return {
        spec.name
        for layers in ranges
        for spec in parameter_table(
            plan.config.model, first_layer=layers.start, last_layer=layers.stop
        )
    }


def _scalars(kind: Kind, step: int, true: float, values: Iterable[float]) -> Iterator[Difference]:
    for rank, value in enumerate(values):
        yield Difference(kind, kind, step, rank, relative_error(value, true))


def _tensors(
    kind: Kind,
    step: int,
    true: Mapping[str, Float64],
    ranks: Sequence[Mapping[str, Float64]],
    names: Sequence[str],
    expected: Sequence[set[str]],
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
            error = math.inf if remark else relative_error(tensors[name], true[name])
            yield Difference(kind, name, step, rank, error, remark)
    for rank, tensors in enumerate(ranks):
        for name in sorted(set(tensors) - set(names)):
            yield Difference(kind, name, step, rank, math.inf, "should not be there")


def relative_error(value: Float64 | float, true: Float64 | float) -> float:
    """Largest absolute difference ÷ largest absolute true value (1 where that is 0); infinite
    where either holds something that is not finite."""
    value, true = np.asarray(value), np.asarray(true)
    if not (np.isfinite(value).all() and np.isfinite(true).all()):
        return math.inf
    difference = float(np.abs(value - true).max(initial=0.0))
    return difference / (float(np.abs(true).max(initial=0.0)) or 1.0)
