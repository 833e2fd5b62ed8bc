"""The head and the loss by chunks equal the head and the loss."""

import pytest
import torch
import torch.nn.functional as F

from pentameter.model import loss as loss_module
from pentameter.model.loss import (
    chunked_loss_sum,
    elementwise_row_loss,
    loss_sum,
    row_loss,
    softcapped,
)

VOCAB_SIZE, PADDED, WIDTH = 13, 16, 6


def inputs(dtype=torch.float64, *, bias=True, rows=10):
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (2, rows // 2, WIDTH), "weight": (PADDED, WIDTH), "bias": (PADDED,)}
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }
    targets = torch.randint(VOCAB_SIZE, (2, rows // 2), generator=generator)
    targets[0, 1] = targets[1, -1] = -1
    return tensors["x"], tensors["weight"], tensors["bias"] if bias else None, targets


def gradients(loss, *tensors):
    loss.backward()
    return [tensor.grad for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("max_logits", [1, PADDED * 3, PADDED * 4, 2**26])
def test_it_is_the_plain_loss_in_fp64(monkeypatch, bias, max_logits, softcap):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", max_logits)
    x, weight, b, targets = inputs(bias=bias)
    expected = loss_sum(softcapped(F.linear(x, weight, b), softcap), targets, VOCAB_SIZE)
    theirs = gradients(expected * 0.7, x, weight, b)
    for form in (row_loss, elementwise_row_loss):
        x, weight, b, targets = inputs(bias=bias)
        loss = chunked_loss_sum(x, weight, b, targets, VOCAB_SIZE, form, softcap=softcap)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
        with torch.no_grad():
            again = chunked_loss_sum(x, weight, b, targets, VOCAB_SIZE, form, softcap=softcap)
            assert again.item() == loss.item()
        for ours, gradient in zip(gradients(loss * 0.7, x, weight, b), theirs, strict=True):
            torch.testing.assert_close(ours, gradient, rtol=1e-12, atol=1e-14)


def test_a_backward_pass_in_two_halves_scales_once():
    """As zero-bubble schedules take it: the input's gradient first, the weight's later."""
    x, weight, bias, targets = inputs()
    loss = chunked_loss_sum(x, weight, bias, targets, VOCAB_SIZE) * 0.7
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    of_weight, of_bias = torch.autograd.grad(loss, (weight, bias))
    x, weight, bias, targets = inputs()
    whole = gradients(chunked_loss_sum(x, weight, bias, targets, VOCAB_SIZE) * 0.7, x, weight, bias)
    for half, expected in zip((of_x, of_weight, of_bias), whole, strict=True):
        assert torch.equal(half, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("differentiate", [True, False])
def test_the_form_to_compile_is_the_same(bias, differentiate):
    x, weight, b, targets = inputs(bias=bias)
    forms = {}
    for form in (row_loss, elementwise_row_loss):
        with torch.no_grad():
            logits = x.reshape(-1, WIDTH) @ weight.t()
            loss = form(logits, b, targets.reshape(-1), VOCAB_SIZE, differentiate)
        forms[form] = (loss, logits) if differentiate else (loss,)
    for one, other in zip(*forms.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


def test_padded_rows_of_the_head_get_no_gradient():
    x, weight, bias, targets = inputs()
    _, g_weight, g_bias = gradients(
        chunked_loss_sum(x, weight, bias, targets, VOCAB_SIZE), x, weight, bias
    )
    assert torch.count_nonzero(g_weight[VOCAB_SIZE:]) == 0
    assert torch.count_nonzero(g_bias[VOCAB_SIZE:]) == 0
    assert g_weight[:VOCAB_SIZE].ne(0).all()


def test_no_targets_lose_nothing_and_teach_nothing():
    x, weight, bias, targets = inputs()
    loss = chunked_loss_sum(x, weight, bias, torch.full_like(targets, -1), VOCAB_SIZE)
    assert loss.item() == 0
    assert all(torch.count_nonzero(g) == 0 for g in gradients(loss, x, weight, bias))


def test_no_chunk_exceeds_the_bound_or_an_eighth_and_few_are_needed(monkeypatch):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", PADDED * 4)
    x, weight, bias, targets = inputs()
    sizes = []

    def spy(logits, *arguments):
        sizes.append(len(logits))
        return row_loss(logits, *arguments)

    chunked_loss_sum(x, weight, bias, targets, VOCAB_SIZE, spy)
    assert sizes == [4, 4, 2]
    assert [chunk.stop for chunk in loss_module.row_chunks(80, PADDED, 1)] == list(
        range(10, 81, 10)
    )
    assert loss_module.exceeds_chunk(5, PADDED)
    assert not loss_module.exceeds_chunk(4, PADDED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_rounds_as_the_plain_loss_does(dtype):
    answers = []
    for chunked in (False, True):
        x, weight, bias, targets = inputs(torch.float32)
        with torch.autocast("cpu", dtype):
            if chunked:
                loss = chunked_loss_sum(x, weight, bias, targets, VOCAB_SIZE)
            else:
                loss = loss_sum(F.linear(x, weight, bias), targets, VOCAB_SIZE)
        answers.append((loss, *gradients(loss, x, weight, bias)))
    (loss, *plain), (ours, *chunks) = answers
    assert ours.dtype == loss.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    # Logits of size about three are rounded to the dtype, once before and once after the bias.
    assert ours.item() == pytest.approx(loss.item(), rel=4 * eps)
    for mine, theirs in zip(chunks, plain, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=8 * eps * theirs.abs().max().item())


def test_fp16_holds_the_gradient_of_a_token_in_every_row():
    rows = 2048
    x = torch.full((rows, WIDTH), 50.0).requires_grad_()  # 2048 × 50 is beyond fp16's 65,504
    weight = torch.zeros(PADDED, WIDTH).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = chunked_loss_sum(x, weight, None, torch.zeros(rows, dtype=torch.int64), 2)
    loss.backward()
    expected = torch.zeros(PADDED, WIDTH)
    expected[:2] = torch.tensor([[-0.5 * rows * 50], [0.5 * rows * 50]])
    torch.testing.assert_close(weight.grad, expected, rtol=2**-10, atol=0)
