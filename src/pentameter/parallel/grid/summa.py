"""Matmuls with matrices sharded in blocks over q × q ranks: SUMMA (van de Geijn and Watts 1997).

As in Xu et al. 2021 ("An efficient 2D method for training super-large deep learning models"). Rank
(i, j), with coordinate i along `row` and j along `tensor`, holds block (i, j) of every matrix. A
linear layer and its gradients take three forms, with PyTorch's weights (outputs, inputs):

    Y = X · Wᵀ     step l: broadcast W(l, j) along `row`, reduce X(i, j) · W(l, j)ᵀ to (i, l)
    X' = Y' · W    step l: broadcast Y'(i, l) along `tensor`, W(l, j) along `row`; add the matmul
                   locally
    W' = Y'ᵀ · X   step l: the same Y'(i, l); reduce Y'(i, l)ᵀ · X(i, j) to (l, j)

While one block is multiplied, the next one is being broadcast. The forward and backward passes are
PyTorch custom operations (`torch.library`), which a compiled model calls as they are.

Shapes: … this rank's rows of tokens, K inputs and N outputs over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.parallel.mesh import group_named
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.tensor.collectives import product_operation
from pentameter.parallel.waits import finish
from pentameter.planning.layouts.sharding import shard_size


class Summa(NamedTuple):
    """One matrix product in 2-D tensor parallelism by the algorithm SUMMA, over q × q ranks: a
    record of its sizes and groups, with methods that compute it. `n_out` is N, the weight's rows
    over all ranks. `row` and `tensor` name the process groups along these mesh dimensions;
    `precision` is the `train.precision` whose matmul multiplies blocks."""

    n_out: int
    row: str
    tensor: str
    precision: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's block (…, N / q) of x · weightᵀ + bias, given its blocks x (…, K / q),
        weight (N / q, K / q) and bias (N / q,). Collective."""
        y = summa(x, weight, *self)
        return y if bias is None else y + bias.to(y.dtype)

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        """Return the gradient for x (…, K / q), and add the weight block's to `weight_grad` (N / q,
        K / q), in place, given the output gradient g (…, N / q). Collective."""
        x_grad, block = differentiated(g, x, weight, *self)
        weight_grad.add_(block)
        return x_grad


def multiplied(
    x: Tensor, weight: Tensor, n_out: int, row: str, tensor: str, precision: str
) -> Tensor:
    """Return this rank's block (…, N / q) of x · weightᵀ, computed in x's dtype, given its blocks x
    (…, K / q) and weight (N / q, K / q). The other arguments are Summa's fields: N, two group
    names, the precision. Collective."""
    columns, matmul = group_named(tensor), arithmetic(precision).matmul
    result = x.new_empty(0)
    shapes = _shapes((n_out, weight.shape[1]), columns.size())
    for step, block in enumerate(_each(weight.to(x.dtype), shapes, group_named(row))):
        partial_sum = matmul.linear(x, block)
        dist.reduce(partial_sum, group_dst=step, group=columns)
        if step == columns.rank():
            result = partial_sum
    return result


def differentiated(
    g: Tensor, x: Tensor, weight: Tensor, n_out: int, row: str, tensor: str, precision: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients for this rank's blocks in a grid with q × q ranks: for x (…, K / q), in
    its dtype, and for the weight (N / q, K / q), in float32 at least, given the output gradient g
    (…, N / q). `n_out` is N; `row` and `tensor` name the groups of q ranks along these mesh
    dimensions; `precision` is the `train.precision` of the block matmuls. Collective."""
    rows, columns, matmul = group_named(row), group_named(tensor), arithmetic(precision).matmul
    flat = x.reshape(-1, x.shape[-1])
    x_grad, weight_grad = torch.zeros_like(flat), x.new_empty(0)
    shapes = _shapes((n_out, weight.shape[1]), rows.size())
    grad_shapes = [(len(flat), n) for n, _ in shapes]
    grads = _each(g.reshape(-1, g.shape[-1]).to(x.dtype), grad_shapes, columns)
    weights = _each(weight.to(x.dtype), shapes, rows)
    for step, (grad, block) in enumerate(zip(grads, weights, strict=True)):
        matmul.input_gradient(grad, block, x_grad)
        partial_sum = matmul.precise_weight_gradient(grad, flat)
        dist.reduce(partial_sum, group_dst=step, group=rows)
        if step == rows.rank():
            weight_grad = partial_sum
    return x_grad.view(x.shape), weight_grad


def _shapes(shape: tuple[int, int], n_blocks: int) -> list[tuple[int, int]]:
    """Return each block's (rows, columns) when a matrix with this `shape` is sharded by rows into
    `n_blocks`; the last blocks may have fewer rows."""
    n, width = shape
    return [(shard_size(n, n_blocks, index), width) for index in range(n_blocks)]


def _each(
    held: Tensor, shapes: list[tuple[int, int]], group: dist.ProcessGroup
) -> Iterator[Tensor]:
    """Yield the block of every rank in the group in turn, each broadcast by the rank that holds it.
    `held` is this rank's block; `shapes` are the (rows, columns) of all. The next broadcast runs
    while the caller uses the block. Collective."""

    def start_broadcast(step: int) -> tuple[Tensor, Any]:
        """Start to broadcast the block that the rank with index `step` holds; return the block,
        which is filled when the work is done, and the work handle."""
        block = held.contiguous() if step == group.rank() else held.new_empty(shapes[step])
        return block, dist.broadcast(block, group_src=step, group=group, async_op=True)

    block, work = start_broadcast(0)
    for step in range(len(shapes)):
        finish(work, "broadcast", group)
        current = block
        if step + 1 < len(shapes):
            block, work = start_broadcast(step + 1)
        yield current


def _n_columns(weight: Tensor, n_out: int, row: str, tensor: str, *_: Any) -> int:
    """Return this rank's number of output columns, N / q, for `n_out` (N) over the group `tensor`;
    the other arguments are not read."""
    columns = group_named(tensor)
    return shard_size(n_out, columns.size(), columns.rank())


summa = product_operation("summa", multiplied, differentiated, _n_columns)
