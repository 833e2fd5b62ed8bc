"""Causal attention around its matmuls, by the C++ kernels in `cpp/between_matmuls.cpp`. The
functions are those of `fused_cpu/attention_kernels.py`, for what `can_attend` accepts.

Shapes: B batch, T sequence, H query heads, G KV heads, K head size; N = B · H, M = B · G; Q queries
and S keys per attention block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pentameter.fused_cpu.heads import Heads, HeadShape
from pentameter.fused_cpu.native import CHANNELS, Struct, call, fields, serves
from pentameter.model.dropout import keep_bound, rows_per_block
from pentameter.model.positions import Rotation

MOST_CHANNELS = 256
"""Largest head size, in channels, that the kernels' buffers hold."""


class _Projected(Struct):
    """ctypes form of the C++ struct `Projected` in cpp/between_matmuls.cpp: where queries, keys or
    values and their gradients lie, and what is to be applied to them."""

    _fields_ = fields("data gradient bias norm g_norm", int64="row head")


class _Split(Struct):
    """ctypes form of the C++ struct `Split` in cpp/between_matmuls.cpp: the arguments of the
    kernels that split a projection into heads and join it."""

    _fields_ = (
        *((name, _Projected) for name in ("q", "k", "v")),
        *fields("cosine sine", int64="B T H G K half blocks low", float32="norm_eps"),
    )


class _Softmax(Struct):
    """ctypes form of the C++ struct `Softmax` in cpp/between_matmuls.cpp: the arguments of the
    kernels of a softmax with dropout."""

    _fields_ = fields(
        "keys", int64="N H Q S first stride low", int32="bound", float32="dropout_scale scale"
    )


def can_attend(heads: Heads, shape: HeadShape, n_blocks: int) -> bool:
    """Return whether the vector library is loaded and takes these heads: biases, rotation and norms
    in fp32, norms that act on each head by itself, rows that lie one after another, head
    size and query blocks divisible by CHANNELS, and dropout that numbers the weights of a batch row
    in one block."""
    T, K = heads.q.data.shape[1], shape.head_size
    parts = (heads.q, heads.k, heads.v)
    high = [x for part in parts for x in part[1:]] + list(heads.rotation or ())
    return (
        serves("vector", torch.float32, heads.q.data.dtype)
        and all(x is None or x.dtype is torch.float32 for x in high)
        and all(part.norm is None or part.norm.dim() == 1 for part in parts)
        and heads.q.data.stride(1) == (shape.n_heads + 2 * shape.n_kv_heads) * K
        and K % CHANNELS == 0
        and K <= MOST_CHANNELS
        and T % (n_blocks * CHANNELS) == 0
        and rows_per_block(shape.n_heads * shape.context_length, shape.context_length) is None
    )


