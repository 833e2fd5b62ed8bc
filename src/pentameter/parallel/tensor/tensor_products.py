"""Matmuls between the residual stream and matrices sharded over one mesh dimension.

After Megatron-LM (Shoeybi et al. 2019) and, if the stream is sequence-parallel, Korthikanti et al.
2022. A column-parallel matrix (N, D) is sharded by its rows: its inputs are all-gathered, and their
gradients summed. A row-parallel matrix (D, K) is sharded by its columns: its outputs are summed.
Messages are in the matmul dtype, except embedding rows, which have the residual stream's.

A sub-layer's matrices that read the same input form one operation, so that their backward pass can
overlap communication with computation. The forward pass keeps only this rank's shard of the inputs:
these are all-gathered while their gradient is computed, which is then summed while the weight
gradients are computed.

Shapes: B batch rows, T tokens, D residual channels, N this rank's outputs, n ranks; t is T / n if
the stream is sequence-parallel, else T. All tokens are (B, T), or (n · B, t), see `Order`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.parallel.mesh import group_named
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.tensor.collectives import all_gather
from pentameter.parallel.waits import finish

Order = Literal["whole", "by_time", "by_process"]
"""The layout in which a matmul gets the tokens of all ranks. `whole`: the stream is replicated on
each rank. Otherwise the stream is sequence-parallel and has been all-gathered: `by_time` as (B, T)
in sequence order, or `by_process` as (n · B, t) in rank order. The latter copies nothing in memory,
and is as good for modules that take each token independently."""
Wait = Callable[[], Tensor]
"""Waits for a collective, and returns its result."""


def _start_gather(x: Tensor, order: str, group: dist.ProcessGroup) -> Wait:
    """Start to all-gather x (B, t, D) from all ranks, and return a function. Called, it waits, and
    returns all tokens: (n · B, t, D) if `order` is `by_process`, else (B, T, D)."""
    shards = x.new_empty((group.size() * len(x), *x.shape[1:]))
    work = all_gather(shards, x.contiguous(), group=group, async_op=True)

    def wait() -> Tensor:
        """Wait until the all-gather is done, and return all ranks' tokens: (n · B, t, D) if `order`
        is `by_process`, else (B, T, D)."""
        finish(work, "all-gather", group)
        if order == "by_process":
            return shards
        return shards.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)

    return wait


def _start_sum(x: Tensor, order: str, group: dist.ProcessGroup) -> Wait:
    """Start to sum x over the group's n ranks, and return a function. Called, it waits, and returns
    this rank's tokens of the sum, (B, t, D). x has this rank's contribution for all tokens:
    (B, T, D), or (n · B, t, D) if `order` is `by_process`. If `order` is `whole`, x itself is
    overwritten by the sum, and t = T.

    With sequence parallelism (t = T / n) each rank sends the others their shards and sums its own
    in float32 at least. A reduce-scatter would send as much, but sums in the message's dtype, and
    gloo implements it as an all-reduce, which takes three times as long.
    """
    if order == "whole":
        received = x
        work = dist.all_reduce(received, group=group, async_op=True)
    else:
        dim = 1 if order == "by_time" else 0
        sent = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)

    def wait() -> Tensor:
        """Wait until the sum is done, and return this rank's tokens of it, (B, t, D)."""
        finish(work, "all-reduce" if order == "whole" else "all-to-all", group)
        if order == "whole":
            return received
        precise = torch.promote_types(x.dtype, torch.float32)
        return received.sum(0, dtype=precise).to(x.dtype)

    return wait


# -- the residual stream --------------------------------------------------------------------------


def gathered(x: Tensor, dtype: torch.dtype, order: str, group_name: str) -> Tensor:
    """All-gather the residual stream x (B, t, D) over the group's n ranks, cast to `dtype`, and
    return all tokens: (B, T, D) in sequence order for `order` `by_time`, (n · B, t, D) in rank
    order for `by_process`. For `whole` every rank has all tokens already, and x is only copied.
    Collective unless `order` is `whole`."""
    if order == "whole":
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return _start_gather(x.to(dtype), order, group_named(group_name))()


def summed(x: Tensor, order: str, group_name: str) -> Tensor:
    """Sum x over the group's n ranks, and return this rank's tokens of the sum, (B, t, D).
    Collective.

    x has this rank's contribution for all tokens: (B, T, D), or (n · B, t, D) if `order` is
    `by_process`. t is T / n; if `order` is `whole`, t = T, and every rank gets all tokens (an
    all-reduce).
    """
    contribution = x.clone(memory_format=torch.contiguous_format) if order == "whole" else x
    return _start_sum(contribution, order, group_named(group_name))()


gather_stream = torch.library.custom_op("pentameter::gather_stream", gathered, mutates_args=())
sum_stream = torch.library.custom_op("pentameter::sum_stream", summed, mutates_args=())


