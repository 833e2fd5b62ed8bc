"""Experts in the fused step, as a `torch.autograd.Function` with a backward pass written by hand.

Rows are sorted by expert, so that each matrix is one grouped matmul, and a token's k results are
added in the order in which its experts were chosen, as in the plain model. Here each expert's rows
are filled up with zeros to whole blocks, which spares the grouped matmuls' own copies.

Shapes: B batch, T sequence, N = B · T tokens, D d_model; E experts, k experts per token, R = N · k
rows; n an expert's inner width, m the outputs of its first matrices: n, or 2 · n with a gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.fused_cpu.expert_rows import (
    in_whole_blocks,
    n_places,
    spread,
    weighted_sum,
    weighted_sum_gradients,
)
from pentameter.fused_cpu.functions import activate, activation_gradients
from pentameter.fused_cpu.kernels import fold, unfold
from pentameter.model.matmul import (
    grouped_bias_gradient,
    grouped_input_gradient,
    grouped_linear,
    grouped_weight_gradient,
)


class ExpertFeedForward(Function):
    """For each token, the sum of its experts' feed-forward layers, times the router's weights.

    Expert e computes down[e] · f(up[e] · scale · x + bias[e]) + down_bias[e], with `scale` (D,) the
    weight from the norm that computed x; with a gate, f acts on the gate's outputs and multiplies
    up's. Backward recomputes the activation, and copies the rows of x again, rather than keep them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        order: Tensor,
        ends: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        kind: str,
        *up: Tensor,
    ) -> Tensor:
        """Return (B, T, D) in x's dtype for x (B, T, D) and the router's weights (N, k).

        order, ends: from `Routing.order`, the rows' order by expert (R,), and the index after each
        expert's last row (E,). scale: the preceding norm's weight (D,). bias: the first matrices'
        (E, m), the gate's beside `up`'s, or None. down, down_bias: (E, D, n), and (E, D) or None.
        kind: the activation's name. up: the weights (gate, up), or up alone, (E, n, D) each.
        """
        low_up, low_down = fold(up, scale, x.dtype), fold((down,), None, x.dtype)
        places, ends = in_whole_blocks(order, ends, weights.shape[1])
        rows = spread(x.flatten(0, -2), places, n_places(places, len(ends)))
        h = grouped_linear(rows, low_up, _rounded(bias, x.dtype), ends)
        inner = activate(h, None, kind, len(up) > 1)
        outputs = grouped_linear(inner, low_down, _rounded(down_bias, x.dtype), ends)
        kept = (x, h, outputs, low_up, low_down, weights, places, ends)
        ctx.save_for_backward(*kept, scale, bias, down, down_bias, *up)
        ctx.kind = kind
        return weighted_sum(outputs, places, weights).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the forward pass's arguments for g (B, T, D)."""
        x, h, outputs, low_up, low_down, weights, places, ends, *given = ctx.saved_tensors
        scale, bias, down, down_bias, *up = given
        g_outputs, g_weights = weighted_sum_gradients(g.flatten(0, -2), outputs, places, weights)
        g_inner = grouped_input_gradient(g_outputs, low_down, ends)
        g_h, inner, _ = activation_gradients(g_inner, h, None, ctx.kind, len(up) > 1)
        rows = spread(x.flatten(0, -2), places, len(h))
        g_up, g_scale = unfold(grouped_weight_gradient(g_h, rows, ends), tuple(up), scale)
        (g_down,), _ = unfold(grouped_weight_gradient(g_outputs, inner, ends), (down,), None)
        g_rows = grouped_input_gradient(g_h, low_up, ends)
        g_x = weighted_sum(g_rows, places, None).view_as(x)
        g_bias, g_down_bias = (
            None if parameter is None else grouped_bias_gradient(of, ends).to(parameter.dtype)
            for parameter, of in ((bias, g_h), (down_bias, g_outputs))
        )
        return g_x, g_weights, None, None, g_scale, g_bias, g_down, g_down_bias, None, *g_up


def _rounded(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias (E, outputs) in the matmuls' `dtype`, or None for None."""
    return None if bias is None else bias.to(dtype)
