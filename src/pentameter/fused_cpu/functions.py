"""The fused step's large operations as `torch.autograd.Function`s, with backward passes written by
hand.

Each saves the least that backward needs; dropout masks are never saved but computed again. Matmuls
go to PyTorch's kernels without a bias: the element-wise kernel that follows reads the result
anyway, and adds it.

Shapes: B batch, T sequence, D d_model, H heads, K head size; N batch × heads, M batch × KV heads; n
and N a linear's outputs, as the docstring says. Dropout's keys, int32 (B, 2), are two random words
per batch row, from which the mask is computed: the same keys give the same mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.fused_cpu import (
    activations,
    amx_attention,
    amx_feed_forward,
    attention_kernels,
    kernels,
)
from pentameter.fused_cpu.heads import HeadShape, heads_of, rotation_of
from pentameter.fused_cpu.vector import attention as vector_attention
from pentameter.fused_cpu.vector import sub_layers
from pentameter.fused_cpu.vector.linear import fold, sum_rows, transpose, unfold

QUERY_BLOCKS = 2  # more save products but add calls: 2 was fastest at 256 tokens


class FoldedLinear(Function):
    """Autograd function: x · (weight · scale)ᵀ for one or more linear layers that read the same x,
    with their outputs side by side. `scale` (k,) is the weight of the norm before them, folded into
    theirs; it is None for an x that comes from no norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, *weights: Tensor) -> Tensor:
        """Return the linears' outputs side by side in x's dtype, (…, n₁ + n₂ + …), for x (…, k),
        the preceding norm's weight `scale` (k,) or None, and one or more weights (nᵢ, k) in the
        parameters' dtype."""
        low = fold(weights, scale, x.dtype)
        ctx.save_for_backward(x, low, scale, *weights)
        return x @ low.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, low, scale, *weights = ctx.saved_tensors
        g_weights, g_scale = unfold(_weight_gradient(g, x), tuple(weights), scale)
        return g @ low, g_scale, *g_weights


class EmbeddingDropout(Function):
    """Autograd function: dropout on embeddings (B, T, D). Its mask is a pure function of integer
    keys, so that backward computes it again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        """Return x (B, T, D) after dropout with probability p. keys: two random words for each
        batch row, int32 (B, 2), from which the mask follows."""
        ctx.save_for_backward(keys)
        ctx.p = p
        return _dropped(x, keys, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(g.contiguous(), ctx.saved_tensors[0], ctx.p), None, None


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Return x (B, T, D) after dropout, by the C++ kernel if it takes x, else by the compiled
    one."""
    native = sub_layers.can_norm(x, x.dtype)
    return (sub_layers if native else kernels).dropout(x, keys, p)


class Norm(Function):
    """Autograd function: LayerNorm or RMSNorm without weight and bias, which the next linear has
    folded into its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: kernels.NormKind, dtype: torch.dtype) -> Tensor:
        """Normalise x (B, T, D) and return it in `dtype`, without the norm's weight and bias.
        `kind` says whether by LayerNorm or RMSNorm, and its epsilon."""
        ctx.kind, ctx.native = kind, sub_layers.can_norm(x, dtype)
        if ctx.native:
            y, mean, scale = sub_layers.norm(x, *kind, dtype)
        else:
            y, mean, scale = kernels.norm_forward(x, kind, dtype)
        ctx.save_for_backward(x, mean, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if ctx.native:
            return sub_layers.norm_backward(g, *ctx.saved_tensors, *ctx.kind), None, None
        return kernels.norm_backward(g, *ctx.saved_tensors, ctx.kind), None, None


class AddNorm(Function):
    """Autograd function for a sub-layer's end and the next one's start, in one pass over memory. It
    returns x' = x + dropout(y + bias), and x' normalised, without the norm's weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        keys: Tensor,
        p: float,
        kind: kernels.NormKind,
    ) -> tuple[Tensor, Tensor]:
        """Add a sub-layer's output y to the residual stream x, both (B, T, D), after bias and
        dropout: x' = x + dropout(y + bias). Return (x' in x's dtype, x' normalised in y's dtype),
        both (B, T, D).

        bias: (D,), of the sub-layer's last linear layer, or None.
        keys, p: dropout's keys, int32 (B, 2), and probability.
        kind: the norm's formula and epsilon.
        """
        ctx.p, ctx.kind, ctx.native = p, kind, sub_layers.can_add_norm(x, y)
        if ctx.native:
            how = sub_layers.SubLayerEnd(bias, keys, p, *kind)
            x, normed, mean, scale = sub_layers.add_norm(how, x, y)
        else:
            x, normed, mean, scale = kernels.add_norm_forward(x, y, bias, keys, p, kind)
        ctx.save_for_backward(x, mean, scale, bias, keys)
        ctx.set_materialize_grads(False)  # nothing comes down the stream after the last norm
        return x, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_norm: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, bias, keys = ctx.saved_tensors
        if ctx.native:
            how = sub_layers.SubLayerEnd(bias, keys, ctx.p, *ctx.kind)
            g_x, g_y, g_bias = sub_layers.add_norm_backward(how, g, g_norm, x, mean, scale)
        else:
            g_x, g_y = kernels.add_norm_backward(g, g_norm, x, mean, scale, keys, ctx.p, ctx.kind)
            g_bias = None if bias is None else sum_rows(g_y)
        return g_x, g_y, g_bias, None, None, None


