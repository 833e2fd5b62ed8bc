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

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from pentameter.model.dropout import AttentionDropout, StreamDropout
from pentameter.model.gpt import GPT
from pentameter.model.matmul import matmul_dtype
from pentameter.parallel.gradients import local
from pentameter.parallel.grid.product_3d import Product3d
from pentameter.parallel.grid.summa import Summa
from pentameter.parallel.linear import Forward
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.tensor.collectives import all_gather_shards, reduce_scatter_shards
from pentameter.parallel.tensor.sharded_norm import sharded_norm
from pentameter.parallel.tensor.tensor_context import (
    Style,
    TensorContext,
    head,
    head_norm,
    looked_up,
)
from pentameter.planning.architecture import Operation, Role
from pentameter.planning.layouts.sharding import Sharding, shard_size

# -- linears ------------------------------------------------------------------------------------


def _column_parallel(grid: Grid, linear: nn.Linear, op: Operation) -> Forward:
    """Return the forward of a column-parallel linear layer in a grid of ranks, with weight W (N, D)
    and bias b: it maps this rank's channels of the residual stream (B, T, …) to its columns of x ·
    Wᵀ + b. `op` is not read."""
    matmul = grid.columns_matmul(linear.weight)

    def forward(x: Tensor) -> Tensor:
        bias = grid.vector(linear.bias)
        return matmul.linear(x.to(matmul_dtype(x)), local(linear.weight), bias)

    return forward


def _row_parallel(grid: Grid, linear: nn.Linear, op: Operation) -> Forward:
    """Return the forward of a row-parallel linear layer in a grid of ranks, with weight W (D, K)
    and bias b: it maps this rank's inner channels (B, T, …) to its channels of the residual stream,
    of x · Wᵀ + b. `op` is not read."""
    matmul = grid.stream_matmul(linear.weight)

    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else local(linear.bias)
        return matmul.linear(x.to(matmul_dtype(x)), local(linear.weight), bias)

    return forward


# -- norms and embeddings -----------------------------------------------------------------------


def _norm(grid: Grid, norm: nn.LayerNorm | nn.RMSNorm, op: Operation) -> Forward:
    """Return the forward of a LayerNorm or RMSNorm over all D channels of the residual stream, of
    which each rank has some: (B, T, …) → the same shape. The forward is collective over `tensor`.
    `op` is not read."""
    centred, eps = isinstance(norm, nn.LayerNorm), norm.eps
    assert eps is not None

    def forward(x: Tensor) -> Tensor:
        bias = getattr(norm, "bias", None)
        local_bias = None if bias is None else local(bias)
        y, _ = sharded_norm(x, local(norm.weight), local_bias, eps, centred, grid.tensor)
        return y

    return forward


def _token_embedding(grid: Grid, table: nn.Embedding, op: Operation) -> Forward:
    """Return a vocabulary-parallel embedding's forward, token ids (B, T) → local channels
    (B, T, …). `op` is not read.

    The forward all-gathers ids over the ranks that shard the vocabulary, looks up those in this
    rank's range, zeros elsewhere, then reduce-scatters to its own batch rows. So token ids are sent
    instead of the vocabulary's weights; only mode 3d also gathers the weights along `row`.
    """
    V = table.num_embeddings
    dimension, group_name = ("depth", grid.depth) if grid.layout.is_3d else ("row", grid.row)
    first = grid.coordinates[dimension] * grid.widest(V)
    size = grid.layout.sizes[dimension]

    def forward(tokens: Tensor) -> Tensor:
        weight, B = local(table.weight), len(tokens)
        if grid.layout.is_3d:
            weight = all_gather_shards(weight, grid.row_shard(V), grid.width(V), grid.row)
        rows = all_gather_shards(tokens, B, B * size, group_name) - first
        return reduce_scatter_shards(looked_up(weight, rows), B, group_name)

    return forward


def _position_embedding(grid: Grid, table: nn.Embedding, op: Operation) -> Forward:
    """Return the forward of the position embedding in a grid of ranks: it maps positions (T,) to
    this rank's channels of their embeddings, (T, …). `op` is not read."""
    return lambda positions: F.embedding(positions, local(table.weight))


# -- the context --------------------------------------------------------------------------------


