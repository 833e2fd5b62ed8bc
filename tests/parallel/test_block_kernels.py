"""A ring's blocks by PyTorch's kernels for GPUs: which, with what arguments, and what comes of it.

There is no GPU here: shapes are those that PyTorch gives on META, and numbers those of stand-ins on
the CPU that take the same arguments and insist on what the kernels insist on.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from pentameter.model.attention.dot_product import Weighting, attend_explicitly
from pentameter.parallel.context import block_kernels, ring_attention
from pentameter.parallel.context.block_kernels import block_kernel
from pentameter.parallel.context.ring_attention import RingAttention

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
B, H, G, T, K = 2, 4, 2, 40, 8
CHUNKS = [0, 20]  # of one rank, and no multiples of what log-sum-exps are padded to


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "channels", "kernel"),
    [
        ("cpu", None, FP64, 7, "_attend_on_cpu"),
        ("cuda", 80, BF16, 64, "_attend_flash"),
        ("cuda", 90, FP16, 256, "_attend_flash"),
        ("cuda", 90, BF16, 208, "_attend_efficiently"),
        ("cuda", 90, BF16, 320, "_attend_efficiently"),
        ("cuda", 90, FP32, 64, "_attend_efficiently"),
        ("cuda", 75, FP16, 64, "_attend_efficiently"),
        ("cuda", 75, BF16, 64, None),
        ("cuda", 90, BF16, 36, None),
        ("cuda", 90, FP32, 36, "_attend_efficiently"),
        ("cuda", 90, FP64, 64, None),
        ("meta", None, BF16, 64, None),
        ("mps", None, FP16, 64, None),
    ],
)
def test_the_kernel_follows_from_device_dtype_and_head_size(
    device, capability, dtype, channels, kernel
):
    found = block_kernel(device, capability, dtype, channels)
    assert (None if found is None else found.attend.__name__) == kernel


def ring_arguments(window: int = 0) -> tuple:
    """The arguments of the ring's operations after sinks: no dropout, one rank, fused."""
    return (None, 0.0, 0, 0, CHUNKS, window, "", True)


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "flash"), (FP32, "efficient")])
def test_arguments_and_shapes_are_what_pytorch_takes_and_gives(dtype, name, monkeypatch):
    kernel = block_kernel("cuda", 90, dtype, 64)
    monkeypatch.setattr(ring_attention, "block_kernel", lambda *_: kernel)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which META has not
    called = []
    for part in ("FORWARD", "BACKWARD"):
        of_kernel = getattr(block_kernels, f"{name.upper()}_{part}")

        def noted(*arguments, of_kernel=of_kernel):
            called.append(of_kernel)
            return of_kernel(*arguments)

        monkeypatch.setattr(block_kernels, f"{name.upper()}_{part}", noted)
    q, k, v, grad = (
        torch.empty(B, T, n, K, device="meta", dtype=dtype).transpose(1, 2) for n in (H, G, G, H)
    )
    out, sums = ring_attention.attend_around(q, k, v, None, *ring_arguments())
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (sums.shape, sums.dtype) == (q.shape[:3], FP32)
    grads = ring_attention.differentiate_around(grad, q, k, v, out, sums, *ring_arguments())
    for found, like in zip(grads, (q, k, v), strict=True):
        assert (found.shape, found.dtype) == (like.shape, dtype)
    # Two blocks on the diagonal, and a whole one below it.
    assert len(called) == 6


def scores_of(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """The scores (B, H, Q, S), -inf where a key is hidden."""
    n = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(n, 1).mT * q.shape[-1] ** -0.5
    if is_causal:
        assert q.shape[2] == k.shape[2]
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=bool).tril(), -torch.inf)
    return scores


def flash(q, k, v, dropout, is_causal):
    scores = scores_of(q, k, is_causal)
    n = q.shape[1] // v.shape[1]
    y = scores.softmax(-1) @ v.repeat_interleave(n, 1)
    return y, scores.logsumexp(-1), None, None, *scores.shape[-2:], None, None, None


