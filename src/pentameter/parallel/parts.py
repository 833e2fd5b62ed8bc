"""Parts of a tensor, divided by its first dimension: gathered, or summed to parts, over a group.

Each is the other's gradient. They, and the products of divided matrices that are made of them, are
operations of PyTorch's own (`torch.library`), which a compiled model calls as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pentameter.parallel.mesh import group_named

# torch 2.13 renamed it, and warns of the old name.
_HAS_NEW_NAME = hasattr(dist, "all_gather_single")
all_gather = dist.all_gather_single if _HAS_NEW_NAME else dist.all_gather_into_tensor
"""Gathers one tensor of each process into one that is given."""


def gathered_parts(own: Tensor, most: int, n_whole: int, group_name: str) -> Tensor:
    """Return (n_whole, …) of the parts (n, …) that the processes of a group have, `most` of the
    first dimension each, but for the last. Collective."""
    group = group_named(group_name)
    parts = own.new_empty((most * group.size(), *own.shape[1:]))
    all_gather(parts, _padded(own, most), group=group)
    return parts if len(parts) == n_whole else parts[:n_whole].clone()


def gathered_columns(own: Tensor, most: int, n_whole: int, group_name: str) -> Tensor:
    """Return (…, n_whole) of the columns (…, n) that the processes of a group have, `most` each,
    but for the last. Collective."""
    columns = F.pad(own, (0, most - own.shape[-1])).transpose(0, -1)
    whole = gathered_parts(columns, most, most * group_named(group_name).size(), group_name)
    return whole.transpose(0, -1)[..., :n_whole]


def summed_part(whole: Tensor, most: int, group_name: str) -> Tensor:
    """Return this process's part of the sum, over a group, of tensors (n_whole, …). Collective."""
    group = group_named(group_name)
    part = whole.new_empty((most, *whole.shape[1:]))
    parts = list(_padded(whole, most * group.size()).chunk(group.size()))
    dist.reduce_scatter(part, parts, group=group)
    n_own = _n_own(whole, most, group)
    return part if n_own == most else part[:n_own].clone()


def reduce_parts(group_name: str, tensor: Tensor, kind: Literal["max", "sum"]) -> None:
    """Replace a tensor, in place, by the largest or the sum of those of a group. Collective."""
    op = dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op, group=group_named(group_name))


def _n_own(whole: Tensor, most: int, group: dist.ProcessGroup) -> int:
    return min(most, max(0, len(whole) - group.rank() * most))


def _padded(tensor: Tensor, n: int) -> Tensor:
    """The tensor, contiguous, with zeros up to n of its first dimension."""
    if len(tensor) == n:
        return tensor.contiguous()
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, n - len(tensor)))


gather_parts = torch.library.custom_op("pentameter::gather_parts", gathered_parts, mutates_args=())
sum_parts = torch.library.custom_op("pentameter::sum_parts", summed_part, mutates_args=())


@gather_parts.register_fake
def _(own: Tensor, most: int, n_whole: int, group_name: str) -> Tensor:
    return own.new_empty((n_whole, *own.shape[1:]))


@sum_parts.register_fake
def _(whole: Tensor, most: int, group_name: str) -> Tensor:
    return whole.new_empty((_n_own(whole, most, group_named(group_name)), *whole.shape[1:]))


def _keep_most(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.most, _, ctx.group_name = inputs


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    whole, ctx.most, ctx.group_name = inputs
    ctx.n_whole = len(whole)


def _sum(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    return sum_parts(g, ctx.most, ctx.group_name), None, None, None


def _gather(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
    return gather_parts(g, ctx.most, ctx.n_whole, ctx.group_name), None, None


gather_parts.register_autograd(_sum, setup_context=_keep_most)
sum_parts.register_autograd(_gather, setup_context=_keep_sizes)


def product_operation(
    name: str,
    multiplied: Callable[..., Tensor],
    differentiated: Callable[..., tuple[Tensor, Tensor]],
    n_columns: Callable[..., int],
) -> Callable[..., Tensor]:
    """Return `multiplied(x, weight, *rest)` as an operation whose gradient `differentiated(g, x,
    weight, *rest)` computes; its result (…, n) has `n_columns(weight, *rest)`."""
    operation = torch.library.custom_op(f"pentameter::{name}", multiplied, mutates_args=())
    backward = torch.library.custom_op(
        f"pentameter::{name}_backward", differentiated, mutates_args=()
    )

    @operation.register_fake
    def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], n_columns(weight, *rest)))

    @backward.register_fake
    def _(g: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(x.dtype, torch.float32)
        return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=precise)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.rest = inputs
        ctx.save_for_backward(x, weight)

    def differentiate(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad, weight_grad = backward(g, x, weight, *ctx.rest)
        return x_grad, weight_grad.to(weight.dtype), *(None for _ in ctx.rest)

    operation.register_autograd(differentiate, setup_context=keep)
    return operation
