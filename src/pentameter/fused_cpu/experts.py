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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.fused_cpu.expert_rows import (
    Places,
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
        places: Places,
        scale: Tensor,
        bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        kind: str,
        *up: Tensor,
    ) -> Tensor:
        """Return (B, T, D) in x's dtype for x (B, T, D) and the router's weights (N, k).

        places: of the rows, from the same routing. scale: the preceding norm's weight (D,). bias:
        the first matrices' (E, m), the gate's beside `up`'s, or None. down, down_bias: (E, D, n),
        and (E, D) or None. kind: the activation's name. up: the weights (gate, up), or up alone,
        (E, n, D) each.
        """
        low_up, low_down = fold(up, scale, x.dtype), fold((down,), None, x.dtype)
        ends = places.ends
        rows = spread(x.flatten(0, -2), places)
        h = _multiplied(rows, low_up, bias, ends)
        inner = activate(h, None, kind, len(up) > 1)
        outputs = _multiplied(inner, low_down, down_bias, ends)
        kept = (x, h, outputs, low_up, low_down, weights)
        ctx.save_for_backward(*kept, scale, bias, down, down_bias, *up)
        ctx.kind, ctx.places = kind, places
        return weighted_sum(outputs, places, weights).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the forward pass's arguments for g (B, T, D)."""
        x, h, outputs, low_up, low_down, weights, *given = ctx.saved_tensors
        scale, bias, down, down_bias, *up = given
        places, ends = ctx.places, ctx.places.ends
        g_outputs, g_weights = weighted_sum_gradients(g.flatten(0, -2), outputs, places, weights)
        g_inner = _input_gradient(g_outputs, low_down, ends)
        g_h, inner, _ = activation_gradients(g_inner, h, None, ctx.kind, len(up) > 1)
        rows = spread(x.flatten(0, -2), places)
        g_up, g_scale = unfold(_weight_gradient(g_h, rows, ends), tuple(up), scale)
        (g_down,), _ = unfold(_weight_gradient(g_outputs, inner, ends), (down,), None)
        g_rows = _input_gradient(g_h, low_up, ends)
        g_x = weighted_sum(g_rows, places, None).view_as(x)
        g_bias, g_down_bias = (
            None if parameter is None else grouped_bias_gradient(of, ends).to(parameter.dtype)
            for parameter, of in ((bias, g_h), (down_bias, g_outputs))
        )
        return g_x, g_weights, None, g_scale, g_bias, g_down, g_down_bias, None, *g_up


def _multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Return rows (P, inputs) times their expert's weight (E, outputs, inputs), plus its bias (E,
    outputs) or None: (P, outputs), 0 behind the last of `ends` (E,)."""
    if bias is not None or not _takes(rows, weight):
        return grouped_linear(rows, weight, None if bias is None else bias.to(rows.dtype), ends)
    return _with_zeros(F.grouped_mm(rows, weight.mT, offs=ends.int()), ends)


def _input_gradient(g: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient (P, inputs) of the rows in `_multiplied`, for the result's gradient g (P,
    outputs)."""
    if not _takes(g, weight):
        return grouped_input_gradient(g, weight, ends)
    return _with_zeros(F.grouped_mm(g, weight, offs=ends.int()), ends)


def _weight_gradient(g: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient (E, outputs, inputs) of the weight in `_multiplied`, for the result's
    gradient g (P, outputs) and rows (P, inputs); 0 for an expert without rows."""
    if not _takes(g, rows):
        return grouped_weight_gradient(g, rows, ends)
    return F.grouped_mm(g.mT, rows, offs=ends.int())


def _takes(*operands: Tensor) -> bool:
    """Return whether PyTorch's grouped matmul multiplies these operands: not in float64, nor with
    rows whose length is not a multiple of 16 bytes. Called directly it saves the overhead of our
    custom operations and of their views, a tenth of a product (3,072 tokens, 8 experts of 256)."""
    return all(
        x.dtype is not torch.float64 and x.shape[-1] * x.itemsize % 16 == 0 for x in operands
    )


def _with_zeros(y: Tensor, ends: Tensor) -> Tensor:
    """Return y (P, outputs) with 0, in place, behind the last of `ends` (E,), where PyTorch's
    grouped matmul leaves it unwritten."""
    y[int(ends[-1]) :].zero_()
    return y
