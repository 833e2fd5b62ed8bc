"""The element-wise parts of attention, between its batched products.

The matrix is cut into blocks of queries; a block reads only the keys it may see, so half a
matrix of work is saved in the limit. The exponentials are kept unnormalised in the dtype of the
products; each row's sum divides the small output instead.

Shapes: B batch, H heads, T time, K head size; N = B · H; Q and S queries and keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pentameter.fused_cpu.kernels import plus_bias, precise
from pentameter.model.compiled import kernel
from pentameter.model.dropout import keep_mask


@kernel
def split_heads(
    qkv: Tensor, bias: Tensor | None, n_heads: int, n_blocks: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(B, T, H·3·K), its rows laid out head by head, → for each block its queries (N, Q, K), and
    the keys and values (N, S, K) that it may see; all contiguous, as batched products want them."""
    B, T, width = qkv.shape
    K = width // (3 * n_heads)
    parts = plus_bias(qkv, bias).to(qkv.dtype).view(B, T, n_heads, 3, K)
    q, k, v = parts.permute(3, 0, 2, 1, 4).reshape(3, B * n_heads, T, K)
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
    n_heads: int,
) -> Tensor:
    """The gradient of `split_heads`, (B, T, H·3·K): what several blocks saw is summed."""
    N, _, K = q_blocks[0].shape
    rows, first = [], 0
    for i, q in enumerate(q_blocks):
        last = first + q.shape[1]
        # Times before `last` are seen by this block of queries and by all after it.
        k, v = (
            _sum([block[:, first:last] for block in blocks[i:]]) for blocks in (k_blocks, v_blocks)
        )
        parts = [x.view(-1, n_heads, last - first, K).permute(0, 2, 1, 3) for x in (q, k, v)]
        rows.append(torch.stack(parts, 3))
        first = last
    return torch.cat(rows, 1).reshape(N // n_heads, first, n_heads * 3 * K)


def _sum(blocks: Sequence[Tensor]) -> Tensor:
    total = precise(blocks[-1])
    for block in blocks[:-1]:
        total = total + block
    return total.to(blocks[0].dtype)


def _keep(keys: Tensor, shape: torch.Size, first: int, stride: int, p: float) -> Tensor:
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
    keep = _keep(keys, e.shape, first, stride, p)
    return e, torch.where(keep, precise(e) * (1 / (1 - p)), 0.0).to(dtype), inverse


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
        keep = _keep(keys, e.shape, first, stride, p)
        g = torch.where(keep, g * (1 / (1 - p)), 0.0)
        dropped = torch.where(keep, weights * (1 / (1 - p)), 0.0).to(e.dtype)
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


def score_scale(head_size: int) -> float:
    """1 / √K."""
    return 1 / math.sqrt(head_size)
