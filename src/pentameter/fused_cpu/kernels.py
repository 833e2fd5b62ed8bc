"""Norms, dropout and sums as element-wise kernels, compiled one small function at a time; each
passes over memory once. They compute what the C++ kernels do not take, and say what these must
give.

Compiling the whole model is slower: a joint forward and backward graph saves dropout masks as
booleans, which the CPU backend writes one by one (54 ms for a mask that takes 2 ms to recompute),
and recomputes activations inside row reductions. Here each kernel's inputs and outputs are fixed by
hand, and nothing is left to a partitioner (benchmarks/measurements/fused-cpu-step.md). Attention's
kernels are in attention_kernels.py, activations in activations.py.

Shapes: M rows (batch × sequence), D d_model, B batch, T sequence. Dropout's keys, int32 (B, 2), are
two random words per batch row, from which the mask is computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.model.compiled import kernel
from pentameter.model.dropout import drop, stream_index

ROWS_PER_SUM = 64
"""Rows per partial sum, of which a sum over all rows is made."""
PADDING = 64  # elements: one or two lines of a cache


def precise(x: Tensor) -> Tensor:
    """Return x in fp32, or in its own dtype if that is wider: sums, exponentials and the residual
    stream need more than 8 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plus_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (…, D) + bias (D,) in at least fp32; bias None adds nothing."""
    x = precise(x)
    return x if bias is None else x + bias


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Return x (B, T, D) after dropout with probability p and the mask that `keys` (B, 2)
    determine. Applied to the output's gradient, it is also dropout's backward pass."""
    if p == 0:
        return x
    T, D = x.shape[1:]
    return drop(x, keys, stream_index(torch.arange(T, dtype=torch.int32), range(D), D, T), p)


dropout = kernel(_dropped)


@kernel
def sum_rows(x: Tensor) -> Tensor:
    """Return x (…, D) summed over all dimensions but the last, (D,), in at least fp32.

    It sums in two stages: a single one would stride through all memory for every few columns.
    """
    rows = math.prod(x.shape[:-1])
    group = math.gcd(rows, ROWS_PER_SUM)
    return precise(x.reshape(rows // group, group, x.shape[-1])).sum(1).sum(0)


@kernel
def copy_transposed(out: Tensor, x: Tensor) -> None:
    """Write x (M, n), transposed, into `out` (n, M), which may have padded rows."""
    out.copy_(x.t())


def transpose(x: Tensor) -> Tensor:
    """Return a copy (n, M) with x (M, n) transposed, its rows padded in memory.

    M is often 2^n for some n. Rows that far apart fall on the same few cache lines: without
    padding, the copy takes longer, and the matmul that reads it takes 8 % longer.
    """
    M, n = x.shape
    padded = x.new_empty(n, M + PADDING)[:, :M]
    copy_transposed(padded, x)
    return padded


# A norm's weight is folded into the linear layer that reads the norm: with x the normalised input,
# (x · scale) · Wᵀ = x · (W · scale)ᵀ. So no pass over all rows is needed for its gradient.


@kernel
def fold(weights: tuple[Tensor, ...], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return one matrix in `dtype` for several linear layers that read the same tensor: their
    weights (…, n, k) stacked by rows, each multiplied by `scale` (k,), the weight of the norm
    before them, unless it is None. Experts' layers have weights (E, n, k), and are stacked expert
    by expert."""
    scaled = [weight if scale is None else weight * scale for weight in weights]
    return torch.cat(scaled, -2).to(dtype)


@kernel
def unfold(
    g: Tensor, weights: tuple[Tensor, ...], scale: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return (gradients, scale's gradient) for the arguments of `fold`, given its result's gradient
    g (…, n, k). There is one gradient per weight, contiguous and in the weight's dtype; scale's is
    (k,), or None if `scale` is None."""
    parts = g.to(weights[0].dtype).split([weight.shape[-2] for weight in weights], -2)
    if scale is None:
        return [part.contiguous() for part in parts], None
    products = (part * weight for part, weight in zip(parts, weights, strict=True))
    g_scale = sum(product.flatten(0, -2).sum(0) for product in products)
    assert isinstance(g_scale, Tensor)
    return [(part * scale).contiguous() for part in parts], g_scale


# Norms, without weight and bias.


class NormKind(NamedTuple):
    """A norm's formula: `centred`, whether it subtracts the mean (LayerNorm does, RMSNorm does
    not), and the `eps` added to the mean square."""

    centred: bool
    eps: float


CENTRED = {"layernorm": True, "rmsnorm": False}
"""Maps a value of `model.norm` to `NormKind.centred`."""


def _normalise(x: Tensor, kind: NormKind, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, factor) for x (…, D): y is x normalised, (…, D) in `dtype`; backward needs
    the mean (0 for RMSNorm) and the factor 1 / √(mean square + eps), (…, 1) each."""
    mean = x.mean(-1, keepdim=True) if kind.centred else torch.zeros_like(x[..., :1])
    x = x - mean
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + kind.eps)
    return (x * scale).to(dtype), mean, scale


def _norm_input_gradient(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, kind: NormKind
) -> Tensor:
    """Return x's gradient (…, D), given the gradient `g` (…, D) of the normalised output, and the
    `mean` and the factor `scale`, (…, 1) each, that the forward pass returned."""
    x = (x - mean) * scale
    g = precise(g)
    mean_g = g.mean(-1, keepdim=True) if kind.centred else 0.0
    return scale * (g - x * (g * x).mean(-1, keepdim=True) - mean_g)


norm_forward = kernel(_normalise)
norm_backward = kernel(_norm_input_gradient)


# A sub-layer's output joins the residual stream: x + dropout(y + bias), then the next norm.


@kernel
def add_norm_forward(
    x: Tensor, y: Tensor, bias: Tensor | None, keys: Tensor, p: float, kind: NormKind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x' = x + dropout(y + bias) (B, T, D), x' normalised in y's dtype (B, T, D), and the
    norm's mean and scale (B, T, 1).

    x: the residual stream (B, T, D). y: a sub-layer's output (B, T, D). bias: (D,) or None. keys,
    p: dropout's keys, int32 (B, 2), and probability; p = 0 drops nothing. kind: the norm's formula
    and epsilon.
    """
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
    """Return the gradients for the residual stream x and for the sub-layer's output y, (B, T, D)
    each. The bias's gradient is y's, summed over rows.

    g: the gradient that later sub-layers give the residual stream; None after the last norm.
    g_norm: the normalised output's gradient. x, mean, scale: `add_norm_forward`'s results, x being
    its first. keys, p, kind: the forward pass's arguments, from which dropout's mask is computed
    again.
    """
    total = _norm_input_gradient(g_norm, x, mean, scale, kind)
    if g is not None:
        total = total + g
    return total, _dropped(total, keys, p).to(g_norm.dtype)