class FeedForward(Function):
    """Autograd function for a feed-forward layer: down · f(up · scale · x + bias), with `scale`
    (D,) the weight of the norm that computed x.

    With a gate, it is down · (f(gate · scale · x + gate's bias) times (up · scale · x + up's
    bias)), and `bias` holds both biases, the gate's first. Only the first matmul's results are
    saved: backward recomputes the activation, which costs less than storing and reading it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        down: Tensor,
        kind: str,
        *up: Tensor,
    ) -> Tensor:
        """Return (B, T, D), without `down`'s bias, for x (B, T, D).

        scale: the preceding norm's weight (D,). bias: the first linear's, or the gate's and `up`'s
        side by side; None without. down: the weight (D, n). kind: the activation's name. up: the
        weights (gate, up), or up alone, (n, D) each.
        """
        low_up, low_down = fold(up, scale, x.dtype), fold((down,), None, x.dtype)
        h = x @ low_up.t()
        ctx.save_for_backward(x, h, low_up, low_down, bias, scale, down, *up)
        ctx.kind = kind
        return activate(h, bias, kind, len(up) > 1) @ low_down.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, h, low_up, low_down, bias, scale, down, *up = ctx.saved_tensors
        g_h, wide, g_bias = activation_gradients(g @ low_down, h, bias, ctx.kind, len(up) > 1)
        g_up, g_scale = unfold(_weight_gradient(g_h, x), tuple(up), scale)
        (g_down,), _ = unfold(_weight_gradient(g, wide), (down,), None)
        return g_h @ low_up, g_scale, g_bias, g_down, None, *g_up


def activate(h: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """Return the activation's output (…, n) for the first linear's output h (…, N) and bias (N,) or
    None, by the C++ kernel if it takes h, else by the compiled one. kind: the activation's name. If
    `gated`, n = N / 2 and the first half is the gate; else n = N."""
    native = sub_layers.can_activate(h, bias, gated)
    source = sub_layers if native else activations
    return source.activate(h, bias, kind, gated)


def activation_gradients(
    g: Tensor, h: Tensor, bias: Tensor | None, kind: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (h's gradient (…, N), the activation's output (…, n) computed again, the bias's
    gradient (N,), or None without a bias), given the output's gradient g (…, n). h, bias, kind and
    gated: as passed to `activate`."""
    if sub_layers.can_activate(h, bias, gated):
        return sub_layers.activation_gradients(g, h, bias, kind, gated)
    g_h, y = activations.activation_gradients(g, h, bias, kind, gated)
    return g_h, y, None if bias is None else sum_rows(g_h)


