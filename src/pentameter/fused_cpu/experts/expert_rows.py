"""Rows of tokens: copied to their places among rows sorted by expert, and added up again
afterwards. By the C++ kernels in `cpp/expert_rows.cpp`, or by PyTorch's operations.

Shapes: N tokens, D d_model, E experts, k experts per token, R = N · k rows; P places of sorted
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pentameter.fused_cpu.kernels import precise
from pentameter.fused_cpu.native import CHANNELS, Struct, call, fields, serves
from pentameter.model.experts import Routing
from pentameter.model.grouped_matmul import ROWS_PER_BLOCK


class _ExpertRows(Struct):
    """ctypes form of the C++ struct `ExpertRows` in cpp/expert_rows.cpp: the arguments of the
    kernels that copy rows to experts and sum their results."""

    _fields_ = fields("places weights", int64="N k D low")


@dataclass(frozen=True)
class Places:
    """The places of each token's rows (one for each expert that it chose) in a tensor of P rows
    that is sorted by expert. After each expert's rows, blank rows fill up to a multiple of
    ROWS_PER_BLOCK."""

    of_token: Tensor
    """Int64 (N, k): the place of each of a token's rows."""
    ends: Tensor
    """Int64 (E,): the place after each expert's rows and their blank room. Rows that no expert has
    capacity for come behind the last end."""
    blank: Tensor
    """Int64 (P - R,): the places without a row."""

    @property
    def n_places(self) -> int:
        """P, which is the same for every routing: the number of rows, plus the most blank room that
        the experts can need."""
        return self.of_token.numel() + len(self.blank)


def places_by_expert(routing: Routing) -> Places:
    """Return the places of a routing's rows, sorted by expert, then by token."""
    E, experts = routing.n_experts, routing.experts.contiguous()
    n_blank = E * (ROWS_PER_BLOCK - 1)
    if serves("vector", torch.float32, torch.float32):
        of_token = torch.empty_like(experts)
        ends, blank = experts.new_empty(E), experts.new_empty(n_blank)
        sizes = (experts.numel(), E, ROWS_PER_BLOCK)
        call("vector", "place_expert_rows", experts, *sizes, of_token, ends, blank)
        return Places(of_token, ends, blank)
    order, own_ends = routing.order()
    counts = own_ends.diff(prepend=own_ends.new_zeros(1))
    filled = (counts + ROWS_PER_BLOCK - 1) // ROWS_PER_BLOCK * ROWS_PER_BLOCK
    shift = torch.cat((own_ends.new_zeros(1), (filled - counts).cumsum(0)))
    n_rows = torch.cat((counts, len(order) - own_ends[-1:]))
    sorted_places = torch.arange(len(order)) + shift.repeat_interleave(
        n_rows, output_size=len(order)
    )
    of_token = torch.empty_like(order).scatter_(0, order, sorted_places)
    is_blank = torch.ones(len(order) + n_blank, dtype=torch.bool).index_fill_(0, of_token, False)
    return Places(of_token.view_as(experts), filled.cumsum(0), is_blank.nonzero().flatten())


def spread(x: Tensor, places: Places) -> Tensor:
    """Return sorted rows (P, D) for tokens x (N, D): each token is copied to the places of its
    rows; blank places are 0."""
    out = x.new_empty(places.n_places, x.shape[1]).index_fill_(0, places.blank, 0)
    if _can_compute(x):
        call("vector", "spread_expert_rows", _job(places, None, x), out, None, x, None)
        return out
    copies = x.repeat_interleave(places.of_token.shape[1], 0)
    return out.index_copy_(0, places.of_token.flatten(), copies)


def weighted_sum(rows: Tensor, places: Places, weights: Tensor | None) -> Tensor:
    """Return the sum of each token's k rows times their weights, (N, D), for sorted rows (P, D) and
    weights (N, k); None means weights of 1. Rows are added in the order in which the token's
    experts were chosen."""
    if _can_compute(rows, weights):
        out = rows.new_empty(len(places.of_token), rows.shape[1])
        call("vector", "sum_expert_rows", _job(places, weights, rows), out, rows)
        return out
    of_token = precise(rows[places.of_token])
    if weights is not None:
        of_token = of_token * weights[..., None]
    total = of_token[:, 0]
    for j in range(1, of_token.shape[1]):
        total = total + of_token[:, j]
    return total.to(rows.dtype)


def weighted_sum_gradients(
    g: Tensor, rows: Tensor, places: Places, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sorted rows (P, D), 0 at blank places, and of the weights (N, k),
    given the sum's gradient g (N, D). rows, places, weights: as passed to `weighted_sum`."""
    g_rows = torch.empty_like(rows).index_fill_(0, places.blank, 0)
    if _can_compute(rows, weights):
        g, g_weights = g.contiguous(), torch.empty_like(weights)
        call("vector", "spread_expert_rows", _job(places, weights, g), g_rows, g_weights, g, rows)
        return g_rows, g_weights
    g = precise(g)[:, None]
    weighted = (g * weights[..., None]).to(rows.dtype).flatten(0, 1)
    g_weights = (g * precise(rows[places.of_token])).sum(-1)
    return g_rows.index_copy_(0, places.of_token.flatten(), weighted), g_weights


def _can_compute(x: Tensor, weights: Tensor | None = None) -> bool:
    """Return whether the vector library is loaded and supports rows like x (…, D) with these
    weights: x contiguous, in fp32 or bf16, weights in fp32 or None, D divisible by CHANNELS."""
    dtype = torch.float32 if weights is None else weights.dtype
    return serves("vector", dtype, x.dtype) and x.shape[1] % CHANNELS == 0 and x.is_contiguous()


def _job(places: Places, weights: Tensor | None, x: Tensor) -> _ExpertRows:
    """Return the C++ call's arguments for places, weights (N, k), and rows with x's width and
    dtype."""
    low, of_token = x.dtype is torch.bfloat16, places.of_token
    return _ExpertRows(of_token, weights, *of_token.shape, x.shape[1], low)
