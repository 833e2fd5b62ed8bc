"""Element-wise work between attention's matmuls, compiled one small function at a time like
kernels.py.

The attention matrix is split into query blocks; each block reads only keys that it may see, which
saves up to half the matrix. Exponentials stay unnormalised in the matmul dtype; the small output is
divided by the row sums instead. Heads with common keys and values are adjacent, so one matmul takes
all their queries as its rows.

Shapes: B batch, T sequence, H query heads, G KV heads, K head size; N = B · H, M = B · G; Q queries
and S keys per attention block. Dropout's keys, int32 (B, 2), are two random words per batch row,
from which the mask is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pentameter.fused_cpu.heads import Heads, HeadShape, Projected
from pentameter.fused_cpu.kernels import ROWS_PER_SUM, plus_bias, precise
from pentameter.model.compiled import kernel
from pentameter.model.dropout import drop, weight_index
from pentameter.model.positions import Rotation


def _scale_to_unit(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Divide x (B, T, H, K) by its root mean square over the dimensions that the norm's weight
    `norm` has, (K,) or (H, K). Return the result, and the factor that x was multiplied by."""
    scale = torch.rsqrt((x * x).mean(_normed(norm), keepdim=True) + eps)
    return x * scale, scale


def _normed(norm: Tensor) -> tuple[int, ...]:
    """Return the dimensions, counted from the end, over which a norm with this weight takes the
    mean square: (-1,) for a weight (K,), (-2, -1) for (H, K)."""
    return tuple(range(-norm.dim(), 0))


def _rotated(part: Projected, rotation: Rotation | None, eps: float) -> Tensor:
    """Return queries or keys (B, T, H, K) ready for the matmul, in at least fp32: with the bias
    added, normed, then rotated. A step whose bias, norm or rotation is None is left out. eps is the
    norm's."""
    x = plus_bias(part.data, part.bias)
    if part.norm is not None:
        x = _scale_to_unit(x, part.norm, eps)[0] * part.norm
    return x if rotation is None else rotation(x)


