"""A check, before a run begins, that attention by kernels is right on this device: one whose
dropout runs in kernels of its own, or a ring's.

A kernel that compiles need not be correct on a chip and a release on which it was never run, so it
is compared with attention in fp64 whose weights are stored.

Shapes: B batch, T tokens, H heads, G KV heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits, make_key
from pentameter.model.attention.dot_product import (
    DotProductAttention,
    Weighting,
    attend_explicitly,
)
from pentameter.model.dropout import WeightsDropout

CHECKED_TOKENS = 200  # at least two tiles and a partial one in each kernel
MOST_ROUNDINGS = 32.0
"""Maximum error in a checked result, in roundings of the largest number in its matrix row.

Weights, their gradients and results are each rounded once, and up to CHECKED_TOKENS such errors
of either sign are summed. In Triton's interpreter, the kernels are within 8 roundings of fp64 in
bf16 and fp16, stored weights within 4. A bound that drops 6 % more elements is off by 190 in bf16
and 1,500 in fp16.
"""
LEAST_BOUND = 2.0**-15
"""Minimum error bound, which fp32 needs: a GPU's exponentials are off by more than one rounding."""


class Problem(NamedTuple):
    """Inputs for one check of an attention function: q and the output's gradient g (B, H, T, K), k
    and v (B, G, T, K), and the settings of the call. A named tuple."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    how: Weighting


def disagreement(
    attention: DotProductAttention,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    drops: bool = True,
) -> str | None:
    """Return a phrase about the first result or gradient of `attention` that differs by more than
    rounding from attention with stored weights in fp64 on the same device; None if all agree.
    Matmuls are in `dtype`. Every window that the model has is checked, with its dropout if it
    `drops`."""
    for size in sorted({model.window(layer) or 0 for layer in range(model.n_layers)}):
        problem = _problem(model, dtype, device, size or None)
        if not drops:
            problem = problem._replace(how=problem.how._replace(dropout=None))
        obstacle = _disagreement(attention, problem)
        if obstacle is not None:
            return obstacle
    return None


def _problem(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, size: int | None
) -> Problem:
    """Build a check's inputs on the last tokens in a context: two batch rows, and one or two KV
    heads with all their query heads, all numbers drawn from a key.

    size: the window to check, None for none. The window is at most a third of the tokens, so that
    no tile lies wholly inside it.
    """
    K, G = model.query_channels, min(2, model.attention.kv_heads)
    H = G * (model.attention.n_heads // model.attention.kv_heads)
    T = min(CHECKED_TOKENS, model.context_length)

    def draw(name: str, n_heads: int) -> Tensor:
        index = torch.arange(2 * n_heads * T * K, dtype=torch.int32)
        drawn = bits(make_key("dropout kernel", name), index).view(2, n_heads, T, K)
        # Uniform with variance 1, in the memory layout that a projection gives.
        x = drawn.to(device, torch.float64) * (3**0.5 / 2**31)
        return x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype)

    q, k, v, g = (draw(name, n) for name, n in (("q", H), ("k", G), ("v", G), ("g", H)))
    keys = bits(make_key("dropout kernel", "keys"), torch.arange(4, dtype=torch.int32))
    dropout = WeightsDropout(
        keys.view(2, 2).to(device),
        model.attention.dropout,
        model.attention.n_heads - H,
        model.context_length,
    )
    positions = torch.arange(model.context_length - T, model.context_length, device=device)
    seen = None if size is None else min(size, T // 3)
    return Problem(q, k, v, g, Weighting(seen, None, dropout, positions))


def _disagreement(attention: DotProductAttention, problem: Problem) -> str | None:
    """Compare `attention` with stored weights in fp64. Return a phrase about the first result or
    gradient whose error exceeds rounding; None if there is none."""
    dtype = problem.q.dtype
    precise = problem._replace(
        **{name: getattr(problem, name).double() for name in ("q", "k", "v", "g")}
    )
    found, expected = _computed(attention, problem), _computed(attend_explicitly, precise)
    bound = rounding_bound(dtype)
    for name, one, other in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
        off = row_error(one, other)
        if not off <= bound:  # true for nan, too
            return f"their {name} is off by {off:.1e} in {dtype}, more than {bound:.1e}"
    return None


def _computed(attention: Callable[..., Tensor], problem: Problem) -> tuple[Tensor, ...]:
    """Return the output y (B, H, T, K) of `attention` and the gradients for q, k and v, in their
    shapes."""
    q, k, v = (x.detach().requires_grad_() for x in problem[:3])
    with torch.enable_grad():
        y = attention(q, k, v, problem.how)
        return y, *torch.autograd.grad(y, (q, k, v), problem.g)


def rounding_bound(dtype: torch.dtype) -> float:
    """Return the largest error that rounding explains if matmuls are computed in `dtype`: relative
    to a matrix row's scale, as `row_error` measures it. With tf32 enabled, fp32 counts as tf32."""
    tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rounding = 2.0**-11 if tf32 else torch.finfo(dtype).eps / 2
    return max(MOST_ROUNDINGS * rounding, LEAST_BOUND)


def row_error(x: Tensor, expected: Tensor) -> float:
    """Return the largest error in x (…, K) compared with `expected`, relative to the scale of the
    row in which it occurs.

    The scale of a row is the largest absolute number in that row of `expected`, but at least the
    mean of this over all rows, and at least 0.1, for inputs with variance 1: gradients for the
    first query, which sees one key, are 0 except for rounding.
    """
    largest = expected.abs().amax(-1)
    scale = largest.clamp_min(largest.mean()).clamp_min(0.1)
    off: float = ((x.to(expected.dtype) - expected).abs().amax(-1) / scale).max().item()
    return off
