"""The element-wise work of attention between its products, compiled as that of kernels.py is.

The matrix of weights is cut into blocks of queries; a block reads only the keys it may see, so half
a matrix of work is saved in the limit. The exponentials are kept unnormalised in the dtype of the
products; each row's sum divides the small output instead. Heads that share keys and values stand
one after another, so that a product of all their queries with these takes them as its rows.

Shapes: B batch, T time, H heads, G heads of keys and values, K head size; N = B · H, M = B · G; Q
queries and S keys of a block of the attention matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pentameter.fused_cpu.heads import Heads, HeadShape, Part
from pentameter.fused_cpu.kernels import ROWS_PER_SUM, plus_bias, precise
from pentameter.model.compiled import kernel
from pentameter.model.dropout import keep_mask
from pentameter.model.positions import Rotation


def _unit(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (B, T, H, K) divided by its root mean square, over what the norm acts on, and 1 / that."""
    scale = torch.rsqrt((x * x).mean(_normed(norm), keepdim=True) + eps)
    return x * scale, scale


def _normed(norm: Tensor) -> tuple[int, ...]:
    return tuple(range(-norm.dim(), 0))


def _turned(part: Part, rotation: Rotation | None, eps: float) -> Tensor:
    """Queries or keys as they are multiplied, (B, T, H, K), at least in fp32."""
    x = plus_bias(part.data, part.bias)
    if part.norm is not None:
        x = _unit(x, part.norm, eps)[0] * part.norm
    return x if rotation is None else rotation(x)


def _turned_gradient(
    g: Tensor, part: Part | None, rotation: Rotation | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the part's data and of its norm's weight, given that of `_turned`; without
    a norm the part is not needed."""
    if rotation is not None:
        g = Rotation(rotation.cosine, -rotation.sine)(precise(g))
    if part is None or part.norm is None:
        return g, None
    x, scale = _unit(plus_bias(part.data, part.bias), part.norm, eps)
    g = precise(g)
    rows = (g * x).reshape(-1, *part.norm.shape)
    group = math.gcd(len(rows), ROWS_PER_SUM)  # in two stages, as `sum_rows`
    g_norm = rows.reshape(-1, group, *part.norm.shape).sum(1).sum(0)
    g = g * part.norm
    return scale * (g - x * (g * x).mean(_normed(part.norm), keepdim=True)), g_norm


@kernel
def split_heads(heads: Heads, n_blocks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """For each block its queries (N, Q, K), and the keys and values (M, S, K) that it may see; all
    contiguous, as batched products want them."""
    dtype = heads.q.data.dtype
    T, K = heads.q.data.shape[1], heads.q.data.shape[3]
    made = (
        _turned(heads.q, heads.rotation, heads.eps),
        _turned(heads.k, heads.rotation, heads.eps),
        plus_bias(heads.v.data, heads.v.bias),
    )
    q, k, v = (x.to(dtype).permute(0, 2, 1, 3).reshape(-1, T, K) for x in made)
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
    """The gradients of the projection (B, T, width) and of the norms of queries and keys, given
    those of what `split_heads` gives: what several blocks saw is summed. `normed` are the heads
    where queries and keys have norms."""
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
    q, k, v = (
        torch.cat(rows, 1).view(-1, n_heads, first, K).permute(0, 2, 1, 3)
        for rows, n_heads in (
            (q_rows, shape.n_heads),
            (k_rows, shape.n_kv_heads),
            (v_rows, shape.n_kv_heads),
        )
    )
    q_part, k_part = (None, None) if normed is None else (normed.q, normed.k)
    g_q, g_q_norm = _turned_gradient(q, q_part, rotation, shape.norm_eps)
    g_k, g_k_norm = _turned_gradient(k, k_part, rotation, shape.norm_eps)
    joined = shape.joined(*(g.to(v.dtype) for g in (g_q, g_k, v)))
    return joined, g_q_norm, g_k_norm


def _sum_blocks(blocks: Sequence[Tensor]) -> Tensor:
    total = precise(blocks[-1])
    for block in blocks[:-1]:
        total = total + block
    return total.to(blocks[0].dtype)


def _attention_keep(keys: Tensor, shape: torch.Size, first: int, stride: int, p: float) -> Tensor:
    N, Q, S = shape
    B = keys.shape[0]
    head = torch.arange(N // B, dtype=torch.int32)[:, None, None]
    query = torch.arange(first, first + Q, dtype=torch.int32)[:, None]
    key = torch.arange(S, dtype=torch.int32)
    index = (head * stride + query) * stride + key  # `AttentionDropout`'s numbering
    return keep_mask(keys, index, p).view(shape)


@kernel
def softmax_forward(
    scores: Tensor, mask: Tensor, scale: float, first: int, keys: Tensor, stride: int, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised weights (N, Q, S), the same dropped, and 1 / row sums (N, Q, 1).

    `scores` are raw products: scaling them here is free. `mask` (Q, S) is 0 or -∞ (a table is
    twice as fast as comparing places here). Sums are of the weights as they are stored, so that
    rounding them does not change what a row adds up to. `first` is the time of query 0.
    """
    dtype = scores.dtype
    scores = precise(scores) * scale + mask
    e = torch.exp(scores - scores.amax(-1, keepdim=True)).to(dtype)
    inverse = 1 / precise(e).sum(-1, keepdim=True)
    if p == 0:
        return e, e, inverse
    keep = _attention_keep(keys, e.shape, first, stride, p)
    return e, (precise(e) * (1 / (1 - p)) * keep).to(dtype), inverse


@kernel
def softmax_backward(
    g: Tensor,
    e: Tensor,
    delta: Tensor,
    inverse: Tensor,
    scale: float,
    first: int,
    keys: Tensor,
    stride: int,
    p: float,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the raw scores, and the dropped weights again, where any are dropped.

    `g` (N, Q, S) is the gradient of the dropped weights, `delta` (N, Q, 1) the sum over a row of
    weight × gradient, which is also output · its gradient (Dao et al. 2022, section 3).
    """
    g, weights = precise(g), precise(e)
    dropped = None
    if p > 0:
        keep = _attention_keep(keys, e.shape, first, stride, p)
        g = g * (1 / (1 - p)) * keep
        dropped = (weights * (1 / (1 - p)) * keep).to(e.dtype)
    return (weights * (g - delta) * (inverse * scale)).to(e.dtype), dropped


@kernel
def merge_heads(blocks: Sequence[Tensor], inverses: Sequence[Tensor], n_heads: int) -> Tensor:
    """Each block (N, Q, K) divided by its row sums, heads side by side: (B, T, H·K)."""
    parts = [precise(y) * inverse for y, inverse in zip(blocks, inverses, strict=True)]
    y = torch.cat(parts, 1).to(blocks[0].dtype)
    N, T, K = y.shape
    return y.view(N // n_heads, n_heads, T, K).permute(0, 2, 1, 3).reshape(-1, T, n_heads * K)


@kernel
def split_gradient(
    g: Tensor, y: Tensor, inverses: Sequence[Tensor], n_heads: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Three tensors for each block of queries: its g (N, Q, K), the same divided by the row sums,
    and delta = Σ g·y (N, Q, 1).

    g and y are (B, T, H·K).
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
    """(T, T): 0 where the key is not after the query, -∞ where it is."""
    precise = torch.promote_types(dtype, torch.float32)
    return torch.full((T, T), float("-inf"), dtype=precise).triu_(1)
