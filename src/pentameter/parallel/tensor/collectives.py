"""All-gather and reduce-scatter along a tensor's first dimension, over a group.

Each is the other's gradient. They, and the sharded matmuls built from them, are PyTorch custom
operations (`torch.library`), which a compiled model calls as they are.

Shards have `shard_size` rows along dimension 0, except that the last ones may have fewer. Shapes: n
this rank's rows, n_rows rows over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pentameter.parallel.mesh import group_named

# torch 2.13 renamed the function, and warns about the old name.
_HAS_NEW_NAME = hasattr(dist, "all_gather_single")
all_gather = dist.all_gather_single if _HAS_NEW_NAME else dist.all_gather_into_tensor
"""Gathers one tensor from each rank into a given output tensor."""


def gathered_shards(shard: Tensor, shard_size: int, n_rows: int, group_name: str) -> Tensor:
    """All-gather shards (n, …) over the named group into (n_rows, …), in rank order. Each has
    `shard_size` rows; the last ones may have fewer, or none. Collective."""
    group = group_named(group_name)
    gathered = shard.new_empty((shard_size * group.size(), *shard.shape[1:]))
    all_gather(gathered, _padded(shard, shard_size), group=group)
    return gathered if len(gathered) == n_rows else gathered[:n_rows].clone()


def gathered_columns(shard: Tensor, shard_size: int, n_columns: int, group_name: str) -> Tensor:
    """All-gather columns (…, n) over the named group into (…, n_columns), in rank order. Each rank
    has `shard_size` columns; the last ones may have fewer, or none. Collective."""
    columns = F.pad(shard, (0, shard_size - shard.shape[-1])).transpose(0, -1)
    gathered = gathered_shards(
        columns, shard_size, shard_size * group_named(group_name).size(), group_name
    )
    return gathered.transpose(0, -1)[..., :n_columns]


def reduced_shard(full: Tensor, shard_size: int, group_name: str) -> Tensor:
    """Sum tensors (n_rows, …) over the named group, and return this rank's shard (n, …) of the sum:
    a reduce-scatter in shards of `shard_size` rows, the last ones with fewer. Collective."""
    group = group_named(group_name)
    shard = full.new_empty((shard_size, *full.shape[1:]))
    shards = list(_padded(full, shard_size * group.size()).chunk(group.size()))
    dist.reduce_scatter(shard, shards, group=group)
    n_local = _n_local(full, shard_size, group)
    return shard if n_local == shard_size else shard[:n_local].clone()


def all_reduce_tensor(group_name: str, tensor: Tensor, kind: Literal["max", "sum"]) -> None:
    """All-reduce a tensor (any shape) over a group, in place, to the maximum or the sum.
    Collective."""
    op = dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op, group=group_named(group_name))


def _n_local(full: Tensor, shard_size: int, group: dist.ProcessGroup) -> int:
    """Return how many of `full`'s rows this rank has: `shard_size`, or fewer at the end."""
    return min(shard_size, max(0, len(full) - group.rank() * shard_size))


def _padded(tensor: Tensor, n: int) -> Tensor:
    """Return the tensor with n rows: contiguous, and zero-padded along dimension 0."""
    if len(tensor) == n:
        return tensor.contiguous()
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, n - len(tensor)))


all_gather_shards = torch.library.custom_op(
    "pentameter::all_gather_shards", gathered_shards, mutates_args=()
)
reduce_scatter_shards = torch.library.custom_op(
    "pentameter::reduce_scatter_shards", reduced_shard, mutates_args=()
)


@all_gather_shards.register_fake
def _(shard: Tensor, shard_size: int, n_rows: int, group_name: str) -> Tensor:
    return shard.new_empty((n_rows, *shard.shape[1:]))


@reduce_scatter_shards.register_fake
def _(full: Tensor, shard_size: int, group_name: str) -> Tensor:
    return full.new_empty((_n_local(full, shard_size, group_named(group_name)), *full.shape[1:]))


def _keep_shard_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.shard_size, _, ctx.group_name = inputs


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    full, ctx.shard_size, ctx.group_name = inputs
    ctx.n_rows = len(full)


def _sum(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    """Backward of the all-gather: reduce-scatter the gradient, (n_rows, …) → (n, …)."""
    return reduce_scatter_shards(g, ctx.shard_size, ctx.group_name), None, None, None


def _gather(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
    """Backward of the reduce-scatter: all-gather the gradient, (n, …) → (n_rows, …)."""
    return all_gather_shards(g, ctx.shard_size, ctx.n_rows, ctx.group_name), None, None


all_gather_shards.register_autograd(_sum, setup_context=_keep_shard_size)
reduce_scatter_shards.register_autograd(_gather, setup_context=_keep_sizes)


def product_operation(
    name: str,
    multiplied: Callable[..., Tensor],
    differentiated: Callable[..., tuple[Tensor, Tensor]],
    n_columns: Callable[..., int],
) -> Callable[..., Tensor]:
    """Return `multiplied(x, weight, *rest)` as the custom operation `pentameter::<name>`, whose
    backward is `differentiated(g, x, weight, *rest)`: the gradients for x and weight. `rest` are
    numbers and strings, such as group names. The output is (…, N) for x (…, K), with N =
    `n_columns(weight, *rest)`."""
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
        """Return the gradients for x and weight, in their shapes and dtypes, given g (…, N)."""
        x, weight = ctx.saved_tensors
        x_grad, weight_grad = backward(g, x, weight, *ctx.rest)
        return x_grad, weight_grad.to(weight.dtype), *(None for _ in ctx.rest)

    operation.register_autograd(differentiate, setup_context=keep)
    return operation