def split_heads(
    heads: Heads, n_blocks: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return one tensor per query block three times: its queries (N, Q, K), and the keys and the
    values (M, S, K) that it can see, with bias, norm and rotation applied."""
    (B, T, H, K), G = heads.q.data.shape, heads.k.data.shape[2]
    ends = [T // n_blocks * (i + 1) for i in range(n_blocks)]
    new = heads.q.data.new_empty
    queries = tuple(new(B * H, T // n_blocks, K) for _ in ends)
    keys, values = (tuple(new(B * G, end, K) for end in ends) for _ in range(2))
    parts = [
        _Projected(part.data, None, part.bias, part.norm, None, *part.data.stride()[1:3])
        for part in (heads.q, heads.k, heads.v)
    ]
    job = _split(parts, (B, T, H, G, K), heads.rotation, n_blocks, heads.q.data.dtype, heads.eps)
    call("vector", "split_heads", job, queries, keys, values)
    return queries, keys, values


def join_heads(
    q_blocks: Sequence[Tensor],
    k_blocks: Sequence[Tensor],
    v_blocks: Sequence[Tensor],
    shape: HeadShape,
    rotation: Rotation | None,
    normed: Heads | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients for the projection (B, T, width), before bias, norm and rotation, and
    for the query norm's and the key norm's weights, (K,) each, or None. q_blocks, k_blocks,
    v_blocks: gradients for `split_heads`' three lists. rotation: the forward pass's. normed: the
    forward pass's heads if they have norms."""
    H, G, K = shape[:3]
    B, T, dtype = len(q_blocks[0]) // H, k_blocks[-1].shape[1], q_blocks[0].dtype
    joined = q_blocks[0].new_empty(B, T, (H + 2 * G) * K)
    g_norms = [None if normed is None else joined.new_zeros(B * n, K).float() for n in (H, G)]
    given = (None, None, None) if normed is None else (normed.q, normed.k, None)
    parts = []
    for part, g, g_norm in zip(given, shape.split(joined), (*g_norms, None), strict=True):
        data, bias, norm = (None, None, None) if part is None else part
        parts.append(_Projected(data, g, bias, norm, g_norm, *g.stride()[1:3]))
    job = _split(parts, (B, T, H, G, K), rotation, len(q_blocks), dtype, shape.norm_eps)
    blocks = [tuple(x.contiguous() for x in each) for each in (q_blocks, k_blocks, v_blocks)]
    call("vector", "join_heads", job, *blocks)
    g_q_norm, g_k_norm = (None if g is None else g.sum(0) for g in g_norms)
    return joined, g_q_norm, g_k_norm


def _split(
    parts: Sequence[_Projected],
    sizes: tuple[int, ...],
    rotation: Rotation | None,
    n_blocks: int,
    dtype: torch.dtype,
    eps: float,
) -> _Split:
    """Return the C++ call's arguments for queries, keys and values of `sizes` B, T, H, G and K, in
    `n_blocks` blocks of queries. It holds addresses only."""
    angles = (None, None) if rotation is None else rotation
    half = 0 if rotation is None else rotation.cosine.shape[1]
    return _Split(*parts, *angles, *sizes, half, n_blocks, dtype is torch.bfloat16, eps)


def softmax_forward(
    scores: Tensor, mask: Tensor | None, first: int, keys: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query block's unnormalised weights exp(s - max s) (N, Q, S), the same after dropout,
    and 1 / row sums (N, Q, 1). scores: the raw matmul q · kᵀ (N, Q, S). mask: None, as `first`, the
    position of the block's first query, says which keys each query sees. keys: dropout's (B, 2).
    shape: has the head size and dropout probability."""
    assert mask is None
    e = torch.empty_like(scores)
    dropped = torch.empty_like(scores) if shape.p else None
    inverse = scores.new_empty(*scores.shape[:2], 1, dtype=torch.float32)
    call("vector", "softmax", _softmax(scores, first, keys, shape), e, dropped, inverse, scores)
    return e, e if dropped is None else dropped, inverse


def softmax_backward(
    g: Tensor, e: Tensor, delta: Tensor, inverse: Tensor, first: int, keys: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor | None]:
    """Return (the raw scores' gradient, the dropped weights), (N, Q, S) each; the latter are None
    without dropout. g: the dropped weights' gradient. e, inverse: from `softmax_forward`. delta:
    row sums (N, Q, 1) over weight × gradient. first, keys, shape: the forward pass's."""
    g_scores, dropped = torch.empty_like(e), torch.empty_like(e) if shape.p else None
    job = _softmax(e, first, keys, shape)
    call("vector", "softmax_gradient", job, g_scores, dropped, g.contiguous(), e, delta, inverse)
    return g_scores, dropped


def _softmax(scores: Tensor, first: int, keys: Tensor, shape: HeadShape) -> _Softmax:
    """Return the C++ call's arguments for a query block's scores or weights (N, Q, S)."""
    sizes = (len(scores), shape.n_heads, *scores.shape[1:], first, shape.context_length)
    dropout_scale = 1 / (1 - shape.p) if shape.p else 0.0
    low = scores.dtype is torch.bfloat16
    return _Softmax(keys, *sizes, low, keep_bound(shape.p), dropout_scale, shape.scale)


def merge_heads(blocks: Sequence[Tensor], inverses: Sequence[Tensor], n_heads: int) -> Tensor:
    """Multiply each query block's output (N, Q, K) by its inverse row sums (N, Q, 1), and join
    blocks and heads into (B, T, H·K). n_heads: H."""
    job = _merged(blocks[0], len(blocks), n_heads)
    y = blocks[0].new_empty(job.B, job.T, n_heads * job.K)
    call("vector", "merge_heads", job, y, tuple(blocks), tuple(inverses))
    return y


def split_gradient(
    g: Tensor, y: Tensor, inverses: Sequence[Tensor], n_heads: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Split the output's gradient g (B, T, H·K) into query blocks. Return one tensor per block
    three times: its part of g (N, Q, K), the same divided by the row sums (N, Q, K), and Σ g·y over
    a head's channels (N, Q, 1). y: attention's output (B, T, H·K). inverses: each block's 1 / row
    sums (N, Q, 1). n_heads: H."""
    K = g.shape[-1] // n_heads
    blocks, scaled = (
        tuple(g.new_empty(*inverse.shape[:2], K) for inverse in inverses) for _ in range(2)
    )
    deltas = tuple(map(torch.empty_like, inverses))
    job = _merged(blocks[0], len(inverses), n_heads)
    call("vector", "split_gradient", job, blocks, scaled, deltas, g, y, tuple(inverses))
    return blocks, scaled, deltas


def _merged(block: Tensor, n_blocks: int, n_heads: int) -> _Split:
    """Return the C++ call's arguments for `n_blocks` blocks of outputs like this one, (N, Q, K)."""
    N, Q, K = block.shape
    nothing = [_Projected(None, None, None, None, None, 0, 0)] * 3
    sizes = N // n_heads, Q * n_blocks, n_heads, n_heads, K
    return _split(nothing, sizes, None, n_blocks, block.dtype, 0.0)
