"""Element-wise work in one pass over memory each, compiled one small function at a time.

Why not compile the whole model: a graph of forward and backward together saves dropout masks as
booleans, which the CPU backend writes one by one (54 ms for a mask that takes 2 ms to compute
again), and computes activations a second time inside reductions over rows. Here each kernel
says what it reads and writes; nothing is left to a partitioner. See docs/performance.md. Those of
attention are in attention_kernels.py, activations in activations.py.

Shapes: M rows (batch × time), D d_model, B batch, T time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
    return x * (1 / (1 - p)) * keep  # as the plain model: what is not finite stays so


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
    copy_transposed(padded, x)
    return padded


# A norm's weight is folded into the linear layer that reads the norm: with x the normalised input,
# (x · scale) · Wᵀ = x · (W · scale)ᵀ. So no pass over all rows is needed for its gradient.


@kernel
def fold(weights: tuple[Tensor, ...], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights (n, k) of linear layers that read the same, one below the other in `dtype`, times the
    weight (k,) of the norm before them, if there is one."""
    return torch.cat([weight if scale is None else weight * scale for weight in weights]).to(dtype)


@kernel
def unfold(
    g: Tensor, weights: tuple[Tensor, ...], scale: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """The gradients of `fold`'s weights and scale, contiguous and in their dtype."""
    parts = g.to(weights[0].dtype).split([len(weight) for weight in weights])
    if scale is None:
        return [part.contiguous() for part in parts], None
    g_scale = sum((part * weight).sum(0) for part, weight in zip(parts, weights, strict=True))
    assert isinstance(g_scale, Tensor)
    return [(part * scale).contiguous() for part in parts], g_scale


# Norms, without weight and bias.


class NormKind(NamedTuple):
    """Whether a norm subtracts the mean (RMSNorm does not), and what it adds to the mean square."""

    centred: bool
    eps: float


CENTRED = {"layernorm": True, "rmsnorm": False}
"""`model.norm` → `NormKind.centred`."""


def _normalise(x: Tensor, kind: NormKind, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x normalised, in `dtype`, and the mean and scale (M, 1) that its backward needs."""
    mean = x.mean(-1, keepdim=True) if kind.centred else torch.zeros_like(x[..., :1])
    x = x - mean
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + kind.eps)
    return (x * scale).to(dtype), mean, scale


def _norm_input_gradient(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, kind: NormKind
) -> Tensor:
    """The gradient of x, of a gradient `g` of norm(x)."""
    x = (x - mean) * scale
    g = precise(g)
    mean_g = g.mean(-1, keepdim=True) if kind.centred else 0.0
    return scale * (g - x * (g * x).mean(-1, keepdim=True) - mean_g)


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
    kind: NormKind,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + dropout(y + bias), its norm in y's dtype, and the norm's mean and scale."""
    x = x + _dropped(plus_bias(y, bias), keys, p)
    return x, *_normalise(x, kind, y.dtype)


@kernel
def add_norm_backward(
    g: Tensor | None,
    g_norm: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    keys: Tensor,
    p: float,
    kind: NormKind,
) -> tuple[Tensor, Tensor]:
    """The gradients of the residual stream x and of y. `g` is what comes down the stream."""
    total = _norm_input_gradient(g_norm, x, mean, scale, kind)
    if g is not None:
        total = total + g
    return total, _dropped(total, keys, p).to(g_norm.dtype)
