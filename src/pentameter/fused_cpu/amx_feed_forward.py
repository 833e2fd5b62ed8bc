"""bf16 feed-forward layers and weight gradients on a CPU with AMX (Intel's matrix tiles), computed
by the C++ kernels in `cpp/feed_forward.cpp` and `cpp/weight_gradient.cpp`.

Shapes: M token rows (batch × sequence), D d_model, N and n the first linear's outputs and the
second's inputs; N = n, or 2 · n with a gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.fused_cpu.activations import Curve
from pentameter.fused_cpu.native import Struct, call, fields, serves

ROWS_PER_CHUNK = 256
"""Token rows per chunk in a weight gradient: with so many, 32 columns of each factor take 16 KiB,
and fit the L1 cache."""
MAX_WEIGHT = 2**22
"""Largest weight, in elements, whose gradient the kernels compute: a larger one does not stay in
the cores' caches while token rows are summed, and PyTorch's matmul is faster."""


class Paired(NamedTuple):
    """A matrix (M, n) in the memory order that the weight-gradient kernel reads, as flat `data` (M
    · n elements): chunks of ROWS_PER_CHUNK rows; in each, panels 32 columns wide; in a panel, every
    two rows interleaved."""

    data: Tensor
    n: int


def can_matmul_over_rows(left: Tensor, right: Tensor) -> bool:
    """Return whether `matmul_over_rows` can compute leftᵀ · right for left (M, a) and right (M, b):
    the AMX library is loaded, both are contiguous bf16, all sizes are divisible by 32, and the
    result has at most MAX_WEIGHT elements."""
    sizes, fits = (*left.shape, right.shape[1]), left.shape[1] * right.shape[1] <= MAX_WEIGHT
    whole = all(size % 32 == 0 for size in sizes)
    lies = all(x.is_contiguous() and serves("AMX", torch.float32, x.dtype) for x in (left, right))
    return fits and whole and lies


def matmul_over_rows(left: Tensor, right: Tensor | Paired, *, transposed: bool = False) -> Tensor:
    """Return leftᵀ · right, summed over the M rows: fp32 (a, b) for bf16 left (M, a) and right
    (M, b); if `transposed`, (b, a). right: a matrix, or one in the Paired memory order. Call it
    only for matrices that `can_matmul_over_rows` accepts."""
    (M, a), paired = left.shape, isinstance(right, Paired)
    b, data = (right.n, right.data) if isinstance(right, Paired) else (right.shape[1], right)
    out = left.new_empty((b, a) if transposed else (a, b), dtype=torch.float32)
    sizes = (M, a, b, ROWS_PER_CHUNK, paired, transposed)
    call("AMX", "weight_gradient", out, left, data, *sizes)
    return out


class FeedForwardLayer(NamedTuple):
    """One layer's weights in the form that the kernels read: `up` (N, D) and `down` (D, n) in bf16,
    the first linear's bias (N,) in fp32 or None, and the activation's table (None for ReLU²). With
    a gate (N = 2 · n), the first 16 in every 32 rows of `up` are the gate's."""

    up: Tensor
    bias: Tensor | None
    down: Tensor
    curve: Curve | None


class _FeedForward(Struct):
    """ctypes form of the C++ struct `FeedForward` in cpp/feed_forward.cpp: all arguments of one
    call of the feed-forward kernels."""

    _fields_ = fields("up down bias pieces", int64="M D N n gated rows chunk", float32="per_unit")


def can_feed_forward(x: Tensor, down: Tensor) -> bool:
    """Return whether `feed_forward` can compute a layer on x (…, D), with the second linear's fp32
    parameter `down` (D, n): the AMX library is loaded, x is contiguous bf16, all sizes are
    divisible by 32, and `down` has at most MAX_WEIGHT elements."""
    sizes = (x.numel() // x.shape[-1], *down.shape)
    whole = all(size % 32 == 0 for size in sizes) and x.is_contiguous()
    return serves("AMX", down.dtype, x.dtype) and whole and down.numel() <= MAX_WEIGHT


def feed_forward(layer: FeedForwardLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, kept): the layer's output in x's shape (…, D) and dtype, bf16, without the
    second linear's bias; and a flat tensor for `feed_forward_backward`, with M · N elements for M
    token rows and N outputs of the first linear. Call it only if `can_feed_forward` is true."""
    job, out = _feed_forward(layer, x), torch.empty_like(x)
    kept = x.new_empty(job.M * job.N)
    call("AMX", "feed_forward", job, out, kept, x)
    return out, kept


def feed_forward_backward(
    layer: FeedForwardLayer, g: Tensor, kept: Tensor
) -> tuple[Tensor, Paired, Paired, Tensor | None]:
    """Return the gradient of x (…, D), and what the parameters' gradients are computed from: the
    gradient of the first linear's output (M, N) and the second linear's input (M, n), both in the
    Paired memory order, and the bias's gradient (N,), None without a bias. M is the number of token
    rows; N = n, or 2 · n with a gate.

    g: the output's gradient (…, D). kept: the second result of `feed_forward`.
    """
    job, g_x = _feed_forward(layer, g), torch.empty_like(g)
    g_h, y = g.new_empty(job.M * job.N), g.new_empty(job.M * job.n)
    g_bias = g.new_empty(job.M // 32, job.N, dtype=torch.float32)
    call("AMX", "feed_forward_backward", job, (g_x, g_h, y, g_bias), g, kept)
    return g_x, Paired(g_h, job.N), Paired(y, job.n), None if layer.bias is None else g_bias.sum(0)


def _feed_forward(layer: FeedForwardLayer, x: Tensor) -> _FeedForward:
    """Return the arguments of the C++ call for `layer` and x (…, D), or a gradient of that shape,
    of which only the sizes are read."""
    (N, D), n = layer.up.shape, layer.down.shape[1]
    M, rows = x.numel() // D, ROWS_PER_CHUNK
    # Two blocks of rows for each core, and none too large for its cache. No result depends on it.
    while rows > 32 and (2 * torch.get_num_threads() * rows > M or rows * N > 2**19):
        rows //= 2
    pieces, per_unit = (None, 0.0) if layer.curve is None else layer.curve
    sizes = (M, D, N, n, n != N, rows, ROWS_PER_CHUNK)
    return _FeedForward(layer.up, layer.down, layer.bias, pieces, *sizes, per_unit)
