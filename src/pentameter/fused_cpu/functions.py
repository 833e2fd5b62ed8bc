"""Forward and backward of each large operation, by hand, over the compiled kernels.

What each saves is the least that backward needs; dropout masks are never saved, their bits are
computed again. Matrix products go to PyTorch's own kernels without a bias: the bias rides along
in the element-wise kernel that follows, which reads the product anyway.

Shapes: M rows, N batch × heads, T time, K head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.fused_cpu import amx, kernels

QUERY_BLOCKS = 2  # more save products but add calls: 2 was fastest at 256 tokens


class Product(Function):
    """x (…, k) in the step's dtype, times weight · scale: a weight (n, k) of the parameters' dtype
    and the weight (k,) of the norm that gave x, if one did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """(…, n)."""
        low = kernels.fold(weight, scale, x.dtype)
        ctx.save_for_backward(x, low, weight, scale)
        return x @ low.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, scale = ctx.saved_tensors
        return g @ low, *kernels.unfold(_weight_gradient(g, x), weight, scale)


class EmbeddingDropout(Function):
    """Keyed dropout of the embedding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        """(B, T, D)."""
        ctx.save_for_backward(keys)
        ctx.p = p
        return kernels.dropout(x, keys, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return kernels.dropout(g.contiguous(), ctx.saved_tensors[0], ctx.p), None, None


class Norm(Function):
    """x normalised, in `dtype`; without the norm's weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, centred: bool, dtype: torch.dtype) -> Tensor:
        """(B, T, D)."""
        y, mean, scale = kernels.norm_forward(x, centred, dtype)
        ctx.save_for_backward(x, mean, scale)
        ctx.centred = centred
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return kernels.norm_backward(g, *ctx.saved_tensors, ctx.centred), None, None


class AddNorm(Function):
    """x' = x + dropout(y + bias), and x' normalised for the next sub-layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        keys: Tensor,
        p: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        """Both (B, T, D): the stream in its own dtype, the norm in y's."""
        x, normed, mean, scale = kernels.add_norm_forward(x, y, bias, keys, p, centred)
        ctx.save_for_backward(x, mean, scale, keys)
        ctx.p, ctx.centred, ctx.has_bias = p, centred, bias is not None
        ctx.set_materialize_grads(False)  # nothing comes down the stream after the last norm
        return x, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_norm: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, keys = ctx.saved_tensors
        g_x, g_y = kernels.add_norm_backward(g, g_norm, x, mean, scale, keys, ctx.p, ctx.centred)
        g_bias = kernels.sum_rows(g_y) if ctx.has_bias else None
        return g_x, g_y, g_bias, None, None, None


class FeedForward(Function):
    """down · f(up · scale · x + bias), where `scale` is the weight of the norm that gave x.

    Only the product with `up` is kept: backward computes the activation again on its way, which
    costs less than storing and reading it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        down: Tensor,
        kind: str,
    ) -> Tensor:
        """(B, T, D), without the bias of `down`."""
        low_up, low_down = kernels.fold(up, scale, x.dtype), kernels.fold(down, None, x.dtype)
        h = x @ low_up.t()
        ctx.save_for_backward(x, h, low_up, low_down, bias, up, scale, down)
        ctx.kind = kind
        return kernels.activation_forward(h, bias, kind) @ low_down.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, h, low_up, low_down, bias, up, scale, down = ctx.saved_tensors
        g_h, wide = kernels.activation_backward(g @ low_down, h, bias, ctx.kind)
        g_up, g_scale = kernels.unfold(_weight_gradient(g_h, x), up, scale)
        g_down, _ = kernels.unfold(_weight_gradient(g, wide), down, None)
        g_bias = None if bias is None else kernels.sum_rows(g_h)
        return g_h @ low_up, g_up, g_scale, g_bias, g_down, None


def _weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """gᵀ · x over all rows, (n, k).

    The narrower side is transposed by copying, which takes a tenth of the time that a product
    of many rows with a transposed view loses.
    """
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    if g.shape[1] <= x.shape[1]:
        return kernels.transpose(g) @ x
    return (kernels.transpose(x) @ g).t()


class CausalAttention(Function):
    """softmax(q·kᵀ / √K), dropped, times v, for all heads of (B, T, H·3·K)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        n_heads: int,
        keys: Tensor,
        context_length: int,
        p: float,
    ) -> Tensor:
        """(B, T, H·K)."""
        T, width = qkv.shape[1:]
        scale = 1 / math.sqrt(width // (3 * n_heads))
        n_blocks = QUERY_BLOCKS if T % QUERY_BLOCKS == 0 else 1
        mask = kernels.causal_mask(T, qkv.dtype)
        queries, k, v = kernels.split_heads(qkv, bias, n_heads, n_blocks)
        outputs, weights, inverses = [], [], []
        for i in range(n_blocks):
            end = k[i].shape[1]
            first = end - queries[i].shape[1]
            e, dropped, inverse = kernels.softmax_forward(
                torch.bmm(queries[i], k[i].transpose(1, 2)),
                mask[first:end, :end].contiguous(),
                scale,
                first,
                keys,
                context_length,
                p,
            )
            outputs.append(torch.bmm(dropped, v[i]))
            weights.append(e)
            inverses.append(inverse)
        y = kernels.merge_heads(outputs, inverses, n_heads)
        ctx.save_for_backward(y, keys, *queries, *k, *v, *weights, *inverses)
        ctx.n_heads, ctx.context_length, ctx.p = n_heads, context_length, p
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, keys, *saved = ctx.saved_tensors
        n = len(saved) // 5
        queries, k, v, weights, inverses = (saved[i * n : (i + 1) * n] for i in range(5))
        g_blocks, g_scaled, deltas = kernels.split_gradient(
            g.contiguous(), y, inverses, ctx.n_heads
        )
        scale = 1 / math.sqrt(queries[0].shape[2])
        g_q, g_k, g_v = [], [], []
        for i in range(n):
            g_scores, dropped = kernels.softmax_backward(
                torch.bmm(g_blocks[i], v[i].transpose(1, 2)),
                weights[i],
                deltas[i],
                inverses[i],
                scale,
                k[i].shape[1] - queries[i].shape[1],
                keys,
                ctx.context_length,
                ctx.p,
            )
            g_q.append(torch.bmm(g_scores, k[i]))
            g_k.append(torch.bmm(g_scores.transpose(1, 2), queries[i]))
            seen = weights[i] if dropped is None else dropped
            g_v.append(torch.bmm(seen.transpose(1, 2), g_scaled[i]))
        joined = kernels.join_heads(g_q, g_k, g_v, ctx.n_heads)
        g_bias = kernels.sum_rows(joined) if ctx.has_bias else None
        return joined, g_bias, None, None, None, None


class AmxAttention(Function):
    """The same as `CausalAttention`, for bf16 on a CPU with AMX."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        n_heads: int,
        keys: Tensor,
        context_length: int,
        p: float,
    ) -> Tensor:
        """(B, T, H·K)."""
        y, logs = amx.attention_forward(qkv, bias, n_heads, keys, context_length, p)
        ctx.save_for_backward(y, logs, qkv, bias, keys)
        ctx.n_heads, ctx.context_length, ctx.p = n_heads, context_length, p
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, logs, qkv, bias, keys = ctx.saved_tensors
        g_qkv = amx.attention_backward(
            g.contiguous(), y, logs, qkv, bias, ctx.n_heads, keys, ctx.context_length, ctx.p
        )
        g_bias = None if bias is None else kernels.sum_rows(g_qkv)
        return g_qkv, g_bias, None, None, None, None
