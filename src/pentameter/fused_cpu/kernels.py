"""Element-wise work in one pass over memory each, compiled one small function at a time.

Why not compile the whole model: a graph of forward and backward together saves dropout masks as
booleans, which the CPU backend writes one by one (54 ms for a mask that takes 2 ms to compute
again), and computes activations a second time inside reductions over rows. Here each kernel
says what it reads and writes; nothing is left to a partitioner. See docs/performance.md.

Shapes: M rows (batch × time), D d_model, B batch, T time, H heads, K head size; N = B · H; Q
queries and S keys of a block of the attention matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pentameter.fused_cpu import amx
from pentameter.model.compiled import kernel
from pentameter.model.dropout import keep_mask

ROWS_PER_SUM = 64
PADDING = 64  # elements: one or two lines of a cache


def precise(x: Tensor) -> Tensor:
    """At least fp32: sums, exponentials and the residual stream are not for 8 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plus_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias, at least in fp32; the bias may be absent."""
    x = precise(x)
    return x if bias is None else x + bias


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """x (B, T, D) with the keyed mask of `keys` (B, 2), which is its own backward; the mask is
    computed anew wherever it is needed."""
    if p == 0:
        return x
    T, D = x.shape[1:]
    time = torch.arange(T, dtype=torch.int32)
    channel = torch.arange(D, dtype=torch.int32)
    keep = keep_mask(keys, time[:, None] * D + channel, p)
    return torch.where(keep, x * (1 / (1 - p)), 0.0)


dropout = kernel(_dropped)


@kernel
def sum_rows(x: Tensor) -> Tensor:
    """(…, D) summed over all rows. In two stages: one would stride through all of memory for
    every few columns."""
    rows = math.prod(x.shape[:-1])
    group = math.gcd(rows, ROWS_PER_SUM)
    return precise(x.reshape(rows // group, group, x.shape[-1])).sum(1).sum(0)


@kernel
def copy_transposed(out: Tensor, x: Tensor) -> None:
    """Write x (M, n) to out (n, M)."""
    out.copy_(x.t())


def transpose(x: Tensor) -> Tensor:
    """(M, n) → (n, M), its rows padded in memory.

    M is often a power of two. Rows that far apart fall on the same few lines of a cache: without
    the padding, writing and reading them takes longer, the product that follows 8 %.
    """
    M, n = x.shape
    padded = x.new_empty(n, M + PADDING)[:, :M]
    (amx.transpose_into if amx.can_transpose(x) else copy_transposed)(padded, x)
    return padded


# A norm's weight is folded into the linear layer that reads the norm: with x the normalised input,
# (x · scale) · Wᵀ = x · (W · scale)ᵀ. So no pass over all rows is needed for its gradient.


@kernel
def fold(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """W · scale in `dtype`, of a weight (n, k) and a norm's weight (k,), if there is one."""
    return (weight if scale is None else weight * scale).to(dtype)


@kernel
def unfold(g: Tensor, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of `fold`'s weight and scale, contiguous and in their dtype."""
    g = g.to(weight.dtype)
    if scale is None:
        return g.contiguous(), None
    return (g * scale).contiguous(), (g * weight).sum(0)


# Norms, without weight and bias. RMSNorm does not centre its input.

CENTRED = {"layernorm": True, "rmsnorm": False}
"""`model.norm` → whether it subtracts the mean."""
NORM_EPS = 1e-5
"""The only `model.norm_eps` of these norms."""


def _normalise(x: Tensor, centred: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x normalised, in `dtype`, and the mean and scale (M, 1) that its backward needs."""
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
    x = x - mean
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + NORM_EPS)
    return (x * scale).to(dtype), mean, scale


def _norm_input_gradient(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, centred: bool
) -> Tensor:
    """The gradient of x, of a gradient `g` of norm(x)."""
    x = (x - mean) * scale
    g = precise(g)
    g = g - x * (g * x).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if centred else 0.0)
    return scale * g


norm_forward = kernel(_normalise)
norm_backward = kernel(_norm_input_gradient)


# A sub-layer's output joins the residual stream: x + dropout(y + bias), then the next norm.


@kernel
def add_norm_forward(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    p: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + dropout(y + bias), its norm in y's dtype, and the norm's mean and scale."""
    x = x + _dropped(plus_bias(y, bias), keys, p)
    return x, *_normalise(x, centred, y.dtype)


@kernel
def add_norm_backward(
    g: Tensor | None,
    g_norm: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    keys: Tensor,
    p: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the residual stream x and of y. `g` is what comes down the stream."""
    total = _norm_input_gradient(g_norm, x, mean, scale, centred)
    if g is not None:
        total = total + g
    return total, _dropped(total, keys, p).to(g_norm.dtype)


# Activations

_GELU_TANH = math.sqrt(2 / math.pi)


def _normal_cdf(x: Tensor, density: Tensor, *, exact: bool) -> Tensor:
    """Φ(x), given `density` = exp(-x² / 2).

    Where the result is rounded to 16 bits anyway, formula 7.1.26 of Abramowitz and Stegun (error
    below 1.5e-7) shares the exponential with the derivative, and takes 2/3 of the time.
    """
    if exact:
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * x.abs())
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    upper = 0.5 * density * t * (0.254829592 + t * (-0.284496736 + t * series))
    return torch.where(x >= 0, 1 - upper, upper)


# Each returns f(x) and f'(x); results that are not `exact` are rounded to 16 bits.


def _relu(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    return torch.relu(x), (x > 0).to(x.dtype)


def _gelu(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    density = torch.exp(-0.5 * x * x)
    share = _normal_cdf(x, density, exact=exact)
    return x * share, share + x * density * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    # Hendrycks & Gimpel 2016, the form GPT-2 uses
    tanh = torch.tanh(_GELU_TANH * (x + 0.044715 * x * x * x))
    inner = _GELU_TANH * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


ACTIVATIONS = {"relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


@kernel
def activation_forward(h: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """f(h + bias) in h's dtype; `kind` is one of ACTIVATIONS."""
    exact = h.dtype.itemsize > 2
    return ACTIVATIONS[kind](plus_bias(h, bias), exact)[0].to(h.dtype)


@kernel
def activation_backward(
    g: Tensor, h: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """The gradient of h from that of f(h + bias), and f(h + bias) again."""
    exact = h.dtype.itemsize > 2
    y, slope = ACTIVATIONS[kind](plus_bias(h, bias), exact)
    return (precise(g) * slope).to(h.dtype), y.to(h.dtype)


# The element-wise parts of attention, between its batched products. The matrix is cut into blocks
# of queries; a block reads only the keys it may see, so half a matrix of work is saved in the
# limit. The exponentials are kept unnormalised in the dtype of the products; each row's sum divides
# the small output instead.


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
            _sum_blocks([block[:, first:last] for block in blocks[i:]])
            for blocks in (k_blocks, v_blocks)
        )
        parts = [x.view(-1, n_heads, last - first, K).permute(0, 2, 1, 3) for x in (q, k, v)]
        rows.append(torch.stack(parts, 3))
        first = last
    return torch.cat(rows, 1).reshape(N // n_heads, first, n_heads * 3 * K)


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
        keep = _attention_keep(keys, e.shape, first, stride, p)
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