class AmxFeedForward(Function):
    """Autograd function for a feed-forward layer, as `FeedForward` computes it, by the C++ kernels
    for Intel's AMX. For bf16 inputs that `can_feed_forward` accepts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        down: Tensor,
        kind: str,
        *up: Tensor,
    ) -> Tensor:
        """Return (B, T, D), without `down`'s bias, for x (B, T, D) in bf16.

        scale: the preceding norm's weight (D,). bias: the first linear's, or the gate's and `up`'s
        side by side; None without. down: the weight (D, n). kind: the activation's name. up: the
        weights (gate, up), or up alone, (n, D) each.
        """
        n_factors = len(up)
        layer = amx_feed_forward.FeedForwardLayer(
            _interleave(fold(up, scale, x.dtype), n_factors),
            None if bias is None else _interleave(bias, n_factors),
            fold((down,), None, x.dtype),
            activations.curve(kind),
        )
        y, kept = amx_feed_forward.feed_forward(layer, x)
        ctx.save_for_backward(x, kept, layer.up, layer.bias, layer.down, scale, *up)
        ctx.curve = layer.curve
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kept, low_up, bias, low_down, scale, *up = ctx.saved_tensors
        layer = amx_feed_forward.FeedForwardLayer(low_up, bias, low_down, ctx.curve)
        g = g.contiguous()
        g_x, g_h, y, g_bias = amx_feed_forward.feed_forward_backward(layer, g, kept)
        joined = amx_feed_forward.matmul_over_rows(x.flatten(0, -2), g_h, transposed=True)
        g_up, g_scale = unfold(_separate(joined, len(up)), tuple(up), scale)
        g_down = amx_feed_forward.matmul_over_rows(g.flatten(0, -2), y)
        if g_bias is not None:
            g_bias = _separate(g_bias, len(up))
        return g_x, g_scale, g_bias, g_down, None, *g_up


def _interleave(x: Tensor, n_factors: int) -> Tensor:
    """Return x, which is `n_factors` matrices stacked by rows, with its rows in the order that the
    AMX kernels read: 16 rows of each matrix in turn. The shape is unchanged."""
    return x.view(n_factors, -1, 16, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def _separate(x: Tensor, n_factors: int) -> Tensor:
    """Undo `_interleave`: x's rows are 16 of each matrix in turn, and the result is `n_factors`
    matrices stacked one after another. The shape is unchanged."""
    return x.reshape(-1, n_factors, 16, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def _weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """Return gᵀ · x summed over token rows, (n, k), contiguous, for g (…, n) and x (…, k), in a
    dtype at least as precise as both.

    The AMX kernel computes it if `can_matmul_over_rows` says so. Else 16-bit inputs are multiplied
    as they lie in memory. Of wider inputs the narrower one is copied transposed, which is a little
    faster. No 16-bit tensor is transposed by a compiled kernel: g++ 11 and 12 lose the stores to
    the tile in which Inductor does so, and nothing asks for one (`benchmarks/inductor_tile.py`).
    """
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    g_is_wider = g.shape[1] > x.shape[1]
    left, right = (x, g) if g_is_wider else (g, x)
    if amx_feed_forward.can_matmul_over_rows(left, right):
        return amx_feed_forward.matmul_over_rows(left, right, transposed=g_is_wider)
    if g.dtype.itemsize == 2:
        return g.t() @ x
    product = transpose(left) @ right
    return product.t().contiguous() if g_is_wider else product


class CausalAttention(Function):
    """Autograd function: causal attention with dropout, softmax(q·kᵀ / √K)·v, for all heads in a
    projection (B, T, width). That is the output of the query, key and value linears, before bias,
    norm and rotation, which are applied here."""

    @staticmethod
    def forward(
        ctx: Any, shape: HeadShape, keys: Tensor, projected: Tensor, *others: Tensor | None
    ) -> Tensor:
        """Return attention's output (B, T, H·K) for `projected` (B, T, width). shape: the layer's
        sizes and dropout probability. keys: dropout's (B, 2). others: the projection's bias
        (width,), the query norm's and the key norm's weight, and the rotary tables cosine and sine,
        (T, R / 2) each with R rotated channels; None for each that is absent."""
        heads = heads_of(shape, projected, *others)
        T = projected.shape[1]
        n_blocks = QUERY_BLOCKS if T % QUERY_BLOCKS == 0 else 1
        native = vector_attention.can_attend(heads, shape, n_blocks)
        ctx.source = source = vector_attention if native else attention_kernels
        mask = None if native else attention_kernels.causal_mask(T, heads.q.data.dtype)
        queries, k, v = source.split_heads(heads, n_blocks)
        outputs, weights, inverses = [], [], []
        for i in range(n_blocks):
            end = k[i].shape[1]
            first = end - queries[i].shape[1]
            scores = _multiply(queries[i], k[i].transpose(1, 2))
            seen = None if mask is None else mask[first:end, :end].contiguous()
            e, dropped, inverse = source.softmax_forward(scores, seen, first, keys, shape)
            outputs.append(_multiply(dropped, v[i]))
            weights.append(e)
            inverses.append(inverse)
        y = source.merge_heads(outputs, inverses, shape.n_heads)
        kept = None if heads.q.norm is None else projected  # which only norms read again
        ctx.save_for_backward(y, keys, kept, *others, *queries, *k, *v, *weights, *inverses)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, keys, *saved = ctx.saved_tensors
        made, saved = saved[:6], saved[6:]
        n, shape = len(saved) // 5, ctx.shape
        queries, k, v, weights, inverses = (saved[i * n : (i + 1) * n] for i in range(5))
        g_blocks, g_scaled, deltas = ctx.source.split_gradient(
            g.contiguous(), y, inverses, shape.n_heads
        )
        g_q, g_k, g_v = [], [], []
        for i in range(n):
            g_dropped = _multiply(g_blocks[i], v[i].transpose(1, 2))
            first = k[i].shape[1] - queries[i].shape[1]
            g_scores, dropped = ctx.source.softmax_backward(
                g_dropped, weights[i], deltas[i], inverses[i], first, keys, shape
            )
            g_q.append(_multiply(g_scores, k[i]))
            g_k.append(_sum_products(g_scores, queries[i], len(k[i])))
            seen = weights[i] if dropped is None else dropped
            g_v.append(_sum_products(seen, g_scaled[i], len(k[i])))
        projected, bias, *_, cosine, sine = made
        normed = None if projected is None else heads_of(shape, *made)
        joined, *g_norms = ctx.source.join_heads(
            g_q, g_k, g_v, shape, rotation_of(cosine, sine), normed
        )
        g_bias = None if bias is None else sum_rows(joined)
        return None, None, joined, g_bias, *g_norms, None, None


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return batched matmuls x · y, (N, Q, m), for x (N, Q, n), one matrix per query head, and y
    (M, n, m), one per KV head: N / M adjacent query heads use the same KV head."""
    shared = x.view(len(y), -1, x.shape[2])
    return torch.bmm(shared, y).view(len(x), x.shape[1], -1)


