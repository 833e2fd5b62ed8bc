"""The vector kernels give what PyTorch's operations give, in registers of any width."""

import pytest
import torch
from threads import check_same_on_any_threads

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import activations, attention_kernels, kernels, native
from pentameter.fused_cpu.experts.expert_rows import (
    places_by_expert,
    spread,
    weighted_sum,
    weighted_sum_gradients,
)
from pentameter.fused_cpu.functions import AddNorm, FeedForward
from pentameter.fused_cpu.heads import HeadShape
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.fused_cpu.vector.sub_layers import (
    SubLayerEnd,
    activate,
    activation_gradients,
    add_norm,
    can_activate,
    can_add_norm,
)
from pentameter.model.dropout import drop, dropout_keys, stream_index
from pentameter.model.experts import Routing
from pentameter.model.gpt import build_model
from pentameter.model.grouped_matmul import ROWS_PER_BLOCK

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def relative(x, reference):
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def random_keys(generator, n_rows):
    return torch.randint(-(2**31), 2**31, (n_rows, 2), generator=generator).int()


def plain_activation(h, bias, kind, gated):
    """In fp64, by PyTorch's operations and autograd."""
    x = h if bias is None else h + bias
    x, factor = x.chunk(2, -1) if gated else (x, 1.0)
    return activations.ACTIVATIONS[kind](x, True)[0] * factor


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
def test_an_activation_equals_its_formula(width, kind, biased, dtype):
    generator = torch.Generator().manual_seed(2)
    gated = kind in ("swiglu", "geglu")
    h = (3 * torch.randn(100, 48 * (1 + gated), generator=generator)).to(dtype)
    g = torch.randn(100, 48, generator=generator).to(dtype)
    bias = torch.randn(h.shape[1], generator=generator) if biased else None
    assert can_activate(h, bias, gated)
    y = activate(h, bias, kind, gated)
    g_h, again, g_bias = activation_gradients(g, h, bias, kind, gated)
    exact_h = h.double().requires_grad_()
    exact = plain_activation(exact_h, bias, kind, gated)
    exact.backward(g.double())
    assert torch.equal(again, y)
    assert relative(y, exact.detach()) < ROUNDING[dtype]
    assert relative(g_h, exact_h.grad) < ROUNDING[dtype]
    if bias is None:
        assert g_bias is None
    else:  # summed before it is rounded; a table's error is 1e-4 of a slope
        assert relative(g_bias, exact_h.grad.sum(0)) < (1e-6 if dtype is torch.float32 else 2e-4)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
def test_numbers_far_out(width, kind, dtype):
    gated = kind in ("swiglu", "geglu")
    x = torch.tensor([1e3, -1e3, 1e18, -1e18, 100, -100, 8, -8] * 2, dtype=dtype).expand(1, 16)
    h = torch.cat((x, torch.ones_like(x)), -1) if gated else x.contiguous()
    limit = {"relu2": x * x}.get(kind, x)
    y = activate(h, None, kind, gated)
    expected = torch.where(x > 0, limit, 0.0)
    # bf16 rounds by 4e-3 of the value, and both sides are rounded alike
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=3e-3)
    h = h.clone()
    h[0, 3] = torch.nan
    y = activate(h, None, kind, gated)
    assert y[0, 3].isnan()
    assert not y[0, :3].isnan().any()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_halves_are_rounded_to_even(width, dtype):
    """ReLU of what bf16 cannot hold, by way of a bias in fp32."""
    x = torch.tensor([1.00390625, 1.01171875, 1.005, 3.3895314e38] * 4)
    y = activate(torch.zeros(1, 16, dtype=dtype), x, "relu", False)
    assert torch.equal(y[0], x.to(dtype))


def numbers_of(x):
    T, D = x.shape[1:]
    return stream_index(torch.arange(T), range(D), D, T)


def plain_add_norm(x, y, bias, keys, p, kind):
    """The end of a sub-layer in y's dtype, by PyTorch's operations."""
    y = y.to(x.dtype) if bias is None else y.to(x.dtype) + bias
    x = x + (drop(y, keys, numbers_of(x), p) if p else y)
    centred = x - x.mean(-1, keepdim=True) if kind.centred else x
    return x, centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + kind.eps)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("words", [2**32, 7 * 48 + 5], ids=["one block", "blocks of 7 tokens"])
