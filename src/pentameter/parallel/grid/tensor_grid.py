"""Tensor parallelism in 2, 2.5 and 3 dimensions: the sharded computation for each module.

Weights and activations are both sharded: batch rows, residual channels, heads, feed-forward width,
vocabulary. A rank computes attention and activation functions for its own rows, heads and channels
without communication; matmuls (`summa.py`, `product_3d.py`), norms, the embedding and the loss
communicate. Each operation's role determines how its module computes; the model's code stays
unchanged.

Shapes: B this rank's batch rows, T tokens; D residual channels, K inner width and V vocabulary over
all ranks; N a weight's outputs over all ranks. "Local" channels or columns are this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.dropout import AttentionDropout, StreamDropout
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss, chunked_loss_sum
from pentameter.model.matmul import matmul_dtype
from pentameter.parallel.gradients import local
from pentameter.parallel.grid.product_3d import Product3d
from pentameter.parallel.grid.summa import Summa
from pentameter.parallel.linear import Forward, install_styles
from pentameter.parallel.mesh import group_along, name_of
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.tensor.collectives import (
    all_gather_shards,
    all_reduce_tensor,
    gathered_columns,
    reduce_scatter_shards,
)
from pentameter.parallel.tensor.sharded_norm import sharded_norm
from pentameter.planning.architecture import Operation, Role
from pentameter.planning.layout import Layout, shard_size
from pentameter.planning.sharding import Sharding
from pentameter.processes.world import World

Style = Callable[["Grid", Any, Operation], Forward]
"""Returns the sharded forward for an operation's module in a grid."""


@dataclass(frozen=True)
class Grid:
    """A rank's coordinates among those that shard a model's matrices, and its groups, by name; and
    what it computes in."""

    sharding: Sharding
    arithmetic: Arithmetic
    places: Mapping[str, int]
    depth: str
    row: str
    tensor: str

    @staticmethod
    def of(sharding: Sharding, arithmetic: Arithmetic, world: World) -> Grid:
        """Build this rank's Grid for a sharded model. Collective over the world."""
        layout = sharding.layout
        names = {
            dimension: name_of(group_along(dimension, layout, world))
            for dimension in ("depth", "row", "tensor")
            if layout.sizes[dimension] > 1
        }
        return Grid(
            sharding,
            arithmetic,
            layout.coordinates(world.rank),
            names.get("depth", ""),
            **{dimension: names[dimension] for dimension in ("row", "tensor")},
        )

    @property
    def layout(self) -> Layout:
        """The run's layout, with sizes along every mesh dimension."""
        return self.sharding.layout

    @property
    def heads(self) -> tuple[str, str]:
        """The mesh dimension that shards heads, feed-forward width and vocabulary between two
        matmuls, and its group's name."""
        dimension = self.layout.grid_width
        return dimension, self.depth if dimension == "depth" else self.tensor

    def width(self, n: int, *, largest: bool = False) -> int:
        """Return the size of this rank's shard in n channels or vocabulary tokens, sharded as
        `heads` says; of the largest shard if `largest`."""
        return self.sharding.local_shape((n,), ("vocab",), {} if largest else self.places)[0]

    def part(self, n: int) -> int:
        """Return the largest shard size for a parameter axis of length n that `row` shards."""
        return shard_size(n, self.layout.parameter_sizes["row"], 0)

    def reading(self, weight: Tensor) -> Summa | Product3d:
        """Return the distributed matmul x (…, D) → x · Wᵀ (…, N) for a column-parallel weight
        (N, D): SUMMA in 2-D and 2.5-D, the 3-D algorithm otherwise."""
        n_out, precision = weight.shape[0], self.arithmetic.precision
        if not self.layout.is_3d:
            return Summa(n_out, self.row, self.tensor, precision)
        groups = (self.depth, self.row, self.tensor)
        return Product3d(self.width(n_out), self.part(n_out), 0, *groups, precision)

    def adding(self, weight: Tensor) -> Summa | Product3d:
        """Return the distributed matmul x (…, K) → x · Wᵀ (…, D) for a row-parallel weight (D, K):
        SUMMA in 2-D and 2.5-D, the 3-D algorithm otherwise."""
        (n_out, n_in), precision = weight.shape, self.arithmetic.precision
        if not self.layout.is_3d:
            return Summa(n_out, self.row, self.tensor, precision)
        groups = (self.tensor, self.row, self.depth)
        return Product3d(self.width(n_in), self.part(n_in), 1, *groups, precision)

    def vector(self, vector: Tensor | None) -> Tensor | None:
        """Return the local elements of a vector (N,) that belongs to column-parallel outputs, such
        as a bias; None for None."""
        if vector is None:
            return None
        shard, n = local(vector), len(vector)
        return (
            all_gather_shards(shard, self.part(n), self.width(n), self.row)
            if self.layout.is_3d
            else shard
        )


def parallelize_grid(model: GPT, grid: Grid) -> None:
    """Have the model compute with its parameters' local shards in a grid, in place."""
    install_styles(model, STYLES, _head_loss, grid)
    D, tensor_rank = model.config.d_model, grid.places["tensor"]
    (width,) = grid.sharding.local_shape((D,), ("embed",))
    model.stream_channels = slice(tensor_rank * width, (tensor_rank + 1) * width)
    for module in model.modules():
        if isinstance(module, StreamDropout):
            module.d_model, module.first_channel = D, tensor_rank * width
        if isinstance(module, AttentionDropout):
            n_heads = grid.sharding.n_heads_here(model.config.n_heads)
            module.head_offset = grid.places[grid.heads[0]] * n_heads


