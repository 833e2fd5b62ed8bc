"""The kernels that drop attention's weights, against the weights written out.

Without a GPU Triton interprets them, tile by tile in numpy. That shows what they compute; what a
compiler makes of them on a chip, `kernel_obstacle` looks at before each run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits
from pentameter.model.attention.attention import attend_by
from pentameter.model.attention.checked_attention import row_error
from pentameter.model.attention.dot_product import Weighting, attend_explicitly
from pentameter.model.dropout import WeightsDropout, dropout_keys, keep_mask, weight_index
from pentameter.model.gpt import build_model
from pentameter.model.matmul import PLAIN
from pentameter.parallel.linear import install_forwards
from pentameter.parallel.memory.recomputation import recomputed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32 = 5e-6
"""Between kernels and fp64, in fp32: some 80 roundings. The weights written out in fp32 are as far
off (24 roundings at most in these cases), which sum some hundred numbers of either sign."""


class Case(NamedTuple):
    B: int = 1
    H: int = 2
    G: int = 2
    T: int = 33
    K: int = 16
    p: float = 0.3
    window: int | None = None
    context_length: int = 40
    first_head: int = 0

    def weighting(self) -> Weighting:
        dropped = (self.keys()[:, 1], self.p, self.first_head, self.context_length)
        return Weighting(self.window, None, WeightsDropout(*dropped), self.positions())

    def keys(self) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31, (self.B, 3, 2), generator=torch.manual_seed(1))
        return drawn.to(DEVICE, torch.int32)

    def positions(self) -> Tensor:
        last = self.context_length
        return torch.arange(last - self.T, last, device=DEVICE)

    def draw(self, n_heads: int, seed: int) -> Tensor:
        shape = (self.B, self.T, n_heads, self.K)
        drawn = torch.randn(shape, generator=torch.manual_seed(seed), dtype=torch.float64)
        return drawn.transpose(1, 2).to(DEVICE)

    def keep(self) -> Tensor:
        """Where weights are seen and kept, bool (B, H, T, T)."""
        positions, heads = self.positions(), range(self.first_head, self.first_head + self.H)
        numbers = weight_index(heads, positions, positions, self.context_length)
        query, key = torch.meshgrid(*2 * [torch.arange(self.T, device=DEVICE)], indexing="ij")
        seen = (key <= query) & (key > query - (self.window or self.T))
        return keep_mask(self.keys()[:, 1], numbers, self.p) & seen

    def computed(self, form: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The result and the gradients of q, k and v, by `attend_explicitly` or the kernels."""
        heads = (self.H, self.G, self.G)
        q, k, v = (self.draw(n, i).to(dtype).requires_grad_() for i, n in enumerate(heads))
        y = form(q, k, v, self.weighting())
        return y, *torch.autograd.grad(y, (q, k, v), self.draw(self.H, 3).to(dtype))