@pytest.mark.parametrize(
    ("centred", "biased", "p"), [(True, True, 0.3), (False, False, 0.0), (False, True, 0.1)]
)
def test_the_end_of_a_sub_layer_equals_the_formula(
    width, centred, biased, p, words, dtype, monkeypatch
):
    monkeypatch.setattr("pentameter.model.dropout.WORDS", words)
    generator = torch.Generator().manual_seed(5)
    x, y, g, g_norm = (torch.randn(3, 50, 48, generator=generator) for _ in range(4))
    y, g_norm = y.to(dtype), g_norm.to(dtype)
    bias = torch.randn(48, generator=generator) if biased else None
    keys = random_keys(generator, 3)
    kind = kernels.NormKind(centred, 1e-5)
    assert can_add_norm(x, y)
    answers = []
    for function, high, low in (
        (AddNorm.apply, torch.float32, dtype),
        (plain_add_norm, torch.float64, torch.float64),
    ):
        leaves = [x.to(high), y.to(low), None if bias is None else bias.to(high)]
        leaves = [leaf if leaf is None else leaf.clone().requires_grad_() for leaf in leaves]
        results = function(*leaves, keys, p, kind)
        torch.autograd.backward(results, (g.to(high), g_norm.to(low)))
        answers.append([*results, *(leaf.grad for leaf in leaves if leaf is not None)])
    for found, exact in zip(*answers, strict=True):
        assert relative(found.detach(), exact.detach()) < ROUNDING[found.dtype]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_where_it_is_dropped(width, value):
    """As in the plain model, whose dropout multiplies by the mask."""
    generator = torch.Generator().manual_seed(1)
    keys, p, T, D = random_keys(generator, 2), 0.5, 3, 16
    y = torch.full((2, T, D), value)
    plain = drop(y, keys, numbers_of(y), p)
    assert 0 < plain.isnan().sum() <= y.numel()
    zeros = torch.zeros_like(y)
    native_sum, *_ = add_norm(SubLayerEnd(None, keys, p, True, 1e-5), zeros, y)
    torch.testing.assert_close(native_sum, plain, equal_nan=True)
    torch.testing.assert_close(kernels._dropped(y, keys, p), plain, equal_nan=True)


def test_gradients_of_weights_that_are_not_finite_stay_so():
    """The compiled kernels of attention, run as they are written."""
    g, e = torch.full((2, 4, 4), torch.nan), torch.rand(2, 4, 4)
    keys, one = torch.tensor([[1, 2]], dtype=torch.int32), torch.ones(2, 4, 1)
    backward = attention_kernels.softmax_backward.__wrapped__
    shape = HeadShape(2, 2, 1, 1e-5, 4, 0.5)
    g_scores, dropped = backward(g, e, 0 * one, one, 0, keys, shape)
    assert g_scores.isnan().all()
    assert (dropped == 0).any()
    _, dropped, _ = attention_kernels.softmax_forward.__wrapped__(
        torch.full((2, 4, 4), torch.nan), torch.zeros(4, 4), 0, keys, shape
    )
    assert dropped.isnan().all()


def test_no_result_depends_on_threads(loaded):
    generator = torch.Generator().manual_seed(3)
    h, g = (torch.randn(300, 64, generator=generator) for _ in range(2))
    x, y, g_x, g_norm = (torch.randn(5, 60, 64, generator=generator) for _ in range(4))
    bias, keys = torch.randn(64, generator=generator), random_keys(generator, 5)
    kind = kernels.NormKind(True, 1e-5)

    def computed():
        leaves = [leaf.clone().requires_grad_() for leaf in (x, y, bias)]
        results = AddNorm.apply(*leaves, keys, 0.2, kind)
        torch.autograd.backward(results, (g_x, g_norm))
        return [
            activate(h, bias, "gelu", False),
            *activation_gradients(g, h, bias, "gelu", False),
            *results,
            *(leaf.grad for leaf in leaves),
        ]  # fmt: skip

    check_same_on_any_threads(computed)


def test_what_the_kernels_do_not_take_is_left_to_pytorch(loaded):
    h = torch.randn(4, 96)
    assert can_activate(h, None, True)
    assert not can_activate(h[:, ::2], None, True)
    assert not can_activate(h[:, :72].contiguous(), None, False)
    assert not can_activate(h, torch.randn(96).double(), False)
    assert not can_activate(h.double(), None, False)
    x = torch.randn(2, 3, 48)
    assert can_add_norm(x, x.bfloat16())
    assert not can_add_norm(x.double(), x.double())
    assert not can_add_norm(x[..., :40], x[..., :40])
    native.unload()
    assert not can_activate(h, None, True)
    assert not can_add_norm(x, x)