class Grid(TensorContext):
    """This rank in a 2-D, 2.5-D or 3-D tensor mode: its coordinates and group names, and how each
    module computes on its shards."""

    styles: Mapping[Role, Style] = {
        "token_embedding": _token_embedding,
        "position_embedding": _position_embedding,
        "norm": _norm,
        "head_norm": head_norm,
        "column_parallel": _column_parallel,
        "row_parallel": _row_parallel,
        "head": head,
    }
    """Maps an operation's role to the function that returns its module's forward on local shards.
    Every module with parameters has one."""

    def __init__(self, sharding: Sharding, arithmetic: Arithmetic, mesh: Mesh) -> None:
        super().__init__(sharding, arithmetic, mesh)
        self.depth, self.row, self.tensor = map(mesh.group_name, ("depth", "row", "tensor"))
        self.columns = self.layout.grid_width
        self.columns_group = mesh.group_name(self.columns)

    def width(self, n: int) -> int:
        """Return the size of this rank's shard when n channels or vocabulary rows are sharded along
        the dimension that `columns` names: `tensor`, or `depth` in mode 3d."""
        return self.sharding.local_shape((n,), ("vocab",), self.coordinates)[0]

    def row_shard(self, n: int) -> int:
        """Return the largest shard size when `row` shards n entries along a parameter's axis."""
        return shard_size(n, self.layout.parameter_sizes["row"], 0)

    def columns_matmul(self, weight: Tensor) -> Summa | Product3d:
        """Return the distributed matmul x (…, D) → x · Wᵀ (…, N) for a column-parallel weight
        (N, D)."""
        return self._matmul(weight, 0, (self.depth, self.row, self.tensor))

    def stream_matmul(self, weight: Tensor) -> Summa | Product3d:
        """Return the distributed matmul x (…, K) → x · Wᵀ (…, D) for a row-parallel weight
        (D, K)."""
        return self._matmul(weight, 1, (self.tensor, self.row, self.depth))

    def _matmul(self, weight: Tensor, cut: int, groups: tuple[str, str, str]) -> Summa | Product3d:
        """Return the object that multiplies by `weight` over the grid's ranks: by SUMMA in tensor
        modes 2d and 2.5d, by the 3-D algorithm in 3d, where the mesh dimension `row` shards the
        weight's dimension `cut`. `groups` names the process groups for inputs, weight and
        results."""
        precision, n_cut = self.arithmetic.precision, weight.shape[cut]
        if not self.layout.is_3d:
            return Summa(len(weight), self.row, self.tensor, precision)
        return Product3d(self.width(n_cut), self.row_shard(n_cut), cut, *groups, precision)

    def vector(self, vector: Tensor | None) -> Tensor | None:
        """Return this rank's elements of a vector (N,) that belongs to column-parallel outputs,
        such as a bias; None for None. Collective in mode 3d."""
        if vector is None:
            return None
        shard, n = local(vector), len(vector)
        return (
            all_gather_shards(shard, self.row_shard(n), self.width(n), self.row)
            if self.layout.is_3d
            else shard
        )

    def head_input(self, x: Tensor) -> Tensor:
        """Return x, this rank's shard of the residual stream's channels (B, T, …), converted to the
        dtype of matmuls."""
        return x.to(matmul_dtype(x))

    def loss_inputs(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local channels x (B, T, …) as they are, and the targets (B, T) for the batch
        rows whose logits this rank has: in mode 3d those on its mirror rank, with `depth` and
        `tensor` coordinates swapped. Collective in mode 3d."""
        if self.layout.is_3d:
            B = len(targets)
            every = all_gather_shards(targets, B, B * self.layout.sizes["depth"], self.depth)
            targets = every.split(B)[self.coordinates["tensor"]]
        return x, targets

    def prepare(self, model: GPT, run: Sequence[Operation]) -> None:
        """Tell the modules of `model`, this rank's shard of the network, in place, with which
        channel and head of the whole model their own begin, so that dropout masks and positions are
        those of the whole model. `run` is not read."""
        D, tensor_rank = model.config.d_model, self.coordinates["tensor"]
        (width,) = self.sharding.local_shape((D,), ("embed",))
        model.stream_channels = slice(tensor_rank * width, (tensor_rank + 1) * width)
        for module in model.modules():
            if isinstance(module, StreamDropout):
                module.d_model, module.first_channel = D, tensor_rank * width
            if isinstance(module, AttentionDropout):
                n_heads = self.sharding.n_heads_here(model.config.attention.n_heads)
                module.head_offset = self.coordinates[self.columns] * n_heads