# -- linears ------------------------------------------------------------------------------------


def _column_parallel(grid: Grid, linear: nn.Linear, op: Operation) -> Forward:
    """Column-parallel linear: local residual channels (B, T, …) → local columns of x · Wᵀ + b, W
    (N, D)."""
    matmul = grid.reading(linear.weight)

    def forward(x: Tensor) -> Tensor:
        bias = grid.vector(linear.bias)
        return matmul.linear(x.to(matmul_dtype(x)), local(linear.weight), bias)

    return forward


def _row_parallel(grid: Grid, linear: nn.Linear, op: Operation) -> Forward:
    """Row-parallel linear: local inner channels (B, T, …) → local residual channels of x · Wᵀ + b,
    W (D, K)."""
    matmul = grid.adding(linear.weight)

    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else local(linear.bias)
        return matmul.linear(x.to(matmul_dtype(x)), local(linear.weight), bias)

    return forward


# -- norms and embeddings -----------------------------------------------------------------------


def _norm(grid: Grid, norm: nn.LayerNorm | nn.RMSNorm, op: Operation) -> Forward:
    """LayerNorm or RMSNorm over all D residual channels, local channels (B, T, …) → same shape."""
    centred, eps = isinstance(norm, nn.LayerNorm), norm.eps
    assert eps is not None

    def forward(x: Tensor) -> Tensor:
        bias = getattr(norm, "bias", None)
        local_bias = None if bias is None else local(bias)
        y, _ = sharded_norm(x, local(norm.weight), local_bias, eps, centred, grid.tensor)
        return y

    return forward


def _head_norm(grid: Grid, norm: nn.RMSNorm, op: Operation) -> Forward:
    """RMSNorm for queries or keys (…, C). A rank has all channels in its heads, so a norm per head
    is local; a norm over all heads' channels communicates."""
    eps = norm.eps
    assert eps is not None
    over_all_heads = isinstance(norm.weight, DTensor)

    def forward(x: Tensor) -> Tensor:
        if not over_all_heads:
            return F.rms_norm(x, x.shape[-1:], norm.weight, eps)
        weight = grid.vector(norm.weight)
        assert weight is not None
        y, _ = sharded_norm(x, weight, None, eps, False, grid.heads[1])
        return y

    return forward


def _token_embedding(grid: Grid, table: nn.Embedding, op: Operation) -> Forward:
    """Vocabulary-parallel embedding: all-gather token ids over a group, look up those in this
    rank's range, zeros elsewhere, then reduce-scatter to its own batch rows. (B, T) → local
    channels (B, T, …). Token ids are sent, and not the vocabulary."""
    V = table.num_embeddings
    dimension, group_name = ("depth", grid.depth) if grid.layout.is_3d else ("row", grid.row)
    first = grid.places[dimension] * grid.width(V, largest=True)
    size = grid.layout.sizes[dimension]

    def forward(tokens: Tensor) -> Tensor:
        weight, B = local(table.weight), len(tokens)
        if grid.layout.is_3d:
            weight = all_gather_shards(weight, grid.part(V), grid.width(V), grid.row)
        rows = all_gather_shards(tokens, B, B * size, group_name) - first
        in_range = (rows >= 0) & (rows < len(weight))
        embedded = F.embedding(torch.where(in_range, rows, 0), weight)
        return reduce_scatter_shards(torch.where(in_range[..., None], embedded, 0.0), B, group_name)

    return forward


def _position_embedding(grid: Grid, table: nn.Embedding, op: Operation) -> Forward:
    """Position embedding: positions (T,) → local channels (T, …)."""
    return lambda positions: F.embedding(positions, local(table.weight))


# -- the head and its loss ----------------------------------------------------------------------


def _head(grid: Grid, head: Any, op: Operation) -> Forward:
    """Output head: local channels (B, T, …) → full logits (B, T, V) for this rank's batch rows."""
    _, group_name = grid.heads

    def forward(x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = weight if weight is not None else head.weight
        assert isinstance(weight, Tensor)
        x, bias = x.to(matmul_dtype(x)), grid.vector(head.bias)
        columns = grid.reading(weight).linear(x, local(weight), bias)
        V = len(weight)
        return gathered_columns(columns, grid.width(V, largest=True), V, group_name)

    return forward


def _head_loss(grid: Grid, loss: HeadLoss) -> Forward:
    """Vocabulary-parallel loss: each rank computes the full one from its columns of the logits."""
    dimension, group_name = grid.heads

    @torch.compiler.disable  # as in `tensor_parallel.py`
    def shards(
        x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return local shards of x, weight and bias, and targets (B, T) for the batch rows whose
        logits this rank has."""
        if grid.layout.is_3d:
            B = len(targets)
            all_targets = all_gather_shards(targets, B, B * grid.layout.sizes["depth"], grid.depth)
            targets = all_targets.split(B)[grid.places["tensor"]]
        return x, local(weight), grid.vector(bias), targets

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        widest = grid.width(len(weight), largest=True)
        return chunked_loss_sum(
            *shards(x, weight, bias, targets),
            loss.vocab_size,
            softcap=loss.softcap,
            first_column=grid.places[dimension] * widest,
            widest=widest,
            reduce=partial(all_reduce_tensor, group_name),
            matmul=grid.reading(weight),
        )

    return forward


STYLES: Mapping[Role, Style] = {
    "token_embedding": _token_embedding,
    "position_embedding": _position_embedding,
    "norm": _norm,
    "head_norm": _head_norm,
    "column_parallel": _column_parallel,
    "row_parallel": _row_parallel,
    "head": _head,
}
"""Role → style: every module with parameters has one."""