def test_a_feed_forward_layer_uses_them(loaded, monkeypatch):
    generator = torch.Generator().manual_seed(8)
    x, g = (torch.randn(2, 40, 32, generator=generator) for _ in range(2))
    scale, bias = (torch.randn(n, generator=generator) for n in (32, 96))
    up, gate = (torch.randn(48, 32, generator=generator) for _ in range(2))
    down = torch.randn(32, 48, generator=generator)

    def results(dtype):
        given = [
            each.detach().to(dtype, copy=True).requires_grad_()
            for each in (x, scale, bias, down, gate, up)
        ]
        x_, scale_, bias_, down_, *factors = given
        if dtype is torch.float32:
            y = FeedForward.apply(x_, scale_, bias_, down_, "geglu", *factors)
        else:
            h = (x_ * scale_) @ torch.cat(factors).t()
            y = plain_activation(h, bias_, "geglu", True) @ down_.t()
        y.backward(g.to(dtype))
        return [y.detach(), *(each.grad for each in given)]

    def refuse(*arguments):
        raise AssertionError("the compiled activation was used")

    monkeypatch.setattr(activations, "activate", refuse)
    monkeypatch.setattr(activations, "activation_gradients", refuse)
    with torch.compiler.set_stance("force_eager"):  # the other kernels as they are written
        found = results(torch.float32)
    for each, exact in zip(found, results(torch.float64), strict=True):
        assert relative(each, exact) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"activation": "gelu"},
        {"activation": "swiglu"},
        {"n_experts": 5, "d_expert": 32, "router_renormalize": True, "balance": "bias"},
    ],
)
def test_an_fp32_step_is_the_exact_one(loaded, keys):
    config = ModelConfig(**{
        **{"vocab_size": 13, "context_length": 48, "n_layers": 2, "n_heads": 2, "d_model": 64},
        **{"dropout": 0.2, "attention_dropout": 0.1, "bias": True, "qkv_bias": True},
        **keys,
    })  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(13, (4, 48), generator=generator)
    keys = dropout_keys(config, 3, 5, range(4))
    answers = []
    for dtype in (torch.float32, torch.float64):
        model = build_model(config, 7, dtype=dtype).train()
        loss = fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype)
        loss.backward()
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        answers.append((loss.item(), trained))
    (loss, found), (exact_loss, exact) = answers
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert all(relative(x, reference) < 1e-5 for x, reference in zip(found, exact, strict=True))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_of_experts_are_copied_and_added_as_by_pytorch(width, dtype):
    """Three experts for each of 40 tokens; one expert gets none, and some rows have no room."""
    generator = torch.Generator().manual_seed(11)
    experts = torch.randint(1, 6, (40, 3), generator=generator)
    routing = Routing(experts, torch.rand(40, 3, generator=generator), 5)
    places = places_by_expert(routing)
    ends = places.ends
    assert (ends % ROWS_PER_BLOCK == 0).all()
    x, g = (torch.randn(40, 48, generator=generator).to(dtype) for _ in range(2))
    rows = torch.randn(places.n_places, 48, generator=generator).to(dtype)

    def computed():
        return [
            spread(x, places),
            weighted_sum(rows, places, routing.weights),
            weighted_sum(rows, places, None),
            *weighted_sum_gradients(g, rows, places, routing.weights),
        ]

    by_kernels = computed()
    library = native._loaded.pop("vector")
    by_pytorch, places_by_pytorch = computed(), places_by_expert(routing)
    native._loaded["vector"] = library
    assert torch.equal(places.of_token, places_by_pytorch.of_token)
    assert torch.equal(ends, places_by_pytorch.ends)
    assert torch.equal(places.blank, places_by_pytorch.blank)
    assert torch.equal(by_kernels[0], by_pytorch[0])
    for number, end in enumerate(ends.tolist()):
        start = 0 if number == 0 else int(ends[number - 1])
        chosen = x[(experts == number).any(1).nonzero().flatten()]
        assert by_kernels[0][start:end].count_nonzero(1).gt(0).sum() == (experts == number).sum()
        assert set(map(tuple, chosen.tolist())) <= set(
            map(tuple, by_kernels[0][start:end].tolist())
        )
    for found, expected in zip(by_kernels, by_pytorch, strict=True):
        assert found.dtype == expected.dtype
        assert relative(found, expected) < ROUNDING[found.dtype]
