import pytest
import torch
import torch.nn.functional as F

from pentameter.model.attention import dot_product
from pentameter.model.attention.dot_product import (
    PLAIN_ATTENTION,
    Weighting,
    attend_explicitly,
    cuda_capability,
    repeats_kv_heads,
    wants_equal_widths,
)
from pentameter.model.dropout import AttentionDropout, Numbers, keep_mask


def qkv(n_queries: int, n_keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> torch.Tensor:
        shape = (2, 3, n, 4)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return draw(n_queries), draw(n_keys), draw(n_keys)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(7, 7), (1, 7), (3, 7), (1, 1)])
def test_fused_and_explicit_agree_in_value_and_gradient(n_queries: int, n_keys: int) -> None:
    q, k, v = qkv(n_queries, n_keys)
    results = []
    for function in (PLAIN_ATTENTION, attend_explicitly):
        y = function(q, k, v)
        results.append((y, *torch.autograd.grad((y * y.detach().cos()).sum(), (q, k, v))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_dropout_drops_the_weights_of_the_formula() -> None:
    q, k, v = qkv(5, 5)
    keys = torch.tensor([[[1, 2], [30, 40]], [[5, 6], [70, 80]]], dtype=torch.int32)
    dropout = AttentionDropout(site=1, p=0.4, context_length=6)
    h, i, j = torch.meshgrid(*map(torch.arange, (3, 5, 5)), indexing="ij")
    keep = keep_mask(keys[:, 1], Numbers(((h * 6 + i) * 6 + j).int()), 0.4)
    scores = torch.einsum("bhqk,bhsk->bhqs", q, k) / 2
    scores = scores.masked_fill(j > i, float("-inf"))
    expected = (scores.softmax(-1) * keep / 0.6) @ v
    y = PLAIN_ATTENTION(q, k, v, Weighting(dropout=dropout.acting(keys)))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_dropout_has_the_right_gradient() -> None:
    q, k, v = qkv(4, 4)
    keys = torch.tensor([[[3, 4]], [[5, 6]]], dtype=torch.int32)
    dropout = AttentionDropout(site=0, p=0.3, context_length=4)
    assert torch.autograd.gradcheck(
        lambda q, k, v: PLAIN_ATTENTION(q, k, v, Weighting(dropout=dropout.acting(keys))), (q, k, v)
    )


def test_no_dropout_in_evaluation_or_without_keys() -> None:
    q, k, v = qkv(4, 4)
    keys = torch.tensor([[[3, 4]], [[5, 6]]], dtype=torch.int32)
    dropout = AttentionDropout(site=0, p=0.3, context_length=4)
    plain = PLAIN_ATTENTION(q, k, v)
    for acting in (dropout.acting(None), dropout.eval().acting(keys)):
        assert torch.equal(PLAIN_ATTENTION(q, k, v, Weighting(dropout=acting)), plain)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "channels", "masked", "repeats"),
    [
        (None, FP32, (64, 64), True, False),  # not a GPU of CUDA's
        (80, BF16, (64, 64), False, False),
        (90, FP16, (256, 256), False, False),
        (90, BF16, (64, 64), True, True),  # a window, sinks
        (90, FP32, (64, 64), False, True),
        (89, BF16, (264, 264), False, True),
        (90, BF16, (192, 128), False, True),
        (70, FP16, (64, 64), False, True),
        (75, FP16, (64, 64), False, True),
    ],
)
def test_kv_heads_are_repeated_where_no_fused_kernel_takes_them(
    capability, dtype, channels, masked, repeats
):
    assert repeats_kv_heads(capability, dtype, channels, masked=masked) is repeats


@pytest.mark.parametrize(
    ("capability", "dtype", "channels", "equal"),
    [
        (None, BF16, (192, 128), True),  # not a GPU of CUDA's
        (90, BF16, (192, 128), False),
        (100, FP16, (256, 64), False),
        (103, BF16, (96, 64), False),
        (90, BF16, (264, 128), True),
        (90, BF16, (192, 100), True),
        (80, BF16, (192, 128), True),
        (120, BF16, (96, 64), True),  # flash attention comes first there
        (70, FP32, (192, 128), False),
    ],
)
def test_values_are_padded_where_a_fast_kernel_asks_for_it(
    monkeypatch, capability, dtype, channels, equal
):
    assert wants_equal_widths(capability, dtype, channels) is equal
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert wants_equal_widths(capability, dtype, channels)


def test_no_device_but_a_gpu_has_a_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    names = ("cpu", "meta", "mps", "cuda:1")
    assert [cuda_capability(torch.device(each)) for each in names] == [None, None, None, 86]


GROUPED = {  # name → (queries, keys, window, sinks)
    "causal": (8, 8, None, False),
    "one query": (1, 8, None, False),
    "cached": (3, 8, None, False),
    "windows": (8, 8, 2, False),
    "an odd window": (8, 8, 3, False),
    "sinks": (8, 8, None, True),
    "sinks and windows": (8, 8, 2, True),
}


@pytest.mark.parametrize("case", GROUPED)
def test_a_gpu_without_a_kernel_for_kv_heads_gets_them_repeated(case, monkeypatch):
    n_queries, n_keys, window, has_sinks = GROUPED[case]
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, n_queries, 4), (2, 2, n_keys, 4), (2, 2, n_keys, 4), (6,))
    drawn = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    inputs = [each.requires_grad_() for each in drawn[: 3 + has_sinks]]
    fused, seen = F.scaled_dot_product_attention, []

    def noted(q, k, v, *, enable_gqa, **others):
        seen.append((q.shape[1], k.shape[1], v.shape[1], enable_gqa))
        return fused(q, k, v, enable_gqa=enable_gqa, **others)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    results = []
    for capability in (None, 75):
        monkeypatch.setattr(dot_product, "cuda_capability", lambda device, here=capability: here)
        q, k, v, *sinks = inputs
        y = PLAIN_ATTENTION(q, k, v, Weighting(window, *sinks))
        results.append((y, *torch.autograd.grad((y * y.detach().cos()).sum(), inputs)))
    assert seen == [(6, 2, 2, True), (6, 6, 6, False)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_a_compiled_step_takes_the_capability_for_a_constant(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    q, k = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
    torch.compiler.reset()
    compiled = torch.compile(PLAIN_ATTENTION.__call__, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, k), PLAIN_ATTENTION(q, k, k))