def flash_backward(
    grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropout, is_causal, seed, offset
):
    assert grad.is_contiguous()
    assert out.is_contiguous()
    assert sums.is_contiguous()
    assert (cum_q, cum_k) == (None, None)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    n, weights = q.shape[1] // k.shape[1], (scores_of(q, k, is_causal) - sums[..., None]).exp()
    of_weights = grad @ v.repeat_interleave(n, 1).mT - (grad * out).sum(-1, keepdim=True)
    of_scores = weights * of_weights * q.shape[-1] ** -0.5
    k_grad, v_grad = of_scores.mT @ q, weights.mT @ grad
    grouped = (each.unflatten(1, (-1, n)).sum(2) for each in (k_grad, v_grad))
    return of_scores @ k.repeat_interleave(n, 1), *grouped


def efficient(q, k, v, bias, tells_sums, dropout, is_causal):
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert tells_sums
    y, sums, *_ = flash(q, k, v, dropout, is_causal)
    padding = (0, -sums.shape[-1] % 32)
    return y, torch.nn.functional.pad(sums, padding, value=torch.inf), None, None


def efficient_backward(grad, q, k, v, bias, out, sums, seed, offset, dropout, needed, is_causal):
    n_queries = q.shape[2]
    assert sums.is_contiguous()
    assert sums.shape[2] == -(-n_queries // 32) * 32
    assert (sums[:, :, n_queries:] == torch.inf).all()
    assert needed == [True, True, True, False]
    own = (grad.contiguous(), q, k, v, out.contiguous(), sums[:, :, :n_queries].contiguous())
    lengths = (None, None, n_queries, k.shape[2])
    return *flash_backward(*own, *lengths, dropout, is_causal, seed, offset), None


@pytest.fixture
def stand_ins(monkeypatch):
    """The GPU's kernels on the CPU."""
    for name, one in (
        ("FLASH_FORWARD", flash),
        ("FLASH_BACKWARD", flash_backward),
        ("EFFICIENT_FORWARD", efficient),
        ("EFFICIENT_BACKWARD", efficient_backward),
    ):
        monkeypatch.setattr(block_kernels, name, one)


@pytest.mark.parametrize("name", ["flash", "efficient"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_blocks_of_the_kernels_make_the_attention_of_the_whole(
    name, has_sinks, stand_ins, monkeypatch
):
    kernel = block_kernel("cuda", 90, BF16 if name == "flash" else FP32, 64)
    monkeypatch.setattr(ring_attention, "block_kernel", lambda *_: kernel)
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(B, T, n, K, generator=generator, dtype=FP64).transpose(1, 2)
        for n in (H, G, G, H)
    ]
    *inputs, grad = drawn
    if has_sinks:
        inputs.append(torch.linspace(-1, 2, H, dtype=FP64))
    inputs = [each.requires_grad_() for each in inputs]
    q, k, v, *sinks = inputs
    results = []
    for attend in (RingAttention(None, CHUNKS), attend_explicitly):
        y = attend(q, k, v, Weighting(None, *sinks))
        results.append((y, *torch.autograd.grad(y, inputs, grad)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12, check_stride=False)


def test_a_gpu_computes_by_kernels_only_in_the_dtype_that_was_tried(monkeypatch):
    asked = []

    def noted(q, *others):
        asked.append(others[-1])
        return q, None

    monkeypatch.setattr(ring_attention, "ring_attention", noted)
    for dtype in (BF16, FP32):
        q = torch.empty(1, 1, 4, 8, device="meta", dtype=dtype)
        for tried in (None, BF16):
            RingAttention(None, [0, 2], tried)(q, q, q)
    q = torch.empty(1, 1, 4, 8)
    RingAttention(None, [0, 2])(q, q, q)
    assert asked == [False, True, False, False, True]
