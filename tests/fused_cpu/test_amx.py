"""The AMX kernels give what PyTorch's products give, to the rounding of bf16: on this processor's
tiles, or where it has none on emulated ones."""

import pytest
import torch
from threads import check_same_on_any_threads, on_some_threads

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import native
from pentameter.fused_cpu.amx_attention import can_attend
from pentameter.fused_cpu.amx_feed_forward import MAX_WEIGHT, can_feed_forward, matmul_over_rows
from pentameter.fused_cpu.functions import AmxAttention, AmxFeedForward, CausalAttention
from pentameter.fused_cpu.heads import HeadShape
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.model.compiled import plainly
from pentameter.model.dropout import dropout_keys
from pentameter.model.feed_forward import ACTIVATIONS
from pentameter.model.gpt import build_model

pytestmark = pytest.mark.usefixtures("tiles")


@pytest.fixture(autouse=True)
def plain():
    """Nothing is compiled by PyTorch: what stands around these kernels has tests of its own."""
    with plainly():
        yield


def relative(x, reference):
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def shaped(n_heads, head_size, stride, p, n_kv_heads=None):
    return HeadShape(n_heads, n_kv_heads or n_heads, head_size, 1e-5, stride, p)


def around(shape, T, generator, biased=False, normed=False, turning=0):
    """Bias, norms' weights, cosines and sines for a projection, each or None."""
    K = shape.head_size
    width = (shape.n_heads + 2 * shape.n_kv_heads) * K
    bias = torch.randn(width, generator=generator) if biased else None
    norms = [1 + torch.randn(K, generator=generator) if normed else None for _ in range(2)]
    angles = torch.randn(T, turning // 2, generator=generator)
    turned = (angles.cos(), angles.sin()) if turning else (None, None)
    return bias, *norms, *turned


def attention(function, projected, others, g, keys, shape):
    leaves = [x if x is None else x.clone().requires_grad_() for x in (projected, *others[:3])]
    y = function.apply(shape, keys, *leaves, *others[3:])
    y.backward(g)
    return y.detach(), *(None if x is None else x.grad for x in leaves)


@pytest.mark.parametrize(
    ("B", "T", "n_heads", "head_size", "p", "other"),
    [
        (3, 40, 4, 64, 0.1, {"biased": True, "normed": True, "turning": 32, "n_kv_heads": 2}),
        (4, 1, 3, 32, 0.0, {"biased": True, "n_kv_heads": 1}),  # one place in time
        (2, 256, 3, 64, 0.0, {}),
        (2, 256, 3, 64, 0.2, {"biased": True}),
        (3, 40, 2, 32, 0.1, {"biased": True}),  # does not fill its last block
        (1, 33, 5, 32, 0.0, {}),
        (2, 97, 2, 96, 0.3, {}),
        (1, 600, 1, 128, 0.1, {"biased": True}),
        (2, 97, 3, 32, 0.2, {"turning": 10}),
        (2, 64, 2, 64, 0.0, {"normed": True, "biased": True}),
        (1, 70, 6, 32, 0.2, {"turning": 32, "n_kv_heads": 1}),
        (2, 33, 8, 32, 0.0, {"normed": True, "turning": 32, "n_kv_heads": 4}),
    ],
)
def test_attention_equals_the_products(B, T, n_heads, head_size, p, other):
    generator = torch.Generator().manual_seed(T)
    other = dict(other)
    shape = shaped(n_heads, head_size, max(T, 50), p, other.pop("n_kv_heads", None))
    others = around(shape, T, generator, **other)
    width = (n_heads + 2 * shape.n_kv_heads) * head_size
    projected = torch.randn(B, T, width, generator=generator).bfloat16()
    g = torch.randn(B, T, n_heads * head_size, generator=generator).bfloat16()
    keys = torch.randint(-(2**31), 2**31, (B, 2), generator=generator).int()
    doubles = [x if x is None else x.double() for x in others]
    exact = attention(CausalAttention, projected.double(), doubles, g.double(), keys, shape)
    plain = attention(CausalAttention, projected, others, g, keys, shape)
    native = attention(AmxAttention, projected, others, g, keys, shape)
    for x, other, reference in zip(native, plain, exact, strict=True):
        if reference is not None:
            # A wrong mask or a lost element would be an error of 0.01 to 1.
            assert relative(x, reference) < max(1.5 * relative(other, reference), 0.005)


def test_one_query_sees_itself_only():
    qkv = torch.randn(2, 1, 3 * 64).bfloat16()
    shape = shaped(2, 32, 8, 0.0)
    keys = torch.zeros(2, 2, dtype=torch.int32)
    y = AmxAttention.apply(shape, keys, qkv, *around(shape, 1, None))
    assert torch.equal(y, qkv.view(2, 1, 2, 3, 32)[:, :, :, 2].reshape(2, 1, 64))


def test_the_result_does_not_depend_on_threads():
    generator = torch.Generator().manual_seed(3)
    shape = shaped(4, 32, 128, 0.2, n_kv_heads=2)
    others = around(shape, 70, generator, biased=True, normed=True, turning=32)
    projected = torch.randn(5, 70, 8 * 32, generator=generator).bfloat16()
    g = torch.randn(5, 70, 4 * 32, generator=generator).bfloat16()
    keys = torch.arange(10, dtype=torch.int32).view(5, 2)
    answers = on_some_threads(lambda: attention(AmxAttention, projected, others, g, keys, shape))
    for answer in answers[1:]:
        # A bias's gradient is a sum that PyTorch divides by threads.
        for x, first in zip(answer[:2], answers[0][:2], strict=True):
            assert torch.equal(x, first)
        for x, first in zip(answer[3:], answers[0][3:], strict=True):
            torch.testing.assert_close(x, first)


def layer(M, D, n, kind, biased):
    """Arguments of a feed-forward Function, and the gradient of its output."""
    generator = torch.Generator().manual_seed(n)
    gated = kind in ("swiglu", "geglu")
    x, g = (torch.randn(M, D, generator=generator).bfloat16() for _ in range(2))
    scale = 1 + 0.1 * torch.randn(D, generator=generator)
    up = [torch.randn(n, D, generator=generator) / D**0.5 for _ in range(1 + gated)]
    bias = torch.randn(n * len(up), generator=generator) if biased else None
    down = torch.randn(D, n, generator=generator) / n**0.5
    return (x, scale, bias, down, kind, *up), g


def plain_feed_forward(x, scale, bias, down, kind, *up):
    """The layer in x's dtype, by PyTorch's operations."""
    h = x @ (torch.cat(up) * scale).to(x.dtype).t()
    h = h if bias is None else (h + bias).to(x.dtype)
    return ACTIVATIONS[kind](*h.split(len(up[0]), 1)) @ down.to(x.dtype).t()


def run_layer(function, arguments, g, dtype=None):
    leaves = [
        x.to(dtype or x.dtype).clone().requires_grad_() if isinstance(x, torch.Tensor) else x
        for x in arguments
    ]
    y = function(*leaves)
    y.backward(g.to(dtype or g.dtype))
    return y.detach(), *(x.grad for x in leaves if isinstance(x, torch.Tensor))


@pytest.mark.parametrize(
    ("M", "D", "n", "kind", "biased"),
    [
        (96, 64, 160, "gelu", True),
        (1056, 32, 96, "swiglu", True),  # in blocks of 64 rows, the last of 32
        (4096, 64, 96, "gelu", False),  # in blocks of 256 rows
        (4128, 96, 64, "geglu", False),  # the last block is not full
        (1056, 64, 32, "relu", True),
        (544, 32, 512, "relu2", True),
        (64, 1024, 32, "gelu_tanh", False),
        (32, 32, 4096, "swiglu", False),
    ],
)
def test_a_feed_forward_layer_equals_the_products(M, D, n, kind, biased):
    arguments, g = layer(M, D, n, kind, biased)
    assert can_feed_forward(arguments[0], arguments[3])
    exact = run_layer(plain_feed_forward, arguments, g, torch.float64)
    native = run_layer(AmxFeedForward.apply, arguments, g)
    plain = run_layer(plain_feed_forward, arguments, g)
    for x, other, reference in zip(native, plain, exact, strict=True):
        assert relative(x, reference) < max(1.2 * relative(other, reference), 0.002)


def test_a_feed_forward_layer_does_not_depend_on_threads():
    check_same_on_any_threads(
        lambda: run_layer(AmxFeedForward.apply, *layer(288, 32, 32, "gelu", False))
    )


@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_numbers_beyond_the_table_of_an_activation(kind):
    bias = torch.tensor([1e20, -1e20, 1e3, -1e3] * 8).requires_grad_()
    x, g = torch.zeros(2, 32, 32).bfloat16()
    g[0] = 1
    arguments = torch.ones(32), bias, torch.eye(32), kind, torch.zeros(32, 32)
    AmxFeedForward.apply(x, *arguments).backward(g)
    torch.testing.assert_close(bias.grad, torch.tensor([1.0, 0.0] * 16), rtol=0, atol=1e-6)
    with torch.no_grad():
        bias[0], bias.grad = torch.nan, None
    y = AmxFeedForward.apply(x, *arguments)
    y.backward(g)
    assert y[:, 0].isnan().all()
    assert bias.grad[0].isnan()


def test_gradients_may_lie_anyhow():
    arguments, g = layer(64, 32, 32, "gelu", True)
    turned = run_layer(AmxFeedForward.apply, arguments, g.t().contiguous().t())
    assert all(map(torch.equal, turned, run_layer(AmxFeedForward.apply, arguments, g)))


def test_threads_may_change_between_forward_and_backward():
    (x, *others), g = layer(512, 32, 64, "gelu", True)
    others = [each.requires_grad_() if isinstance(each, torch.Tensor) else each for each in others]
    before = torch.get_num_threads()
    gradients = []
    try:
        for n_threads in (1, 8):
            torch.set_num_threads(1)
            y = AmxFeedForward.apply(x, *others)
            torch.set_num_threads(n_threads)
            gradients.append(torch.autograd.grad(y, others[0], g)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*gradients)


def test_what_the_kernels_do_not_take_is_left_to_the_products():
    x, down = torch.randn(2, 32, 64).bfloat16(), torch.randn(64, 96)
    assert can_feed_forward(x, down)
    assert not can_feed_forward(x, down[:, :80])
    assert not can_feed_forward(x[:, :31], down)
    assert not can_feed_forward(x.float(), down)
    assert not can_feed_forward(x, down.double())
    assert not can_feed_forward(x, torch.empty(64, MAX_WEIGHT // 32))
    config = ModelConfig(vocab_size=13, n_heads=2, d_model=64)
    assert can_attend(config, torch.float32, torch.bfloat16)
    assert not can_attend(config, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("shape", [(64, 32, 96), (576, 64, 32)])
def test_a_matmul_over_rows(shape):
    M, a, b = shape
    left, right = torch.randn(M, a).bfloat16(), torch.randn(M, b).bfloat16()
    exact = left.double().t() @ right.double()
    assert relative(matmul_over_rows(left, right), exact) < 1e-6
    assert relative(matmul_over_rows(left, right, transposed=True), exact.t()) < 1e-6


VARIANTS = {
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "relu": {"activation": "relu"},
    "llama": {
        **{"activation": "swiglu", "positions": "rotary", "norm": "rmsnorm"},
        **{"n_heads": 4, "n_kv_heads": 2, "head_size": 32, "qk_norm": "head"},
    },
    "fast": {"activation": "relu2", "positions": "rotary", "norm": "rmsnorm", "qk_norm": "head"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bf16_step_is_near_the_exact_one(variant):
    config = ModelConfig(**{
        **{"vocab_size": 13, "context_length": 48, "n_layers": 2, "n_heads": 2, "d_model": 64},
        **{"dropout": 0.2, "attention_dropout": 0.1, "bias": True, "qkv_bias": True},
        **VARIANTS[variant],
    })  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(13, (4, 48), generator=generator)
    keys = dropout_keys(config, 3, 5, range(4))

    def gradients(parameters_dtype, dtype):
        model = build_model(config, 7, dtype=parameters_dtype).train()
        loss = fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    exact_loss, exact = gradients(torch.float64, torch.float64)
    loss, on_tiles = gradients(torch.float32, torch.bfloat16)
    with native.without("AMX"):
        _, plain = gradients(torch.float32, torch.bfloat16)
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    assert not torch.equal(on_tiles, plain)  # or the kernels were not used
    assert relative(on_tiles, exact) < 1.2 * relative(plain, exact) < 0.05