def _sum_products(x: Tensor, y: Tensor, n: int) -> Tensor:
    """Return batched matmuls xᵀ · y, (n, S, m), for x (N, Q, S) and y (N, Q, m), one matrix each
    per query head. The N / n adjacent query heads that use one KV head are summed."""
    x, y = (each.view(n, -1, each.shape[2]) for each in (x, y))
    return torch.bmm(x.transpose(1, 2), y)


class AmxAttention(Function):
    """Autograd function: the same as `CausalAttention`, computed by the AMX kernels. For bf16, and
    for query and key norms that act on each head by itself (`can_attend`)."""

    @staticmethod
    def forward(
        ctx: Any, shape: HeadShape, keys: Tensor, projected: Tensor, *others: Tensor | None
    ) -> Tensor:
        """Return attention's output (B, T, H·K) for `projected` (B, T, width) in bf16. shape: the
        layer's sizes and dropout probability. keys: dropout's (B, 2). others: the projection's bias
        (width,), the query norm's and the key norm's weight, and the rotary tables cosine and sine,
        (T, R / 2) each with R rotated channels; None for each that is absent."""
        heads = heads_of(shape, projected, *others)
        y, logs = amx_attention.attention_forward(heads, shape, keys)
        ctx.save_for_backward(y, logs, keys, projected, *others)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, logs, keys, *made = ctx.saved_tensors
        shape, (projected, bias, q_norm, k_norm, *_) = ctx.shape, made
        g_projected = torch.empty_like(projected)
        g_norms = amx_attention.attention_backward(
            shape.split(g_projected), g.contiguous(), y, logs, heads_of(shape, *made), shape, keys
        )
        g_bias = None if bias is None else sum_rows(g_projected)
        g_q_norm, g_k_norm = (
            None if norm is None else g_norm
            for norm, g_norm in zip((q_norm, k_norm), g_norms, strict=True)
        )
        return None, None, g_projected, g_bias, g_q_norm, g_k_norm, None, None
