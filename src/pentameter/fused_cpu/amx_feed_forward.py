"""bf16 feed-forward layers and weight gradients on a CPU with AMX, by `cpp/feed_forward.cpp` and
`cpp/weight_gradient.cpp`."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.fused_cpu.activations import Curve
from pentameter.fused_cpu.native import address, library, serves

ROWS_PER_CHUNK = 256
"""Batch rows per chunk in a weight gradient: 32 columns from each factor, 16 KiB, fit the L1
cache."""
MAX_WEIGHT = 2**22
"""Largest weight, in elements, whose gradient the kernels compute: a larger one does not stay in
the cores' caches while batch rows are summed, and PyTorch's matmul is faster."""


class Paired(NamedTuple):
    """A matrix (M, n) in the layout that weight gradients read: ROWS_PER_CHUNK matrix rows after
    another, in panels 32 columns wide, two matrix rows interleaved."""

    data: Tensor
    n: int


def can_matmul_over_rows(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernels are loaded and take leftᵀ · right for left (M, a) and right (M,
    b)."""
    sizes, fits = (*left.shape, right.shape[1]), left.shape[1] * right.shape[1] <= MAX_WEIGHT
    whole = all(size % 32 == 0 for size in sizes)
    lies = all(x.is_contiguous() and serves("AMX", torch.float32, x.dtype) for x in (left, right))
    return fits and whole and lies


def matmul_over_rows(left: Tensor, right: Tensor | Paired, *, transposed: bool = False) -> Tensor:
    """Return leftᵀ · right, (a, b) in fp32, for left (M, a) and right (M, b); if `transposed`, (b,
    a)."""
    (M, a), paired = left.shape, isinstance(right, Paired)
    b, data = (right.n, right.data) if isinstance(right, Paired) else (right.shape[1], right)
    out = left.new_empty((b, a) if transposed else (a, b), dtype=torch.float32)
    sizes = (ctypes.c_int64(size) for size in (M, a, b, ROWS_PER_CHUNK, paired, transposed))
    library("AMX").pentameter_weight_gradient(address(out), address(left), address(data), *sizes)
    return out


class FeedForwardLayer(NamedTuple):
    """A feed-forward layer: weights `up` (N, D) and `down` (D, n) in bf16, the bias (N) in fp32,
    and the activation's table (None for ReLU²). If N is 2 · n, the gate takes the first 16 in every
    32 rows in `up`."""

    up: Tensor
    bias: Tensor | None
    down: Tensor
    curve: Curve | None


class _FeedForward(ctypes.Structure):
    """`FeedForward` in cpp/feed_forward.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("up", "down", "bias", "pieces")),
        *((name, ctypes.c_int64) for name in ("M", "D", "N", "n", "gated", "rows", "chunk")),
        ("per_unit", ctypes.c_float),
    )


def can_feed_forward(x: Tensor, down: Tensor) -> bool:
    """Return whether the kernels are loaded and take a feed-forward layer for x (…, D), with `down`
    (D, n) as its second linear's parameter."""
    sizes = (x.numel() // x.shape[-1], *down.shape)
    whole = all(size % 32 == 0 for size in sizes) and x.is_contiguous()
    return serves("AMX", down.dtype, x.dtype) and whole and down.numel() <= MAX_WEIGHT


def feed_forward(layer: FeedForwardLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's output for x (…, D), without `down`'s bias, and the tensor to save for
    backward."""
    job, out = _feed_forward(layer, x), torch.empty_like(x)
    kept = x.new_empty(job.M * job.N)
    library("AMX").pentameter_feed_forward(ctypes.byref(job), *map(address, (out, kept, x)))
    return out, kept


def feed_forward_backward(
    layer: FeedForwardLayer, g: Tensor, kept: Tensor
) -> tuple[Tensor, Paired, Paired, Tensor | None]:
    """Return four gradients or inputs to them: x's gradient (…, D), that before the activation, the
    input that `down` read, and the bias's gradient (N) if there is one.

    g: the output's gradient, (…, D). kept: the second result from `feed_forward`.
    """
    job, g_x = _feed_forward(layer, g), torch.empty_like(g)
    g_h, y = g.new_empty(job.M * job.N), g.new_empty(job.M * job.n)
    g_bias = g.new_empty(job.M // 32, job.N, dtype=torch.float32)
    to = (ctypes.c_void_p * 4)(*map(address, (g_x, g_h, y, g_bias)))
    library("AMX").pentameter_feed_forward_backward(
        ctypes.byref(job), to, address(g), address(kept)
    )
    return g_x, Paired(g_h, job.N), Paired(y, job.n), None if layer.bias is None else g_bias.sum(0)


def _feed_forward(layer: FeedForwardLayer, x: Tensor) -> _FeedForward:
    """Describe one call to the C++ kernels for x (…, D) or for a gradient with its shape."""
    (N, D), n = layer.up.shape, layer.down.shape[1]
    M, rows = x.numel() // D, ROWS_PER_CHUNK
    # Two blocks of rows for each core, and none too large for its cache. No result depends on it.
    while rows > 32 and (2 * torch.get_num_threads() * rows > M or rows * N > 2**19):
        rows //= 2
    pieces, per_unit = (None, 0.0) if layer.curve is None else layer.curve
    addresses = map(address, (layer.up, layer.down, layer.bias, pieces))
    sizes = (M, D, N, n, n != N, rows, ROWS_PER_CHUNK)
    return _FeedForward(*addresses, *sizes, per_unit)