CASES = {
    "uneven": Case(B=2, T=70, K=24),
    "one token": Case(T=1),
    "a tile less one": Case(T=31),
    "shared keys": Case(H=4, G=2, K=8),
    "one key head, a window": Case(H=3, G=1, T=70, window=20),
    "a window of two": Case(window=2),
    "a window of all": Case(window=33),
    "wide heads": Case(K=128),
    "heads of other processes": Case(first_head=6),
    "numbers in several blocks": Case(context_length=60_000, first_head=3),
    "blocks that end within a head": Case(T=70, context_length=65_560),
    "nothing dropped": Case(p=0.0),
    "nearly all dropped": Case(p=0.99),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_weights_written_out(kernels, name) -> None:
    case = CASES[name]
    found = case.computed(kernels.KernelAttention(), torch.float32)
    expected = case.computed(attend_explicitly, torch.float64)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert row_error(one, other) < FP32


def test_a_row_whose_every_key_is_dropped_is_zero(kernels) -> None:
    case = Case(T=70, p=0.97)
    is_empty = ~case.keep().any(-1)
    assert is_empty.any()
    assert not is_empty.all()
    y, dq, *others = case.computed(kernels.KernelAttention(), torch.float32)
    assert (y[is_empty] == 0).all()
    assert (dq[is_empty] == 0).all()
    assert all(x.isfinite().all() for x in others)


def test_each_kernel_drops_the_very_same_elements(kernels) -> None:
    """Where all scores are 0 and one factor is the identity, each number of a result is a weight,
    or the gradient of one, and not 0 where it is kept."""
    case = Case(B=2, T=60, K=64, p=0.4, window=45, context_length=50_000, first_head=9)
    keep, row_keys, positions = case.keep(), case.keys()[:, 1], case.positions()
    numbers = (case.p, case.window, case.first_head, case.context_length)
    zeros = torch.zeros(2, 2, 60, 64, device=DEVICE)
    ones, one_hot = zeros + 1, zeros + torch.eye(60, 64, device=DEVICE)

    y, logs = kernels.attend_dropping(zeros, zeros, one_hot, row_keys, positions, *numbers)
    assert torch.equal(y[..., :60] > 0, keep)

    def backward(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        # With a result of 0 what is subtracted from the gradients of weights is 0.
        given = (g, q, k, ones, zeros, logs, row_keys, positions)
        gradients = kernels.attend_dropping_backward(*given, *numbers)
        return tuple(x[..., :60] > 0 for x in gradients)

    assert torch.equal(backward(zeros, one_hot, ones)[0], keep)
    _, dk, dv = backward(one_hot, zeros, one_hot)
    assert torch.equal(dv.mT, keep)
    assert torch.equal(dk.mT, keep)


words = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(words, min_size=16, max_size=16), words, words)
@settings(max_examples=20)
def test_bits_are_those_of_keyed(kernels, index, key_0, key_1) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def write(out, index, keys, hashed: tl.constexpr):
        at = tl.arange(0, 16)
        tl.store(out + at, hashed(tl.load(index + at), tl.load(keys), tl.load(keys + 1)))

    given = torch.tensor(index, dtype=torch.int32)
    found = torch.empty(16, dtype=torch.int32, device=DEVICE)
    keys = torch.tensor([key_0, key_1], dtype=torch.int32, device=DEVICE)
    write[(1,)](found, given.to(DEVICE), keys, hashed=kernels._bits)
    assert torch.equal(found.cpu(), bits((key_0, key_1), given))


def model_and_loss(**train: Any) -> tuple[nn.Module, Any]:
    config = ModelConfig(
        vocab_size=11, context_length=20, n_layers=2, n_heads=2, d_model=32, attention_dropout=0.3
    )
    model = build_model(config, 0, dtype=torch.float32).to(DEVICE).train()
    tokens = torch.arange(40, device=DEVICE).view(2, 20) % 11
    keys = dropout_keys(config, 1, 0, [0, 1]).to(DEVICE)
    return model, lambda: model(tokens, targets=tokens, dropout_keys=keys)


def gradients(model: nn.Module, loss: Any) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("how", "n_forward"), [(None, 2), ("selective", 2), ("full", 4)])
def test_a_model_learns_the_same_and_computes_again_what_it_should(
    kernels, monkeypatch, how, n_forward
) -> None:
    model, loss = model_and_loss()
    expected = gradients(model, loss)
    launched = []
    launch = kernels._launch
    monkeypatch.setattr(
        kernels,
        "_launch",
        lambda kernel, *a, **o: (launched.append(kernel), launch(kernel, *a, **o)),
    )
    attend_by(model, kernels.KernelAttention())
    if how is not None:
        install_forwards(model, PLAIN, recomputed(model.blocks.values(), how))
    found = gradients(model, loss)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert launched.count(kernels._forward_kernel) == n_forward
    assert launched.count(kernels._keys_kernel) == launched.count(kernels._queries_kernel) == 2


def test_what_is_kept_is_what_the_plan_counts(kernels) -> None:
    """Beside queries, keys, values and the result: a sum in fp32 of each row of weights."""
    case = Case(T=20)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        case.computed(kernels.KernelAttention(), torch.float32)
    heads = case.B * case.H * case.T
    keys, positions = case.keys().nbytes, case.positions().nbytes
    assert sum(kept.values()) == 4 * (4 * heads * case.K) + 4 * heads + keys + positions


def test_the_operation_is_one_that_pytorch_knows_how_to_trace(kernels) -> None:
    case = Case(T=20)
    q, k, v = (case.draw(2, seed).float().requires_grad_() for seed in range(3))
    given = (q, k, v, case.keys()[:, 1], case.positions(), 0.3, 20, 0, 40)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels.dropped_attention, given, test_utils=checks)


@pytest.mark.slow
def test_compiled_attention_drops_in_the_kernels(kernels) -> None:
    case = Case(T=20)
    attend = kernels.KernelAttention()

    def attention(q: Tensor, how: Weighting) -> Tensor:
        return attend(q, q + 1, q - 1, how).sin()

    q = case.draw(2, 0).float().requires_grad_()
    results = []
    for form in (attention, torch.compile(attention, dynamic=False, fullgraph=True)):
        y = form(q, case.weighting())
        results.append((y, *torch.autograd.grad(y.sum(), q)))
    torch.testing.assert_close(results[1], results[0])


def test_the_kernels_serve_training_without_a_cache_alone(kernels, monkeypatch) -> None:
    called = []

    def dropping(q, k, v, *others):
        called.append(q.shape)
        return (q,)

    monkeypatch.setattr(kernels, "dropped_attention", dropping)
    attend = kernels.KernelAttention()
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4)
    drops = Weighting(dropout=WeightsDropout(torch.ones(1, 2, dtype=torch.int32), 0.3, 0, 8))
    attend(k, k, k, drops)
    attend(q, k, k, drops)
    attend(k, k, k, drops._replace(sinks=torch.ones(2)))
    attend(k, k, k)
    assert called == [k.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
def test_a_gpu_agrees_with_the_weights_written_out(kernels, dtype, head_size) -> None:
    """Each form against fp64: kernels are about as far off as the weights written out."""
    case = Case(B=2, H=4, G=2, T=1000, K=head_size, p=0.1, context_length=1024)
    expected = case.computed(attend_explicitly, torch.float64)
    written = case.computed(attend_explicitly, dtype)
    found = case.computed(kernels.KernelAttention(), dtype)
    for one, usual, other in zip(found, written, expected, strict=True):
        assert row_error(one, other) < 3 * row_error(usual, other) + 2.0**-15
