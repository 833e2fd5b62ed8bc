"""A Stage: one normalisation whatever the micro-batches, dropout keyed by global row."""

import math

import numpy as np
import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.batches import Batch
from pentameter.parallel.assemble import LossSum, assemble
from pentameter.plan.plan import make_plan

CPU = torch.device("cpu")


def plan_for(micro_batch_size, **model):
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": 11,
                "context_length": 8,
                "n_layers": 2,
                "n_heads": 2,
                "d_model": 16,
                "dropout": 0.2,
                "attention_dropout": 0.1,
                **model,
            },
            "data": {"corpus": "grammar"},
            "train": {"steps": 10, "batch_size": 12, "micro_batch_size": micro_batch_size},
        }
    )
    return make_plan(config)


def padded_batch(rows=12, context=8, vocabulary=11):
    """Rows of uneven length: padding must weigh nothing wherever the micro-batches cut."""
    generator = np.random.default_rng(3)
    inputs = generator.integers(0, vocabulary, (rows, context))
    targets = generator.integers(0, vocabulary, (rows, context))
    for row in range(rows):
        targets[row, generator.integers(1, context + 1) :] = -1
    return Batch(inputs, targets, np.arange(rows))


def gradients(micro_batch_size, *, loss_scale=1.0):
    stage = assemble(plan_for(micro_batch_size), CPU, "fp64", compiled=False)
    loss = stage.forward_backward(padded_batch(), 3, loss_scale=loss_scale)
    return loss, {name: p.grad for name, p in stage.named_parameters()}


def test_accumulation_equals_the_large_batch_to_float64_rounding():
    whole_loss, whole = gradients(12)
    for micro_batch_size in (1, 4, 6):
        loss, parts = gradients(micro_batch_size)
        assert loss.n_targets == whole_loss.n_targets
        assert loss.mean == pytest.approx(whole_loss.mean, rel=1e-14)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-11, atol=1e-15)


def test_the_loss_scale_multiplies_gradients_and_not_the_loss():
    plain_loss, plain = gradients(4)
    scaled_loss, scaled = gradients(4, loss_scale=1024.0)
    assert scaled_loss == plain_loss
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], gradient * 1024, rtol=1e-12, atol=0)


def test_a_step_repeats_and_another_step_drops_elsewhere():
    stage = assemble(plan_for(12), CPU, "fp32", compiled=False)
    first = stage.forward_backward(padded_batch(), 3)
    assert stage.forward_backward(padded_batch(), 3) == first
    assert stage.forward_backward(padded_batch(), 4) != first


def test_evaluation_drops_nothing_and_leaves_no_gradient():
    plan = plan_for(12)
    stage = assemble(plan, CPU, "fp64", compiled=False)
    dropless = assemble(
        plan_for(12, dropout=0.0, attention_dropout=0.0), CPU, "fp64", compiled=False
    )
    assert stage.evaluate(padded_batch()) == dropless.evaluate(padded_batch())
    assert all(p.grad is None for p in stage.parameters())


def test_bf16_comes_near_fp32():
    losses = {
        precision: assemble(plan_for(12), CPU, precision, compiled=False)
        .forward_backward(padded_batch(), 0)
        .mean
        for precision in ("fp32", "bf16")
    }
    # bf16 keeps 8 bits: products err by 2^-8 each, their sum over a width of 16 by less.
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2**-7)
    assert losses["bf16"] != losses["fp32"]


def test_an_untrained_model_knows_nothing():
    stage = assemble(plan_for(12), CPU, "fp32", compiled=False)
    assert stage.evaluate(padded_batch()).mean == pytest.approx(math.log(11), abs=0.1)


def test_loss_sums_add_by_tokens():
    total = LossSum(6.0, 3) + LossSum(2.0, 1)
    assert total.mean == 2.0
    assert math.isnan(LossSum(0.0, 0).mean)


@pytest.mark.slow
def test_compiled_equals_eager():
    eager = assemble(plan_for(12), CPU, "fp32", compiled=False)
    compiled = assemble(plan_for(12), CPU, "fp32", compiled=True)
    losses = [stage.forward_backward(padded_batch(), 5).mean for stage in (eager, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert [name for name, _ in compiled.named_parameters()] == [
        name for name, _ in eager.named_parameters()
    ]
