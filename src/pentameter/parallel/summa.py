"""Products of matrices that lie in blocks on q × q processes: SUMMA (van de Geijn and Watts 1997).

As in Xu et al. 2021 ("An efficient 2D method for training super-large deep learning models").
Process (i, j), at i along `row` and j along `tensor`, has block (i, j) of every matrix. Three forms
make up a layer and its gradients, with PyTorch's weights (outputs, inputs):

    Y = X · Wᵀ     step l: W(l, j) goes to all i, and the products with X(i, j) are summed at (i, l)
    X' = Y' · W    step l: Y'(i, l) goes to all j, W(l, j) to all i, and the products add up at home
    W' = Y'ᵀ · X   step l: the same Y'(i, l), and the products with X(i, j) are summed at (l, j)

While a block is at work the next one is on its way. The two passes are operations of PyTorch's own
(`torch.library`), which a compiled model calls as they are.

Shapes: … rows of tokens that are here, K inputs and N outputs of all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.model.loss import precise_product
from pentameter.parallel.mesh import group_named
from pentameter.parallel.parts import product_operation
from pentameter.planning.layout import part_size


class Summa(NamedTuple):
    """A product with a matrix of `n_out` rows, over the groups of these names."""

    n_out: int
    row: str
    tensor: str

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return block (…, N / q) of x · weightᵀ, of blocks (…, K / q) and (N / q, K / q)."""
        return summa(x, weight, *self)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same, which autograd does not see."""
        return multiplied(x, weight, *self)

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both blocks, given that of the result's."""
        return differentiated(g, x, weight, *self)


def multiplied(x: Tensor, weight: Tensor, n_out: int, row: str, tensor: str) -> Tensor:
    """Return block (…, N / q) of x · weightᵀ, computed in x's dtype. Collective."""
    columns = group_named(tensor)
    result = x.new_empty(0)
    shapes = _shapes((n_out, weight.shape[1]), columns.size())
    for place, block in enumerate(_each(weight.to(x.dtype), shapes, group_named(row))):
        part = x @ block.t()
        dist.reduce(part, group_dst=place, group=columns)
        if place == columns.rank():
            result = part
    return result


def differentiated(
    g: Tensor, x: Tensor, weight: Tensor, n_out: int, row: str, tensor: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the blocks of x, in its dtype, and of the weight, in float32 at
    least, given that of block (…, N / q) of the result. Collective."""
    rows, columns = group_named(row), group_named(tensor)
    flat = x.reshape(-1, x.shape[-1])
    x_grad, weight_grad = torch.zeros_like(flat), x.new_empty(0)
    shapes = _shapes((n_out, weight.shape[1]), rows.size())
    given = [(len(flat), n) for n, _ in shapes]
    grads = _each(g.reshape(-1, g.shape[-1]).to(x.dtype), given, columns)
    weights = _each(weight.to(x.dtype), shapes, rows)
    for place, (grad, block) in enumerate(zip(grads, weights, strict=True)):
        x_grad.addmm_(grad, block)
        part = precise_product(grad, flat)
        dist.reduce(part, group_dst=place, group=rows)
        if place == rows.rank():
            weight_grad = part
    return x_grad.view(x.shape), weight_grad


def _shapes(whole: tuple[int, int], n_blocks: int) -> list[tuple[int, int]]:
    """Shapes of the blocks that (n, width) is cut into by its rows."""
    n, width = whole
    return [(part_size(n, n_blocks, place), width) for place in range(n_blocks)]


def _each(own: Tensor, shapes: list[tuple[int, int]], group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Each process's block in turn, of these shapes; while one is at work the next one comes."""

    def coming(place: int) -> tuple[Tensor, Any]:
        block = own.contiguous() if place == group.rank() else own.new_empty(shapes[place])
        return block, dist.broadcast(block, group_src=place, group=group, async_op=True)

    block, work = coming(0)
    for place in range(len(shapes)):
        work.wait()
        at_hand = block
        if place + 1 < len(shapes):
            block, work = coming(place + 1)
        yield at_hand


def _n_columns(weight: Tensor, n_out: int, row: str, tensor: str) -> int:
    columns = group_named(tensor)
    return part_size(n_out, columns.size(), columns.rank())


summa = product_operation("summa", multiplied, differentiated, _n_columns)