def _rotated_gradient(
    g: Tensor, part: Projected | None, rotation: Rotation | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients for `part.data` and for the norm's weight, the latter None without a
    norm, given the gradient `g` (B, T, H, K) of `_rotated`'s output. `part` may be None without a
    norm, as it is then not read."""
    if rotation is not None:
        g = Rotation(rotation.cosine, -rotation.sine)(precise(g))
    if part is None or part.norm is None:
        return g, None
    x, scale = _scale_to_unit(plus_bias(part.data, part.bias), part.norm, eps)
    g = precise(g)
    rows = (g * x).reshape(-1, *part.norm.shape)
    group = math.gcd(len(rows), ROWS_PER_SUM)  # in two stages, as `sum_rows`
    g_norm = rows.reshape(-1, group, *part.norm.shape).sum(1).sum(0)
    g = g * part.norm
    return scale * (g - x * (g * x).mean(_normed(part.norm), keepdim=True)), g_norm


@kernel
def split_heads(heads: Heads, n_blocks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return three lists with one tensor per query block: its queries (N, Q, K), and the keys and
    the values (M, S, K) that it can see, with bias, norm and rotation applied. N = batch × query
    heads, M = batch × KV heads, K the head size. All are contiguous, as batched matmuls need.
    n_blocks, the number of query blocks, must divide T."""
    dtype = heads.q.data.dtype
    T, K = heads.q.data.shape[1], heads.q.data.shape[3]
    q, k = (_rotated(part, heads.rotation, heads.eps) for part in (heads.q, heads.k))
    v = plus_bias(heads.v.data, heads.v.bias)
    q, k, v = (x.to(dtype).permute(0, 2, 1, 3).reshape(-1, T, K) for x in (q, k, v))
    ends = [T // n_blocks * (i + 1) for i in range(n_blocks)]
    return (
        [block.contiguous() for block in q.chunk(n_blocks, 1)],
        [k[:, :end].contiguous() for end in ends],
        [v[:, :end].contiguous() for end in ends],
    )


@kernel
def join_heads(
    q_blocks: Sequence[Tensor],
    k_blocks: Sequence[Tensor],
    v_blocks: Sequence[Tensor],
    shape: HeadShape,
    rotation: Rotation | None,
    normed: Heads | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients for the projection (B, T, width), before bias, norm and rotation, and
    for the query norm's and the key norm's weights (None without norms).

    q_blocks, k_blocks, v_blocks: gradients for `split_heads`' three lists; keys and values that
    several blocks read are summed. shape: the layer's sizes. rotation: the forward pass's, None
    without rotary positions. normed: the forward pass's heads; None if queries and keys have no
    norms.
    """
    K = shape.head_size
    q_rows, k_rows, v_rows = [], [], []
    first = 0
    for i, q in enumerate(q_blocks):
        last = first + q.shape[1]
        # Times before `last` are seen by this block of queries and by all after it.
        q_rows.append(q)
        k_rows.append(_sum_blocks([block[:, first:last] for block in k_blocks[i:]]))
        v_rows.append(_sum_blocks([block[:, first:last] for block in v_blocks[i:]]))
        first = last
    H, G = shape.n_heads, shape.n_kv_heads
    q, k, v = (
        torch.cat(rows, 1).view(-1, n_heads, first, K).permute(0, 2, 1, 3)
        for rows, n_heads in ((q_rows, H), (k_rows, G), (v_rows, G))
    )
    q_part, k_part = (None, None) if normed is None else (normed.q, normed.k)
    g_q, g_q_norm = _rotated_gradient(q, q_part, rotation, shape.norm_eps)
    g_k, g_k_norm = _rotated_gradient(k, k_part, rotation, shape.norm_eps)
    joined = shape.join(*(g.to(v.dtype) for g in (g_q, g_k, v)))
    return joined, g_q_norm, g_k_norm


def _sum_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """Sum same-shaped tensors in at least fp32; return the sum in their own dtype."""
    total = precise(blocks[-1])
    for block in blocks[:-1]:
        total = total + block
    return total.to(blocks[0].dtype)


def _drop_weights(weights: Tensor, keys: Tensor, first: int, shape: HeadShape) -> Tensor:
    """Apply dropout to a block's attention weights (N, Q, S), or to their gradients, with the mask
    that `keys` (B, 2) determine; N = batch × query heads. first: the position in the sequence of
    the block's first query. shape: has the dropout probability."""
    N, Q, S = weights.shape
    query = torch.arange(first, first + Q, dtype=torch.int32)
    key = torch.arange(S, dtype=torch.int32)
    numbers = weight_index(range(N // len(keys)), query, key, shape.context_length)
    return drop(weights.view(len(keys), -1, Q, S), keys, numbers, shape.p).view(N, Q, S)


@kernel
def softmax_forward(
    scores: Tensor, mask: Tensor, first: int, keys: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query block's unnormalised weights exp(s - max s) (N, Q, S), the same after dropout,
    and 1 / row sums (N, Q, 1); N = batch × query heads.

    scores: the raw matmul q · kᵀ (N, Q, S); 1 / √K is multiplied in here. mask: (Q, S), 0 or -∞
    (twice as fast as comparing positions here). first: the block's first query's position. keys:
    dropout's (B, 2). shape: has the head size and dropout probability. Sums use the stored, rounded
    weights, so that rounding does not change a row's total.
    """
    dtype = scores.dtype
    scores = precise(scores) * shape.scale + mask
    e = torch.exp(scores - scores.amax(-1, keepdim=True)).to(dtype)
    inverse = 1 / precise(e).sum(-1, keepdim=True)
    if shape.p == 0:
        return e, e, inverse
    return e, _drop_weights(precise(e), keys, first, shape).to(dtype), inverse


@kernel
def softmax_backward(
    g: Tensor, e: Tensor, delta: Tensor, inverse: Tensor, first: int, keys: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor | None]:
    """Return (the raw scores' gradient, the dropped weights), (N, Q, S) each. The latter are
    computed again, and are None without dropout.

    g: the dropped weights' gradient (N, Q, S). e, inverse: unnormalised weights (N, Q, S) and 1 /
    row sums (N, Q, 1) from `softmax_forward`. delta: row sums (N, Q, 1) over weight × gradient,
    equal to output · output gradient (Dao et al. 2022, section 3). first: the block's first query's
    position. keys: dropout's (B, 2). shape: has the head size and dropout probability.
    """
    g, weights = precise(g), precise(e)
    dropped = None
    if shape.p > 0:
        g = _drop_weights(g, keys, first, shape)
        dropped = _drop_weights(weights, keys, first, shape).to(e.dtype)
    return (weights * (g - delta) * (inverse * shape.scale)).to(e.dtype), dropped


@kernel
def merge_heads(blocks: Sequence[Tensor], inverses: Sequence[Tensor], n_heads: int) -> Tensor:
    """Multiply each query block's output (N, Q, K) by its inverse row sums (N, Q, 1), N = batch ×
    query heads, and join blocks and heads into (B, T, H·K). n_heads: H."""
    parts = [precise(y) * inverse for y, inverse in zip(blocks, inverses, strict=True)]
    y = torch.cat(parts, 1).to(blocks[0].dtype)
    N, T, K = y.shape
    return y.view(N // n_heads, n_heads, T, K).permute(0, 2, 1, 3).reshape(-1, T, n_heads * K)


@kernel
def split_gradient(
    g: Tensor, y: Tensor, inverses: Sequence[Tensor], n_heads: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Split the output's gradient g (B, T, H·K) into query blocks. Returns three lists with one
    tensor per block: its part of g (N, Q, K); the same divided by the row sums (N, Q, K); and delta
    = Σ g·y over a head's channels (N, Q, 1). N = batch × query heads.

    y: attention's output (B, T, H·K). inverses: each block's 1 / row sums (N, Q, 1). n_heads: H.
    """
    B, T, width = g.shape
    K = width // n_heads
    n_blocks = len(inverses)

    def by_heads(x: Tensor) -> Tensor:
        return x.view(B, T, n_heads, -1).permute(0, 2, 1, 3).reshape(B * n_heads, T, -1)

    blocks = [block.contiguous() for block in by_heads(g).chunk(n_blocks, 1)]
    scaled = [(precise(g) * i).to(g.dtype) for g, i in zip(blocks, inverses, strict=True)]
    delta = by_heads((precise(g) * precise(y)).view(B, T, n_heads, K).sum(-1))
    return blocks, scaled, [block.contiguous() for block in delta.chunk(n_blocks, 1)]


def causal_mask(T: int, dtype: torch.dtype) -> Tensor:
    """Return a mask (T, T) in at least fp32, to be added to scores: 0 for keys up to the query's
    position, -∞ for later ones."""
    precise = torch.promote_types(dtype, torch.float32)
    return torch.full((T, T), float("-inf"), dtype=precise).triu_(1)