def _all_tokens(x: Tensor, order: str, group_name: str) -> tuple[int, int]:
    """Return the first two sizes of the tensor that holds all ranks' tokens in the layout `order`,
    given this rank's x (B, t, …): (B, T), or (n · B, t) for `by_process`."""
    B, t, n = *x.shape[:2], group_named(group_name).size()
    return {"whole": (B, t), "by_time": (B, n * t), "by_process": (n * B, t)}[order]


@gather_stream.register_fake
def _(x: Tensor, dtype: torch.dtype, order: str, group_name: str) -> Tensor:
    return x.new_empty((*_all_tokens(x, order, group_name), x.shape[2]), dtype=dtype)


@sum_stream.register_fake
def _(x: Tensor, order: str, group_name: str) -> Tensor:
    B, T, D = x.shape
    n = group_named(group_name).size()
    return x.new_empty(
        {"whole": x.shape, "by_time": (B, T // n, D), "by_process": (B // n, T, D)}[order]
    )


def _keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.order, ctx.group_name = inputs
    ctx.dtype = x.dtype


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.order, ctx.group_name = inputs


def _sum(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    """Backward of the all-gather: sum the gradient for all tokens over the ranks, and return this
    rank's (B, t, D)."""
    return sum_stream(g, ctx.order, ctx.group_name).to(ctx.dtype), None, None, None


def _gather(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
    """Backward of the sum: all-gather the gradient (B, t, D) to all tokens; if the order is
    `whole`, it already has them, and is returned unchanged."""
    if ctx.order != "whole":
        g = gather_stream(g, g.dtype, ctx.order, ctx.group_name)
    return g, None, None


gather_stream.register_autograd(_sum, setup_context=_keep_dtype)
sum_stream.register_autograd(_gather, setup_context=_keep_order)


# -- column-parallel matmuls ----------------------------------------------------------------------


def multiplied(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    order: str,
    group_name: str,
    precision: str,
) -> list[Tensor]:
    """Return x · weightᵀ + bias (…, N) for all tokens and each column-parallel matrix in `weights`,
    (N, D) each, given this rank's tokens x (B, t, D). `biases` has one (N,) per matrix, or is empty
    if there are none; `order` is the layout for all tokens, and `precision` names the matmul.
    Collective unless `order` is `whole`."""
    all_x = x if order == "whole" else gathered(x, x.dtype, order, group_name)
    matmul = arithmetic(precision).matmul
    return [
        matmul.linear(all_x, *each)
        for each in zip(weights, *([biases] if biases else []), strict=True)
    ]


def differentiated(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    order: str,
    group_name: str,
    precision: str,
) -> list[Tensor]:
    """Return one list with the gradients for x (B, t, D), the weights (N, D) and, if `has_biases`,
    the biases (N,), given the output gradients `grads`, (…, N) each, for all tokens. `order`, the
    group and the `train.precision` are the forward pass's. Collective."""
    group, matmul = group_named(group_name), arithmetic(precision).matmul
    gather_inputs = None if order == "whole" else _start_gather(x, order, group)
    x_grad = matmul.input_gradient(grads[0], weights[0])
    flat = [g.flatten(0, 1) for g in grads]
    for g, weight in zip(flat[1:], weights[1:], strict=True):
        matmul.input_gradient(g, weight, x_grad.view(g.shape[0], -1))
    sum_x_grad = _start_sum(x_grad, order, group)
    all_x = (x if gather_inputs is None else gather_inputs()).flatten(0, 1)
    weight_grads = [matmul.weight_gradient(g, all_x) for g in flat]
    bias_grads = [g.sum(0) for g in flat] if has_biases else []
    return [sum_x_grad(), *weight_grads, *bias_grads]


read_stream = torch.library.custom_op("pentameter::read_stream", multiplied, mutates_args=())
read_stream_backward = torch.library.custom_op(
    "pentameter::read_stream_backward", differentiated, mutates_args=()
)


@read_stream.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], order: str, group_name: str, *_: Any
) -> list[Tensor]:
    tokens = _all_tokens(x, order, group_name)
    return [x.new_empty((*tokens, len(weight))) for weight in weights]


@read_stream_backward.register_fake
def _(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], has_biases: bool, *_: Any
) -> list[Tensor]:
    biases = [x.new_empty(len(weight)) for weight in weights if has_biases]
    return [x.new_empty(x.shape), *(x.new_empty(weight.shape) for weight in weights), *biases]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, *ctx.rest = inputs
    ctx.has_biases = bool(biases)
    ctx.save_for_backward(x, *weights)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Return the gradients for x (B, t, D), the list of weights (N, D) and that of biases (N,),
    given `grads`, one per output."""
    x, *weights = ctx.saved_tensors
    x_grad, *others = read_stream_backward(grads, x, weights, ctx.has_biases, *ctx.rest)
    return x_grad, others[: len(weights)], others[len(weights) :], None, None, None


read_stream.register_autograd(_differentiate, setup_context=_keep)
