"""Rows of tokens, copied to their places among rows sorted by expert, and added up again: by the
C++ kernels in `cpp/expert_rows.cpp`, or by PyTorch's operations.

Shapes: N tokens, D d_model, k experts per token, R = N · k rows; P places of sorted rows.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pentameter.fused_cpu.kernels import precise
from pentameter.fused_cpu.native import CHANNELS, address, library, serves
from pentameter.model.matmul import ROWS_PER_BLOCK


class _ExpertRows(ctypes.Structure):
    """ctypes mirror for the C++ struct `ExpertRows` in cpp/expert_rows.cpp: all arguments for one
    kernel call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("places", "weights")),
        *((name, ctypes.c_int64) for name in ("N", "k", "D", "low")),
    )


def in_whole_blocks(order: Tensor, ends: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (places, ends) of sorted rows with room behind each expert's, so that their number is
    a multiple of ROWS_PER_BLOCK. places, int64 (N, k): where each token's rows lie. ends, int64
    (E,): the place after each expert's room.

    order, ends: from `Routing.order`. Rows for which there is no capacity come behind the last end.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    filled = (counts + ROWS_PER_BLOCK - 1) // ROWS_PER_BLOCK * ROWS_PER_BLOCK
    shift = torch.cat((ends.new_zeros(1), (filled - counts).cumsum(0)))
    n_rows = torch.cat((counts, len(order) - ends[-1:]))
    sorted_places = torch.arange(len(order)) + shift.repeat_interleave(
        n_rows, output_size=len(order)
    )
    places = torch.empty_like(order).scatter_(0, order, sorted_places)
    return places.view(-1, k), filled.cumsum(0)


def n_places(places: Tensor, n_experts: int) -> int:
    """Return P for places (N, k), the same for every routing: as many as rows, and the most room
    that `in_whole_blocks` leaves behind them."""
    return places.numel() + n_experts * (ROWS_PER_BLOCK - 1)


def spread(x: Tensor, places: Tensor, P: int) -> Tensor:
    """Return sorted rows (P, D) for tokens x (N, D), which are copied to their `places` (N, k);
    zeros elsewhere."""
    out = x.new_zeros(P, x.shape[1])
    if _can_compute(x):
        _call("spread", _job(places, None, x), out, None, x, None)
        return out
    return out.index_copy_(0, places.flatten(), x.repeat_interleave(places.shape[1], 0))


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return each token's rows times their weights, added in the order of its places, (N, D), for
    sorted rows (P, D), places (N, k) and weights (N, k), or None for weights of 1."""
    if _can_compute(rows, weights):
        out = rows.new_empty(len(places), rows.shape[1])
        _call("sum", _job(places, weights, rows), out, rows)
        return out
    of_token = precise(rows[places])
    if weights is not None:
        of_token = of_token * weights[..., None]
    total = of_token[:, 0]
    for j in range(1, places.shape[1]):
        total = total + of_token[:, j]
    return total.to(rows.dtype)


def weighted_sum_gradients(
    g: Tensor, rows: Tensor, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sorted rows (P, D), 0 where no token's row is, and of the weights
    (N, k), given the sum's gradient g (N, D). rows, places, weights: as passed to
    `weighted_sum`."""
    g_rows = torch.zeros_like(rows)
    if _can_compute(rows, weights):
        g, g_weights = g.contiguous(), torch.empty_like(weights)
        _call("spread", _job(places, weights, g), g_rows, g_weights, g, rows)
        return g_rows, g_weights
    g = precise(g)[:, None]
    weighted = (g * weights[..., None]).to(rows.dtype).flatten(0, 1)
    g_weights = (g * precise(rows[places])).sum(-1)
    return g_rows.index_copy_(0, places.flatten(), weighted), g_weights


def _can_compute(x: Tensor, weights: Tensor | None = None) -> bool:
    """Return whether the vector library is loaded and takes rows like x (…, D) with these weights:
    x contiguous, in fp32 or bf16, weights in fp32 or None, D divisible by CHANNELS."""
    dtype = torch.float32 if weights is None else weights.dtype
    return serves("vector", dtype, x.dtype) and x.shape[1] % CHANNELS == 0 and x.is_contiguous()


def _job(places: Tensor, weights: Tensor | None, x: Tensor) -> _ExpertRows:
    """Return the C++ call's arguments for places and weights (N, k), and rows with x's width and
    dtype."""
    low = x.dtype is torch.bfloat16
    return _ExpertRows(address(places), address(weights), *places.shape, x.shape[1], low)


def _call(name: str, job: _ExpertRows, *tensors: Tensor | None) -> None:
    """Call the kernel `pentameter_<name>_expert_rows` with the job and the tensors' addresses."""
    kernel = getattr(library("vector"), f"pentameter_{name}_expert_rows")
    kernel(ctypes.byref(job), *map(address, tensors))
