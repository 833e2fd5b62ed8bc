"""The AMX kernels give what PyTorch's products give, to the rounding of bf16."""

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import amx, kernels
from pentameter.fused_cpu.functions import AmxAttention, CausalAttention
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model


@pytest.fixture(scope="module", autouse=True)
def loaded():
    capabilities = machine_capabilities()
    missing = amx.load(capabilities)
    if not capabilities.cpu.amx_bf16:
        pytest.skip(str(missing))
    assert missing is None
    yield
    amx.unload()


def relative(x, reference):
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def attention(function, qkv, bias, g, keys, n_heads, stride, p):
    qkv = qkv.clone().requires_grad_()
    bias = None if bias is None else bias.clone().requires_grad_()
    y = function.apply(qkv, bias, n_heads, keys, stride, p)
    y.backward(g)
    return y.detach(), qkv.grad, None if bias is None else bias.grad


@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "T", "n_heads", "head_size", "p", "biased"),
    [
        (2, 256, 3, 64, 0.0, False),
        (2, 256, 3, 64, 0.2, True),
        (3, 40, 2, 32, 0.1, True),  # does not fill its last block
        (1, 33, 5, 32, 0.0, False),
        (2, 97, 2, 96, 0.3, False),
        (1, 600, 1, 128, 0.1, True),
    ],
)
def test_attention_equals_the_products(B, T, n_heads, head_size, p, biased):
    generator = torch.Generator().manual_seed(T)
    width = n_heads * head_size
    qkv = torch.randn(B, T, 3 * width, generator=generator).bfloat16()
    g = torch.randn(B, T, width, generator=generator).bfloat16()
    bias = torch.randn(3 * width, generator=generator) if biased else None
    keys = torch.randint(-(2**31), 2**31, (B, 2), generator=generator).int()
    around = (keys, n_heads, max(T, 50), p)
    exact_bias = None if bias is None else bias.double()
    exact = attention(CausalAttention, qkv.double(), exact_bias, g.double(), *around)
    plain = attention(CausalAttention, qkv, bias, g, *around)
    native = attention(AmxAttention, qkv, bias, g, *around)
    for x, other, reference in zip(native, plain, exact, strict=True):
        if reference is not None:
            # A wrong mask or a lost element would be an error of 0.01 to 1.
            assert relative(x, reference) < max(1.5 * relative(other, reference), 0.005)


def test_one_query_sees_itself_only():
    qkv = torch.randn(2, 1, 3 * 64).bfloat16()
    y, _ = amx.attention_forward(qkv, None, 2, torch.zeros(2, 2, dtype=torch.int32), 8, 0.0)
    assert torch.equal(y, qkv.view(2, 1, 2, 3, 32)[:, :, :, 2].reshape(2, 1, 64))


def test_the_result_does_not_depend_on_threads():
    qkv = torch.randn(5, 70, 3 * 64).bfloat16()
    keys = torch.arange(10, dtype=torch.int32).view(5, 2)
    before = torch.get_num_threads()
    answers = []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            y, logs = amx.attention_forward(qkv, None, 2, keys, 128, 0.2)
            g_qkv = amx.attention_backward(y, y, logs, qkv, None, 2, keys, 128, 0.2)
            answers.append((y, g_qkv))
    finally:
        torch.set_num_threads(before)
    for y, g_qkv in answers[1:]:
        assert torch.equal(y, answers[0][0])
        assert torch.equal(g_qkv, answers[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 96), (1024, 32), (64, 48), (7, 64)])
def test_transpose(shape):
    x = torch.randn(shape).bfloat16()
    assert amx.can_transpose(x) == (shape in [(64, 96), (1024, 32)])
    assert torch.equal(kernels.transpose(x), x.t())


@pytest.mark.parametrize(
    "activation",
    ["gelu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gelu_tanh", "relu"))],
)
def test_a_bf16_step_is_near_the_exact_one(activation):
    config = ModelConfig(
        vocab_size=13, context_length=48, n_layers=2, n_heads=2, d_model=64, dropout=0.2,
        attention_dropout=0.1, bias=True, qkv_bias=True, activation=activation,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(13, (4, 48), generator=generator)
    keys = dropout_keys(config, 3, 5, range(4))

    def gradients(parameters_dtype, dtype):
        model = build_model(config, 7, dtype=parameters_dtype).train()
        loss = fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    exact_loss, exact = gradients(torch.float64, torch.float64)
    loss, native = gradients(torch.float32, torch.bfloat16)
    amx.unload()
    _, plain = gradients(torch.float32, torch.bfloat16)
    assert amx.load(machine_capabilities()) is None
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    assert not torch.equal(native, plain)  # or the kernels were not used
    assert relative(native, exact) < 1.2 * relative(plain, exact) < 0.05
