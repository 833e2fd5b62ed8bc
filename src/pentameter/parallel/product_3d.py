"""Products of matrices that are divided over l × l × l processes.

After Bian et al. 2021 ("Maximizing parallelism in distributed training for huge neural networks").
Inputs, weight and result are each cut in two, and gathered or summed along another of the three
dimensions of the processes, so that each holds 1 / l³ of every matrix:

    X: rows by (row, d), inputs by e    gathered along d: all rows of `row`
    W: outputs by d, inputs by e        gathered along `row`, which cuts the axis that d cuts
    Y = X · Wᵀ                          summed along e, to rows by (row, e), outputs by d

The result lies as the input with d and e in each other's place; `d` is `depth` and `e` is `tensor`
for a product that reads the stream, the other way round for one that adds to it.

Shapes: … a first dimension that is divided, K inputs and N outputs of all processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pentameter.model.loss import precise_product
from pentameter.parallel.mesh import group_named
from pentameter.parallel.parts import gathered_parts, product_operation, summed_part


class Product3d(NamedTuple):
    """A product with a matrix, `n_cut` of whose dimension `cut` processes along `row` divide into
    parts of `most`, but for the last."""

    n_cut: int
    most: int
    cut: int
    inputs: str
    """The name of the group along which inputs are gathered."""
    row: str
    results: str
    """That along which results are summed."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this process's part of x · weightᵀ, of its parts of both."""
        return product_3d(x, weight, *self)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same, which autograd does not see."""
        return multiplied(x, weight, *self)

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both parts, given that of the result's."""
        return differentiated(g, x, weight, *self)


def multiplied(
    x: Tensor, weight: Tensor, n_cut: int, most: int, cut: int, inputs: str, row: str, results: str
) -> Tensor:
    """Return a part of x · weightᵀ, computed in x's dtype. Collective."""
    block = _gathered_weight(weight.to(x.dtype), n_cut, most, cut, row)
    return _summed_rows(_gathered_rows(x, inputs) @ block.t(), results)


def differentiated(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    n_cut: int,
    most: int,
    cut: int,
    inputs: str,
    row: str,
    results: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the parts of x, in its dtype, and of the weight, in float32 at
    least, given that of the result's part. What was gathered is gathered anew. Collective."""
    g_rows = _gathered_rows(g.to(x.dtype), results)
    block = _gathered_weight(weight.to(x.dtype), n_cut, most, cut, row)
    x_grad = _summed_rows(g_rows @ block, inputs)
    del block
    rows = _gathered_rows(x, inputs)
    product = precise_product(g_rows.flatten(0, -2), rows.flatten(0, -2))
    own = summed_part(product.transpose(0, cut), most, row)
    return x_grad, own.transpose(0, cut).contiguous()


def _gathered_rows(x: Tensor, group_name: str) -> Tensor:
    return gathered_parts(x, len(x), len(x) * group_named(group_name).size(), group_name)


def _summed_rows(whole: Tensor, group_name: str) -> Tensor:
    return summed_part(whole, len(whole) // group_named(group_name).size(), group_name)


def _gathered_weight(weight: Tensor, n_cut: int, most: int, cut: int, row: str) -> Tensor:
    return gathered_parts(weight.transpose(0, cut), most, n_cut, row).transpose(0, cut)


def _n_columns(weight: Tensor, n_cut: int, most: int, cut: int, *_: Any) -> int:
    return n_cut if cut == 0 else len(weight)


product_3d = product_operation("product_3d", multiplied, differentiated, _n_columns)
