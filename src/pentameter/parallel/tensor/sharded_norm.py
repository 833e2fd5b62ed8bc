"""Norms over a residual stream whose channels are sharded.

Each rank computes the mean and the variance of its own channels, from which the global ones follow
exactly (Chan, Golub and LeVeque 1983), without the cancellation in a sum of squares. The backward
pass all-reduces two sums over the channels.

Shapes: B batch rows, T tokens, D this rank's channels, q ranks that shard them evenly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.parallel.mesh import group_named


def normed(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, group_name: str
) -> tuple[Tensor, Tensor]:
    """Compute LayerNorm for x (B, T, D), or RMSNorm unless `centred`, over all ranks' channels; x,
    weight and bias (D,) are this rank's. Returns the output (B, T, D), in float32 at least, and the
    statistics (2, B, T): the mean that was subtracted (0 for RMSNorm) and the reciprocal standard
    deviation that was multiplied by. Collective over the group."""
    group = group_named(group_name)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if centred:
        variance, mean = torch.var_mean(wide, dim=-1, correction=0)
        local_statistics = torch.stack((mean, variance))
        gathered = local_statistics.new_empty((group.size(), *local_statistics.shape))
        dist.all_gather(list(gathered), local_statistics, group=group)
        means, variances = gathered.unbind(1)
        mean = means.mean(0)
        square = variances.mean(0) + (means - mean).square().mean(0)
    else:
        square = wide.square().mean(-1)
        dist.all_reduce(square, group=group)
        square /= group.size()
        mean = torch.zeros_like(square)
    statistics = torch.stack((mean, (square + eps).rsqrt()))
    y = (wide - statistics[0, ..., None]) * statistics[1, ..., None] * weight
    return (y if bias is None else y + bias), statistics


def differentiated(
    g: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, centred: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for x (B, T, D), weight (D,) and bias (D,), given the output gradient g
    (B, T, D) and the forward pass's `statistics` (2, B, T): mean and reciprocal standard deviation.
    `centred` is True for LayerNorm, False for RMSNorm. Weight and bias gradients are sums over this
    rank's tokens only. Collective over the group."""
    group = group_named(group_name)
    wide = x.to(statistics.dtype)
    unit = (wide - statistics[0, ..., None]) * statistics[1, ..., None]
    by_unit = g * unit
    weighted = g * weight
    sums = [(weighted * unit).mean(-1), *([weighted.mean(-1)] if centred else [])]
    means = torch.stack(sums)
    dist.all_reduce(means, group=group)
    means /= group.size()
    x_grad = weighted - unit * means[0, ..., None]
    if centred:
        x_grad -= means[1, ..., None]
    x_grad *= statistics[1, ..., None]
    return x_grad.to(x.dtype), by_unit.flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)


sharded_norm = torch.library.custom_op("pentameter::sharded_norm", normed, mutates_args=())
sharded_norm_backward = torch.library.custom_op(
    "pentameter::sharded_norm_backward", differentiated, mutates_args=()
)


@sharded_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    precise = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape, dtype=precise), x.new_empty((2, *x.shape[:-1]), dtype=precise)


@sharded_norm_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), g.new_empty(weight.shape), g.new_empty(weight.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.centred, ctx.group_name = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, g: Tensor, _statistics_grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients for x (B, T, D), weight and bias (D,), None for other arguments, given
    the gradient g (B, T, D) of the output. The statistics have no gradient."""
    x, weight, statistics = ctx.saved_tensors
    x_grad, weight_grad, bias_grad = sharded_norm_backward(
        g, x, weight, statistics, ctx.centred, ctx.group_name
    )
    cast_bias_grad = bias_grad.to(weight.dtype) if ctx.has_bias else None
    return x_grad, weight_grad.to(weight.dtype), cast_bias_grad, None, None, None


sharded_norm.register_autograd(_backward, setup_context=_keep_for_backward)
