"""Comparing: every number counts, a missing one and one that is not finite too."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pentameter.config.files.load import load_config
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import chosen_cases
from pentameter.verify.compare import TOLERANCE, differences, relative_error
from pentameter.verify.jobs import StepNumbers
from pentameter.verify.shrink import case_config, shrink

EMBEDDING = "token_embedding.weight"


@pytest.fixture(scope="module")
def plan():
    config = load_config("gpt2-124m")
    (case,) = chosen_cases(config, "pipeline=2")
    return make_plan(case_config(shrink(config, [case]), case))


@pytest.fixture(scope="module")
def true(plan):
    tensors = {spec.name: np.ones(spec.shape) for spec in plan.table}
    return StepNumbers(2.0, tensors, 3.0, tensors, 2.5)


def ranks(plan, true):
    """What two stages report: each its own, the last one the embedding's copy too."""
    first = {name for name in true.weights if not name.startswith("final")}
    last = {name for name in true.weights if not name.startswith("position")}
    held = []
    for stage, names in zip(plan.stages, (first, last), strict=True):
        own = [
            name
            for name in true.weights
            if name in names and (not name.startswith("blocks") or int(name.split(".")[1]) in stage)
        ]
        gradients, weights = ({name: true.weights[name].copy() for name in own} for _ in range(2))
        held.append(replace(true, gradients=gradients, weights=weights))
    return held


def beyond(plan, true, numbers):
    found = differences([true], [[each] for each in numbers], plan)
    return [difference for difference in found if difference.error > TOLERANCE]


def test_equal_numbers_do_not_differ(plan, true):
    assert not beyond(plan, true, ranks(plan, true))


def test_the_first_difference_is_in_the_order_of_computation(plan, true):
    order = []
    for kind in ("evaluation_loss", "weights", "gradient_norm", "gradients", "loss"):
        numbers = ranks(plan, true)
        for other in (*order, kind):
            wrong = getattr(numbers[1], other)
            wrong = {n: t * 2 for n, t in wrong.items()} if isinstance(wrong, dict) else wrong * 2
            numbers[1] = replace(numbers[1], **{other: wrong})
        order.append(kind)
        first = beyond(plan, true, numbers)[0]
        names = {"gradients": "gradient", "weights": "weight"}
        assert first.kind == names.get(kind, kind.replace("_", " "))
        assert first.rank == 1
        assert first.error == 1.0
        if kind == "gradients":
            assert first.tensor == "final_norm.bias"  # backward begins there
        if kind == "weights":
            assert first.tensor == EMBEDDING


def test_a_copy_of_a_tied_weight_is_compared(plan, true):
    numbers = ranks(plan, true)
    numbers[1].weights[EMBEDDING][0, 0] += 1e-9
    (found,) = beyond(plan, true, numbers)
    assert (found.kind, found.tensor, found.rank) == ("weight", EMBEDDING, 1)
    assert found.error == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own: own.pop(EMBEDDING), "is missing"),
        (
            lambda own: own.update({"position_embedding.weight": np.ones((8, 8))}),
            "should not be there",
        ),
        (lambda own: own.update({"blocks.9.other": np.ones(3)}), "should not be there"),
        (lambda own: own.update({EMBEDDING: np.ones((13, 8))}), "has shape (13, 8), not (15, 8)"),
        (lambda own: own[EMBEDDING].__setitem__((0, 0), math.nan), "is off by inf"),
        (lambda own: own[EMBEDDING].__setitem__((0, 0), math.inf), "is off by inf"),
    ],
)
@pytest.mark.parametrize("kind", ["gradients", "weights"])
def test_what_cannot_be_compared_is_a_difference(spoil, said, kind, plan, true):
    numbers = ranks(plan, true)
    spoil(getattr(numbers[1], kind))
    (found,) = beyond(plan, true, numbers)
    assert found.error == math.inf
    assert found.kind == kind.removesuffix("s")
    assert said in str(found)


def with_gradient(numbers, name, tensor):
    return replace(numbers, gradients={**numbers.gradients, name: tensor})


def test_rounding_of_a_gradient_that_cancels_is_no_difference(plan, true):
    zero = true.gradients[EMBEDDING] * 0
    true = with_gradient(true, EMBEDDING, zero + 3e-17)
    numbers = [with_gradient(each, EMBEDDING, zero - 5e-17) for each in ranks(plan, true)]
    assert not beyond(plan, true, numbers)


@pytest.mark.parametrize("size", [1e-3, 1e-8])
@pytest.mark.parametrize("factor", [2.0, 0.0, 0.999])
def test_a_fault_in_a_small_gradient_is_a_difference(size, factor, plan, true):
    small = true.gradients[EMBEDDING] * size
    true = with_gradient(true, EMBEDDING, small)
    first, last = (with_gradient(each, EMBEDDING, small) for each in ranks(plan, true))
    assert not beyond(plan, true, [first, last])
    (found,) = beyond(plan, true, [first, with_gradient(last, EMBEDDING, small * factor)])
    assert (found.subject, found.rank) == (f"gradient of {EMBEDDING}", 1)


@pytest.mark.parametrize(
    ("value", "true", "error"),
    [
        (np.array([1.0, 2.0]), np.array([1.0, 4.0]), 0.5),
        (np.array([0.0, 1e-12]), np.array([0.0, 0.0]), 1e-12),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, math.inf, math.inf),
    ],
)
def test_relative_error(value, true, error):
    assert relative_error(value, true) == error


def test_relative_error_with_a_floor():
    assert relative_error(3.0, 1.0, 0.5) == 2.0  # the true value is more
    assert relative_error(3.0, 1.0, 4.0) == 0.5
    assert relative_error(np.array([0.5]), np.array([0.0]), 4.0) == 0.125
    assert relative_error(math.nan, 1.0, 4.0) == math.inf
