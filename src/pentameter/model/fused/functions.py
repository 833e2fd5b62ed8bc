"""Forward and backward of each large operation, by hand, over the compiled kernels.

What each saves is the least that backward needs; dropout masks are never saved, their bits are
computed again. Matrix products go to PyTorch's own kernels without a bias: the bias rides along
in the element-wise kernel that follows, which reads the product anyway.

Shapes: M rows, N batch × heads, T time, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.model.fused import attention_kernels as attention
from pentameter.model.fused import kernels

QUERY_BLOCKS = 2  # more save products but add calls: 2 was fastest at 256 tokens


class Product(Function):
    """x (…, k) in the step's dtype, times a weight (n, k) of the parameters' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(…, n)."""
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.weight_dtype = weight.dtype
        return x @ low.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, _weight_gradient(g, x, ctx.weight_dtype)


class Dropout(Function):
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
    """norm(x), in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        centred: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """(B, T, D)."""
        y, mean, scale = kernels.norm_forward(x, weight, bias, centred, dtype)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.centred, ctx.has_bias = centred, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, mean, scale, weight = ctx.saved_tensors
        g_weight, g_bias = kernels.norm_weight_gradients(g, x, mean, scale, ctx.has_bias)
        g_x = kernels.norm_backward(g, x, mean, scale, weight, ctx.centred)
        return g_x, g_weight, g_bias, None, None


class AddNorm(Function):
    """x' = x + dropout(y + bias), and norm(x') for the next sub-layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        keys: Tensor,
        p: float,
        weight: Tensor,
        norm_bias: Tensor | None,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        """Both (B, T, D): the stream in its own dtype, the norm in y's."""
        x, normed, mean, scale = kernels.add_norm_forward(
            x, y, bias, keys, p, weight, norm_bias, centred
        )
        ctx.save_for_backward(x, mean, scale, weight, keys)
        ctx.p, ctx.centred = p, centred
        ctx.has_bias, ctx.has_norm_bias = bias is not None, norm_bias is not None
        ctx.set_materialize_grads(False)  # nothing comes down the stream after the last norm
        return x, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_norm: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight, keys = ctx.saved_tensors
        g_weight, g_norm_bias = kernels.norm_weight_gradients(
            g_norm, x, mean, scale, ctx.has_norm_bias
        )
        g_x, g_y = kernels.add_norm_backward(
            g, g_norm, x, mean, scale, weight, keys, ctx.p, ctx.centred
        )
        g_bias = kernels.sum_rows(g_y) if ctx.has_bias else None
        return g_x, g_y, g_bias, None, None, g_weight, g_norm_bias, None


class FeedForward(Function):
    """down · f(up · x + bias). Only the product with `up` is kept: backward computes the
    activation again on its way, which costs less than storing and reading it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, kind: str
    ) -> Tensor:
        """(B, T, D), without the bias of `down`."""
        low_up, low_down = up.to(x.dtype), down.to(x.dtype)
        h = x @ low_up.t()
        ctx.save_for_backward(x, h, low_up, low_down, bias)
        ctx.kind, ctx.weight_dtype = kind, up.dtype
        return kernels.activation_forward(h, bias, kind) @ low_down.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, h, up, down, bias = ctx.saved_tensors
        g_h, wide = kernels.activation_backward(g @ down, h, bias, ctx.kind)
        g_up = _weight_gradient(g_h, x, ctx.weight_dtype)
        g_down = _weight_gradient(g, wide, ctx.weight_dtype)
        g_bias = None if bias is None else kernels.sum_rows(g_h)
        return g_h @ up, g_up, g_bias, g_down, None


def _weight_gradient(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """gᵀ · x over all rows, (n, k) in `dtype`.

    The narrower side is transposed by copying, which takes a tenth of the time that a product
    of many rows with a transposed view loses.
    """
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    if g.shape[1] <= x.shape[1]:
        gradient = kernels.transpose(g) @ x
    else:
        gradient = (kernels.transpose(x) @ g).t()
    return gradient.to(dtype, memory_format=torch.contiguous_format)


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
        scale = attention.score_scale(width // (3 * n_heads))
        ends = _block_ends(T)
        mask = attention.causal_mask(T, qkv.dtype)
        queries, k, v = attention.split_heads(qkv, bias, n_heads, len(ends))
        outputs, weights, inverses = [], [], []
        for i, end in enumerate(ends):
            first = end - queries[i].shape[1]
            e, dropped, inverse = attention.softmax_forward(
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
        y = attention.merge_heads(outputs, inverses, n_heads)
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
        g_blocks, g_scaled, deltas = attention.split_gradient(
            g.contiguous(), y, inverses, ctx.n_heads
        )
        scale = attention.score_scale(queries[0].shape[2])
        g_q, g_k, g_v = [], [], []
        for i in range(n):
            g_scores, dropped = attention.softmax_backward(
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
        joined = attention.join_heads(g_q, g_k, g_v, ctx.n_heads)
        g_bias = kernels.sum_rows(joined) if ctx.has_bias else None
        return joined, g_bias, None, None, None, None


def _block_ends(T: int) -> list[int]:
    """Where each block of queries ends: equal blocks, or one where T does not divide."""
    n_blocks = QUERY_BLOCKS if T % QUERY_BLOCKS == 0 else 1
    return [T // n_blocks * (i + 1) for i in range(n_blocks)]
