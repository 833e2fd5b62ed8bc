"""A Engine: one normalisation whatever the micro-batches, dropout keyed by global row."""

import math

import numpy as np
import pytest
import torch

from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.parallel.assemble import assemble
from pentameter.parallel.engine import LossSum
from pentameter.planning.plan import make_plan

CPU = torch.device("cpu")


def plan_for(micro_batch_size, *, recompute=None, **model):
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
            "train": {
                "steps": 10,
                "batch_size": 12,
                "micro_batch_size": micro_batch_size,
                "activation_checkpoint": recompute,
            },
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


def gradients(micro_batch_size, *, loss_scale=1.0, **settings):
    engine = assemble(plan_for(micro_batch_size, **settings), CPU, "fp64", compiled=False)
    loss = engine.forward_backward(padded_batch(), 3, loss_scale=loss_scale)
    return loss, {name: p.grad for name, p in engine.named_parameters()}


@pytest.fixture
def chunks(monkeypatch):
    """Calling it makes every loss one of chunks, of five rows of the vocabulary padded to 16."""
    return lambda: monkeypatch.setattr("pentameter.model.loss.MAX_LOGITS", 5 * 16)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_accumulation_equals_the_large_batch_to_float64_rounding(chunks, tied, chunked, recompute):
    model = {"tied_head": tied, "head_bias": True, "vocab_multiple": 8}
    whole_loss, whole = gradients(12, **model)
    if chunked:
        chunks()
    for micro_batch_size in (1, 4, 6, 12):
        loss, parts = gradients(micro_batch_size, recompute=recompute, **model)
        assert loss.n_targets == whole_loss.n_targets
        assert loss.mean == pytest.approx(whole_loss.mean, rel=1e-14)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_only_pad_the_vocabulary_learn_nothing_and_decide_nothing(chunks, tied, chunked):
    """Neither gradient nor weight decay of theirs is ever seen in a loss."""
    if chunked:
        chunks()
    engine = assemble(plan_for(4, vocab_multiple=8, tied_head=tied), CPU, "fp64", compiled=False)
    names = ["token_embedding.weight"] if tied else ["token_embedding.weight", "head.weight"]
    rows = [engine.model.get_parameter(name) for name in names]
    loss = engine.forward_backward(padded_batch(), 3)
    evaluated = engine.evaluate(padded_batch())
    for row in rows:
        assert row.shape[0] == 16
        assert torch.count_nonzero(row.grad[11:]) == 0
        with torch.no_grad():
            row[11:] = 1e3  # far more than any decay would do
    assert engine.forward_backward(padded_batch(), 3) == loss
    assert engine.evaluate(padded_batch()) == evaluated


def test_the_loss_scale_multiplies_gradients_and_not_the_loss():
    plain_loss, plain = gradients(4)
    scaled_loss, scaled = gradients(4, loss_scale=1024.0)
    assert scaled_loss == plain_loss
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], gradient * 1024, rtol=1e-12, atol=0)


def test_a_step_repeats_and_another_step_drops_elsewhere():
    engine = assemble(plan_for(12), CPU, "fp32", compiled=False)
    first = engine.forward_backward(padded_batch(), 3)
    assert engine.forward_backward(padded_batch(), 3) == first
    assert engine.forward_backward(padded_batch(), 4) != first


def test_evaluation_drops_nothing_and_leaves_no_gradient():
    plan = plan_for(12)
    engine = assemble(plan, CPU, "fp64", compiled=False)
    dropless = assemble(
        plan_for(12, dropout=0.0, attention_dropout=0.0), CPU, "fp64", compiled=False
    )
    assert engine.evaluate(padded_batch()) == dropless.evaluate(padded_batch())
    assert all(p.grad is None for p in engine.parameters())


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_evaluation_by_chunks_is_the_same_number(chunks, precision):
    engine = assemble(plan_for(12, head_bias=True), CPU, precision, compiled=False)
    whole = engine.evaluate(padded_batch())
    chunks()
    parts = engine.evaluate(padded_batch())
    # bf16: the bias is added to products in fp32 instead of in bf16 (where it is 0 here).
    assert parts.mean == pytest.approx(whole.mean, rel=1e-14 if precision == "fp64" else 1e-6)


def test_fp16_scaled_gradients_come_near_fp32_over_micro_batches():
    answers = {}
    for precision, scale in (("fp32", 1.0), ("fp16", 2.0**10)):
        engine = assemble(plan_for(4), CPU, precision, compiled=False)
        engine.forward_backward(padded_batch(), 0, loss_scale=scale)
        engine.unscale_gradients(scale)
        answers[precision] = {name: p.grad for name, p in engine.named_parameters()}
    for name, expected in answers["fp32"].items():
        # fp16 keeps 11 bits; a gradient passes through some ten products of 16 terms.
        error = (answers["fp16"][name] - expected).norm() / expected.norm()
        assert error < 10 * 2**-10, name


def test_gradients_are_clipped_together_and_given_up():
    engine = assemble(plan_for(12), CPU, "fp64", compiled=False)
    engine.forward_backward(padded_batch(), 0)
    norm = engine.gradient_norm()
    engine.clip_gradients(norm, 0.0)
    assert engine.gradient_norm() == norm
    engine.clip_gradients(norm, norm.item() / 2)
    assert engine.gradient_norm().item() == pytest.approx(norm.item() / 2, rel=1e-5)
    engine.zero_gradients()
    assert all(p.grad is None for p in engine.parameters())


def test_gradients_of_a_replayed_graph_stay_where_they_are():
    """The next replay writes over what this one returns."""
    engine = assemble(plan_for(4), CPU, "fp64", compiled=False)
    assert not engine.adds_up_in_place
    engine.stage_modules[0].run_compiled(replays=True)
    engine.stage_modules[0].allocate(CPU)
    held = [p.grad for p in engine.parameters()]
    held[0].fill_(1.0)
    engine.zero_gradients()
    assert engine.adds_up_in_place
    for p, grad in zip(engine.parameters(), held, strict=True):
        assert p.grad is grad
        assert torch.count_nonzero(grad) == 0


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
    engine = assemble(plan_for(12), CPU, "fp32", compiled=False)
    assert engine.evaluate(padded_batch()).mean == pytest.approx(math.log(11), abs=0.1)


def test_loss_sums_add_by_tokens():
    total = LossSum(6.0, 3) + LossSum(2.0, 1)
    assert total.mean == 2.0
    assert math.isnan(LossSum(0.0, 0).mean)


@pytest.mark.parametrize(
    ("settings", "chunked"),
    [
        ({"recompute": "selective", "attention_dropout": 0.0}, True),
        *(
            pytest.param(settings, chunked, marks=pytest.mark.slow)
            for settings in (
                {},
                {"norm_position": "post", "bias": True},
                {"recompute": "full"},
                {"recompute": "selective", "attention_dropout": 0.0},
            )
            for chunked in (False, True)
            if not (chunked and "attention_dropout" in settings)
        ),
    ],
    ids=str,
)
def test_compiled_equals_eager(chunks, settings, chunked):
    if chunked:
        chunks()
    eager = assemble(plan_for(6, **settings), CPU, "fp64", compiled=False)
    compiled = assemble(plan_for(6, **settings), CPU, "fp64", compiled=True)
    losses = [engine.forward_backward(padded_batch(), 5).mean for engine in (eager, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-15, msg=name)
    table = {spec.name for spec in eager.plan.table}
    assert {name for name, _ in compiled.named_parameters()} == table
    assert set(model_state(compiled.model)) == table  # no prefix of a wrapper
