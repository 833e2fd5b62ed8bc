"""Experts in the fused step, as a `torch.autograd.Function` with a backward pass written by hand.

Rows are sorted by expert, so that each matrix is one grouped matmul, and a token's k results are
added in the order in which its experts were chosen, as in the plain model. Here each expert's rows
are filled up with zeros to whole blocks, which the grouped matmuls need.

Shapes: B batch, T sequence, N = B · T tokens, D d_model; E experts, k experts per token, R = N · k
rows; n an expert's inner width, m the outputs of its first matrices: n, or 2 · n with a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.fused_cpu.experts.expert_rows import (
    Places,
    places_by_expert,
    spread,
    weighted_sum,
    weighted_sum_gradients,
)
from pentameter.fused_cpu.experts.grouped_matmul import input_gradient, linear, weight_gradient
from pentameter.fused_cpu.functions import activate, activation_gradients
from pentameter.fused_cpu.vector.linear import fold, unfold
from pentameter.model.experts import GroupedLinear, Routing
from pentameter.model.grouped_matmul import grouped_bias_gradient


def weighted_outputs(
    x: Tensor,
    routing: Routing,
    scale: Tensor,
    bias: Tensor | None,
    layers: Sequence[GroupedLinear],
    activation: str,
) -> Tensor:
    """Return for each token the sum of its experts' outputs times the router's weights, (B, T, D).
    `routing` says which experts, and has the weights.

    x: normalised, (B, T, D). scale: the preceding norm's weight (D,). bias: the first matrices'
    (E, m) with the norm's folded in, or None. layers: the experts' gate, up and down, or up and
    down. activation: its name in `model.feed_forward.activation`.
    """
    *up, down = layers
    places, weights = places_by_expert(routing), (layer.weight for layer in up)
    given = x, routing.weights, places, scale, bias, down.weight, down.bias, activation
    return ExpertFeedForward.apply(*given, *weights)


class ExpertFeedForward(Function):
    """Autograd function: for each token, the sum of its experts' feed-forward layers, times the
    router's weights.

    Expert e computes down[e] · f(up[e] · scale · x + bias[e]) + down_bias[e], with `scale` (D,) the
    weight of the norm that computed x; with a gate, f acts on the gate's outputs and multiplies
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
        """Apply each token's k chosen experts to x (B, T, D), normalised but for the norm's weight,
        and return the sum of their results by the router's weights, (B, T, D) in x's dtype. N = B ·
        T tokens, E experts with n hidden channels, m rows in their first matrices together (2n with
        a gate, else n).

        weights: the router's weights (N, k).
        places: from the same routing: which row belongs to which token and expert.
        scale: the preceding norm's weight (D,).
        bias: biases (E, m) of the experts' first matrices, the gate's before the other's; None
            without.
        down, down_bias: weights (E, D, n) and biases (E, D) of the experts' last matrices; the
            biases are None without.
        kind: the activation's name.
        up: weights (E, n, D) of the first matrices: (gate, up), or up alone if there is no gate.
        """
        low_up, low_down = fold(up, scale, x.dtype), fold((down,), None, x.dtype)
        ends = places.ends
        rows = spread(x.flatten(0, -2), places)
        h = linear(rows, low_up, bias, ends)
        inner = activate(h, None, kind, len(up) > 1)
        outputs = linear(inner, low_down, down_bias, ends)
        kept = (x, h, outputs, low_up, low_down, weights)
        ctx.save_for_backward(*kept, scale, bias, down, down_bias, *up)
        ctx.kind, ctx.places = kind, places
        return weighted_sum(outputs, places, weights).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments of `forward`, None for those that have none, given
        the gradient g (B, T, D) of its result."""
        x, h, outputs, low_up, low_down, weights, *given = ctx.saved_tensors
        scale, bias, down, down_bias, *up = given
        places, ends = ctx.places, ctx.places.ends
        g_outputs, g_weights = weighted_sum_gradients(g.flatten(0, -2), outputs, places, weights)
        g_inner = input_gradient(g_outputs, low_down, ends)
        g_h, inner, _ = activation_gradients(g_inner, h, None, ctx.kind, len(up) > 1)
        rows = spread(x.flatten(0, -2), places)
        g_up, g_scale = unfold(weight_gradient(g_h, rows, ends), tuple(up), scale)
        (g_down,), _ = unfold(weight_gradient(g_outputs, inner, ends), (down,), None)
        g_rows = input_gradient(g_h, low_up, ends)
        g_x = weighted_sum(g_rows, places, None).view_as(x)
        g_bias, g_down_bias = (
            None if parameter is None else grouped_bias_gradient(of, ends).to(parameter.dtype)
            for parameter, of in ((bias, g_h), (down_bias, g_outputs))
        )
        return g_x, g_weights, None, g_scale, g_bias, g_down, g_down_bias, None, *g_up
