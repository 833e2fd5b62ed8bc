"""A step that computes in a GPU's faster forms, on a CPU.

Triton interprets the loss's kernel, and `wide_product` stands in for a product whose result is
wider than its inputs, which PyTorch has for GPUs only.
"""

from __future__ import annotations

import pytest
import torch
from measured import configuration, own_batch

from pentameter.model import loss as loss_module
from pentameter.model.gpu import forms as gpu_forms
from pentameter.model.gpu.forms import PLAIN_FORMS, GpuForms
from pentameter.model.loss import HeadLoss, compiled_row_loss
from pentameter.model.matmul import PRECISE_SUMS
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

MODEL = {"n_layers": 1, "n_heads": 4, "d_ff": 16}


def wide_product(total, a, b, *, out_dtype, out):
    return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))


def stepped(precision: str, forms: GpuForms):
    """A step's loss and gradients, with logits in chunks."""
    plan = make_plan(configuration("data=1", MODEL, {}))
    engine = assemble(plan, torch.device("cpu"), precision, compiled=False, forms=forms)
    engine.zero_gradients()
    loss = engine.forward_backward(own_batch(engine, 0), 0).total
    return engine, loss, {name: p.grad for name, p in engine.named_parameters()}


def test_a_step_with_precise_sums_differs_in_the_heads_gradient_alone(monkeypatch) -> None:
    monkeypatch.setattr(torch, "addmm", wide_product)
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 64)
    _, expected, plain = stepped("bf16", PLAIN_FORMS)
    engine, loss, gradients = stepped("bf16", GpuForms(precise_sums=True))
    assert loss == expected
    name = "token_embedding.weight"
    assert gradients.keys() > {name}
    for other in gradients.keys() - {name}:
        assert torch.equal(gradients[other], plain[other])
    bound = 2.0**-8 * plain[name].abs().max().item()  # the plain form rounds each chunk's to bf16
    torch.testing.assert_close(gradients[name], plain[name], rtol=0, atol=bound)
    assert not torch.equal(gradients[name], plain[name])
    (head,) = (m for m in engine.model.modules() if isinstance(m, HeadLoss))
    assert head.forward.keywords == {"matmul": PRECISE_SUMS}


def test_a_step_with_the_loss_in_one_kernel_is_the_plain_step(monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 64)
    _, expected, plain = stepped("fp32", PLAIN_FORMS)
    engine, loss, gradients = stepped("fp32", GpuForms(one_pass_loss=True))
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        scale = plain[name].abs().max().item()
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=1e-5 * scale)
    (head,) = (m for m in engine.model.modules() if isinstance(m, HeadLoss))
    assert head.row_loss.__name__ == "one_pass_row_loss"


def test_a_compiled_step_keeps_the_form_that_was_taken(monkeypatch) -> None:
    monkeypatch.setattr(gpu_forms, "_one_pass", lambda: print)
    plan = make_plan(configuration("data=1", MODEL, {}))
    for forms, kept in ((PLAIN_FORMS, compiled_row_loss), (GpuForms(one_pass_loss=True), print)):
        engine = assemble(plan, torch.device("cpu"), "bf16", compiled=False, forms=forms)
        engine.stage_modules[0].run_compiled()
        heads = [m for m in engine.model.modules() if isinstance(m, HeadLoss)]
        assert [each.row_loss for each in heads] == [kept]
