"""Products of the residual stream with matrices that processes share along one dimension.

After Megatron-LM (Shoeybi et al. 2019) and, where the stream is divided by time, Korthikanti et al.
2022. A matrix that reads the stream is divided by its rows: its inputs are gathered, and their
gradients summed. One that is added to the stream is divided by its columns: its results are summed.
Everything is sent in the products' dtype, but for the embedding's rows, which are the stream's.

The matrices of a sub-layer that read the same are one operation, so that their backward pass can
send while it computes: the inputs, of which the forward pass kept this process's part alone, come
while the inputs' gradient is made, and that is summed while the weights' gradients are.

Shapes: B batch, T time, D channels of the stream, N outputs that are here, n processes; t is T / n
where the stream is divided by time, else T. All tokens are (B, T), or (n · B, t), see `Order`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pentameter.parallel.mesh import group_named
from pentameter.parallel.parts import all_gather

Order = Literal["whole", "by_time", "by_process"]
"""How tokens lie where all of them are. The stream is `whole` in each process; or it is divided by
time, and gathered as (B, T) by time, or as (n · B, t) by process, which moves nothing in memory
and is as good to whatever takes each token by itself."""
Wait = Callable[[], Tensor]
"""Waits for a message, and returns what came of it."""


def _gathering(x: Tensor, order: str, group: dist.ProcessGroup) -> Wait:
    """Begin to gather (B, t, D) from all processes; then there are all tokens."""
    parts = x.new_empty((group.size() * len(x), *x.shape[1:]))
    work = all_gather(parts, x.contiguous(), group=group, async_op=True)

    def wait() -> Tensor:
        assert work is not None
        work.wait()
        if order == "by_process":
            return parts
        return parts.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)

    return wait


def _summing(x: Tensor, order: str, group: dist.ProcessGroup) -> Wait:
    """Begin to sum what each process has for all tokens, in place where each keeps all of the sum;
    then there is this process's part.

    Where time is divided each sends the others their parts and adds up its own, in float32 at
    least. A reduce-scatter sends as much, but adds up in the dtype of the message, and gloo makes
    it of an all-reduce, which takes three times as long.
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
        assert work is not None
        work.wait()
        if order == "whole":
            return received
        precise = torch.promote_types(x.dtype, torch.float32)
        return received.sum(0, dtype=precise).to(x.dtype)

    return wait


# -- the stream -----------------------------------------------------------------------------------


def gathered(x: Tensor, dtype: torch.dtype, order: str, group_name: str) -> Tensor:
    """Return all tokens of the stream, in `dtype`, of which (B, t, D) are here. Collective."""
    if order == "whole":
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return _gathering(x.to(dtype), order, group_named(group_name))()


def summed(x: Tensor, order: str, group_name: str) -> Tensor:
    """Return this process's part (B, t, D) of the sum over the group for all tokens. Collective."""
    own = x.clone(memory_format=torch.contiguous_format) if order == "whole" else x
    return _summing(own, order, group_named(group_name))()


gather_stream = torch.library.custom_op("pentameter::gather_stream", gathered, mutates_args=())
sum_stream = torch.library.custom_op("pentameter::sum_stream", summed, mutates_args=())


def _all_tokens(x: Tensor, order: str, group_name: str) -> tuple[int, int]:
    """Return the shape of all tokens, of which (B, t) are here."""
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
    return sum_stream(g, ctx.order, ctx.group_name).to(ctx.dtype), None, None, None


def _gather(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
    if ctx.order != "whole":
        g = gather_stream(g, g.dtype, ctx.order, ctx.group_name)
    return g, None, None


gather_stream.register_autograd(_sum, setup_context=_keep_dtype)
sum_stream.register_autograd(_gather, setup_context=_keep_order)


# -- matrices that read the stream ----------------------------------------------------------------


def multiplied(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], order: str, group_name: str
) -> list[Tensor]:
    """Return x · weightᵀ + bias, (…, N) of all tokens, for each matrix (N, D) that reads the
    stream, of which x (B, t, D) is here; `biases` (N,) is empty where there are none. Collective.
    """
    every = x if order == "whole" else gathered(x, x.dtype, order, group_name)
    return [
        F.linear(every, *each) for each in zip(weights, *([biases] if biases else []), strict=True)
    ]


def differentiated(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    order: str,
    group_name: str,
) -> list[Tensor]:
    """Return the gradients of x, of the weights and of the biases if there are any, in one list,
    given those of the results. Collective."""
    group = group_named(group_name)
    coming = None if order == "whole" else _gathering(x, order, group)
    x_grad = grads[0] @ weights[0]
    flat = [g.flatten(0, 1) for g in grads]
    for g, weight in zip(flat[1:], weights[1:], strict=True):
        x_grad.view(g.shape[0], -1).addmm_(g, weight)
    total = _summing(x_grad, order, group)
    every = (x if coming is None else coming()).flatten(0, 1)
    weight_grads = [g.t() @ every for g in flat]
    bias_grads = [g.sum(0) for g in flat] if has_biases else []
    return [total(), *weight_grads, *bias_grads]


read_stream = torch.library.custom_op("pentameter::read_stream", multiplied, mutates_args=())
read_stream_backward = torch.library.custom_op(
    "pentameter::read_stream_backward", differentiated, mutates_args=()
)


@read_stream.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], order: str, group_name: str
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
    x, weights, biases, ctx.order, ctx.group_name = inputs
    ctx.has_biases = bool(biases)
    ctx.save_for_backward(x, *weights)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    x_grad, *rest = read_stream_backward(
        grads, x, weights, ctx.has_biases, ctx.order, ctx.group_name
    )
    return x_grad, rest[: len(weights)], rest[len(weights) :], None, None


read_stream.register_autograd(_differentiate, setup_context=_keep)
