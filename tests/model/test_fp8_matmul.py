"""Linear layers that multiply in 8 bits, as a CPU emulates them."""

import pytest
import torch
import torch.nn.functional as F

import pentameter.model.fp8_matmul as fp8
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.model.fp8_matmul import Fp8Matmul, fp8_obstacle, fp8_product, results
from pentameter.model.matmul import PLAIN
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

DOUBLE = Fp8Matmul(torch.float64)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def rounded(x):
    """x with 4 significant bits, if no number is far below the largest of its row."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def test_outputs_and_input_gradients_multiply_numbers_of_four_bits():
    x, weight, g = drawn(6, 20).clamp(0.1, 2), drawn(12, 20).clamp(0.1, 2), drawn(6, 12).abs() + 0.1
    y, x_gradient, weight_gradient = results(x, weight, g)
    assert torch.allclose(y, rounded(x) @ rounded(weight).t(), rtol=1e-12)
    assert torch.allclose(x_gradient, rounded(g) @ rounded(weight), rtol=1e-12)
    assert torch.allclose(weight_gradient, g.t() @ x, rtol=1e-12)
    assert (y - x @ weight.t()).norm() > 1e-3 * y.norm()


@pytest.mark.parametrize("size", [2.0**-90, 1e-30, 1.0, 2.0**60])
def test_rows_of_any_size_keep_their_precision(size):
    x, weight = drawn(6, 32), drawn(16, 32)
    y = DOUBLE.linear(torch.cat((x, size * x)), weight)
    exact = F.linear(x, weight)
    assert (y[:6] - exact).norm() < 0.05 * exact.norm()
    assert (y[6:] / size - exact).norm() < 0.05 * exact.norm()


def test_a_row_does_not_depend_on_the_others():
    x, weight, g = drawn(8, 32), drawn(16, 32), drawn(8, 16)
    x[5], x[6] = 1e6 * x[5], 0.0
    y, x_gradient, _ = results(x, weight, g)
    parts = [results(x[rows], weight, g[rows]) for rows in (slice(0, 3), slice(3, 8))]
    assert torch.allclose(y, torch.cat([part[0] for part in parts]), rtol=1e-13)
    assert torch.allclose(x_gradient, torch.cat([part[1] for part in parts]), rtol=1e-13)
    assert not y[6].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(wrong):
    x = drawn(4, 32)
    x[2, 7] = wrong
    y = DOUBLE.linear(x, drawn(16, 32))
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


def test_other_dtypes_and_gates_stay_plain():
    x, weight, bias = drawn(4, 32), drawn(16, 32), drawn(16)
    halves = Fp8Matmul(torch.bfloat16)
    assert torch.equal(halves.linear(x, weight, bias), PLAIN.linear(x, weight, bias))
    assert torch.equal(DOUBLE.linear(x, weight[:1]), PLAIN.linear(x, weight[:1]))
    narrow = DOUBLE.linear(x, weight)
    assert torch.equal(DOUBLE.linear(x, weight, bias), narrow + bias)
    assert not torch.allclose(narrow, PLAIN.linear(x, weight), rtol=1e-3)


def test_it_can_be_compiled():
    x, weight, g = (each.float() for each in (drawn(6, 32), drawn(16, 32), drawn(6, 16)))
    captured = torch.compile(
        lambda x, w: Fp8Matmul(torch.float32).linear(x, w), backend="aot_eager", fullgraph=True
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = captured(x, weight)
    found = (y, *torch.autograd.grad(y, (x, weight), g))
    for one, other in zip(found, results(x, weight, g), strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
    assert captured(x, weight.detach()).requires_grad  # a frozen weight


def test_who_multiplies_in_8_bits(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert fp8_obstacle(torch.float64, cpu, None) is None
    assert "capability 8.9" in fp8_obstacle(torch.bfloat16, gpu, None)
    assert "capability 8.9" in fp8_obstacle(torch.bfloat16, gpu, 80)
    assert "bf16" in fp8_obstacle(torch.float16, gpu, 90)
    tried = []
    monkeypatch.setattr(fp8, "_disagreement", tried.append)
    assert fp8_obstacle(torch.bfloat16, gpu, 89) is None
    assert tried == [gpu]


def test_a_trial_finds_what_is_wrong(monkeypatch):
    cpu, right = torch.device("cpu"), fp8_product
    assert fp8._disagreement(cpu) is None

    def wrong(a, b, dtype):
        y = right(a, b, dtype)
        return y * 1.02 if dtype is torch.bfloat16 and a.shape[1] == 330 else y

    monkeypatch.setattr(fp8, "fp8_product", wrong)
    assert fp8._disagreement(cpu).startswith("in a trial its input's gradient was off by 2.")


SMALL = {
    "model.vocab_size": 17,
    "model.n_layers": 2,
    "model.d_model": 16,
    "model.attention.n_heads": 2,
    "model.context_length": 8,
    "train.batch_size": 4,
    "train.steps": 1,
    "train.precision": "fp64",
    "train.matmuls": "fp8",
}


def test_a_run_multiplies_so_in_its_blocks_alone(monkeypatch):
    """Of both layers' four matmuls, each with its input's gradient; not in the head, and not for
    samples."""
    shapes = []
    own = fp8._product

    def counted(a, b):
        shapes.append(tuple(b.shape))
        return own(a, b)

    monkeypatch.setattr(fp8, "_product", counted)
    plan = make_plan(load_config("quickstart", SMALL))
    engine = assemble(plan, torch.device("cpu"), "fp64", compiled=False)
    (module,) = engine.stage_modules
    tokens = torch.arange(8).view(1, 8)
    module(tokens, tokens).sum().backward()
    D, width = 16, plan.config.model.feed_forward_width
    layer = [(3 * D, D), (D, D), (width, D), (D, width)]
    gradients = [(inputs, outputs) for outputs, inputs in reversed(layer)]
    assert shapes == layer * 2 + gradients * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.precision": "fp16"}, "goes with train.precision='bf16'"),
        ({"parallel.tensor": 2}, "with parallel.tensor=2; use data, zero"),
    ],
)
def test_what_does_not_go_with_it(changes, said):
    with pytest.raises(ConfigError, match=said):
        make_plan(load_config("quickstart", {**SMALL, **changes}))
