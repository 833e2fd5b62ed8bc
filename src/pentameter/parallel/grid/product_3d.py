"""Matmuls with matrices sharded over l × l × l ranks.

After Bian et al. 2021 ("Maximizing parallelism in distributed training for huge neural networks").
Inputs, weight and outputs are sharded along both their axes, so that each rank holds 1 / l³ of
every matrix. Each is all-gathered or reduce-scattered along another of the three mesh dimensions:

    X: rows by (row, d), inputs by e    all-gathered along d: all rows of `row`
    W: outputs by d, inputs by e        all-gathered along `row`, which shards the axis that d does
    Y = X · Wᵀ                          reduce-scattered along e: rows by (row, e), outputs by d

The output is sharded like the input with d and e swapped. d is `depth` and e is `tensor` in a
column-parallel matmul, and the reverse in a row-parallel one.

Shapes: R batch rows at this rank's `row` coordinate, … further dimensions, K inputs and N outputs
over all ranks; l ranks along each dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pentameter.parallel.mesh import group_named
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.tensor.collectives import gathered_shards, product_operation, reduced_shard


class Product3d(NamedTuple):
    """One matrix product in 3-D tensor parallelism, over l × l × l ranks (l along each of `depth`,
    `row` and `tensor`): a record of its sizes and of its process groups' names (`inputs`, `row` and
    `results`), with methods that compute it.

    A rank's block of the weight is sharded along `row`, in its dimension `cut` (0 or 1), into
    shards of `most` entries, of which the last ones may be smaller. All-gathered, that dimension
    has `n_cut` entries.
    """

    n_cut: int
    most: int
    cut: int
    inputs: str
    """Name of the group over which inputs are all-gathered."""
    row: str
    results: str
    """Name of the group over which outputs are reduce-scattered."""
    precision: str
    """The `train.precision` whose matmul is used."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's shard (R / l, …, N / l) of x · weightᵀ + bias, given its shards x (R /
        l, …, K / l), weight: (N / l², K / l), or (N / l, K / l²) if `cut` is 1, and bias (N / l,).
        R is the batch rows at this rank's `row` coordinate. Collective."""
        y = product_3d(x, weight, *self)
        return y if bias is None else y + bias.to(y.dtype)

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        """Return the gradient for the shard x (R / l, …, K / l), and add the weight shard's to
        `weight_grad`, in place, given the output gradient g (R / l, …, N / l). Collective."""
        x_grad, shard = differentiated(g, x, weight, *self)
        weight_grad.add_(shard)
        return x_grad


def multiplied(
    x: Tensor,
    weight: Tensor,
    n_cut: int,
    most: int,
    cut: int,
    inputs: str,
    row: str,
    results: str,
    precision: str,
) -> Tensor:
    """Return this rank's shard (R / l, …, N / l) of x · weightᵀ, computed in x's dtype, given its
    shards x (R / l, …, K / l) and weight. The other arguments are Product3d's fields: the weight's
    sharded dimension and its sizes, three group names, the precision. Collective."""
    block = _gathered_weight(weight.to(x.dtype), n_cut, most, cut, row)
    rows = arithmetic(precision).matmul.linear(_gathered_rows(x, inputs), block)
    return _summed_rows(rows, results)


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
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients for this rank's shards: x (R / l, …, K / l), in its dtype, and weight,
    in float32 at least, given the output gradient g (R / l, …, N / l). Gathered tensors are
    gathered again, not kept. The other arguments are Product3d's fields. Collective."""
    matmul = arithmetic(precision).matmul
    g_rows = _gathered_rows(g.to(x.dtype), results)
    block = _gathered_weight(weight.to(x.dtype), n_cut, most, cut, row)
    x_grad = _summed_rows(matmul.input_gradient(g_rows, block), inputs)
    del block
    rows = _gathered_rows(x, inputs)
    block_grad = matmul.precise_weight_gradient(g_rows.flatten(0, -2), rows.flatten(0, -2))
    shard = reduced_shard(block_grad.transpose(0, cut), most, row)
    return x_grad, shard.transpose(0, cut).contiguous()


def _gathered_rows(x: Tensor, group_name: str) -> Tensor:
    """All-gather equal shards along dimension 0: (R / l, …) → (R, …). Collective."""
    return gathered_shards(x, len(x), len(x) * group_named(group_name).size(), group_name)


def _summed_rows(rows: Tensor, group_name: str) -> Tensor:
    """Reduce-scatter equal shards along dimension 0: (R, …) → (R / l, …). Collective."""
    return reduced_shard(rows, len(rows) // group_named(group_name).size(), group_name)


def _gathered_weight(weight: Tensor, n_cut: int, most: int, cut: int, row: str) -> Tensor:
    """All-gather a weight shard along its dimension `cut`, from `most` entries or fewer to `n_cut`,
    over the group `row`, into the block (N / l, K / l). Collective."""
    return gathered_shards(weight.transpose(0, cut), most, n_cut, row).transpose(0, cut)


def _n_columns(weight: Tensor, n_cut: int, most: int, cut: int, *_: Any) -> int:
    """Return this rank's number of output columns, N / l, from its weight shard and Product3d's
    fields `n_cut` and `cut`; the others are not read."""
    return n_cut if cut == 0 else len(weight)


product_3d = product_operation("product_3d", multiplied, differentiated, _n_columns)
