"""Tensor parallelism in one dimension: several ranks shard each matrix in the model.

After Megatron-LM (Shoeybi et al. 2019) and, for `sequence`, Korthikanti et al. 2022. Each
operation's role, which follows from its axes, determines how its module computes; the model's code
stays unchanged. Sharded parameters are DTensors, so that later code can shard them again, save or
count them; modules compute with their local shards, and `tensor_products.py` communicates.

Shapes: B batch rows, T tokens, D d_model, V padded vocabulary, n ranks along `tensor`; t is T / n
with `sequence`, else T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.attention.attention import Sinks, sink_scores
from pentameter.model.attention.latent_attention import LatentAttention
from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.model.matmul import Matmul, matmul_dtype
from pentameter.parallel.gradients import local
from pentameter.parallel.linear import Forward, adapted
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.tensor.tensor_context import (
    Style,
    TensorContext,
    head,
    head_norm,
    looked_up,
)
from pentameter.parallel.tensor.tensor_products import (
    Order,
    gather_stream,
    read_stream,
    sum_stream,
)
from pentameter.planning.architecture import Operation, Role
from pentameter.planning.layouts.sharding import Sharding


def _mixes_tokens(op: Operation) -> bool:
    """Return True if the matrix of `op` belongs to attention (one of its axes is heads or KV
    heads), which needs the tokens of a sequence in order."""
    return bool({op.contracts, op.result.axes[1]} & {"heads", "kv_heads"})


def _local_positions(rank: int, n_ranks: int, positions: Tensor) -> Tensor:
    """Return the positions (T / n,) in the residual stream of the rank with coordinate `rank` among
    `n_ranks` (n), out of all (T,)."""
    return positions.chunk(n_ranks)[rank]


# -- linears --------------------------------------------------------------------------------------


def _matmuls(context: TensorParallelContext, *, by_time: bool) -> Callable[..., list[Tensor]]:
    """Return a function for a sub-layer's `read`: it all-gathers the residual stream (B, t, D)
    once, in sequence order if `by_time`, and multiplies it with the sub-layer's column-parallel
    matrices: (…, N / n) for all tokens and each matrix, with n ranks along `tensor`."""
    tokens = context.tokens(by_time=by_time)

    def read(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        """Return x · weightᵀ + bias, (…, N / n) for all tokens, for each linear, given x
        (B, t, D)."""
        dtype = matmul_dtype(x)
        if not context.reads_at_once:
            gathered = gather_stream(x, dtype, *tokens)
            return [linear(gathered) for linear in linears]
        shards = [[each.to(dtype) for each in context.local_rows(linear)] for linear in linears]
        weights = [weight for weight, *_ in shards]
        biases = [bias for _, *rest in shards for bias in rest]
        return read_stream(x.to(dtype), weights, biases, *tokens, context.arithmetic.precision)

    return read


def _gather(context: TensorParallelContext, *parts: Tensor) -> tuple[Tensor, ...]:
    """All-gather tensors (B, t, N) of the stream's tokens, as one message in the matmul dtype, in
    sequence order: (B, T, N) each. Their gradients are summed over the ranks. Collective."""
    joined = torch.cat(parts, dim=-1)
    gathered = gather_stream(joined, matmul_dtype(joined), *context.tokens(by_time=True))
    return gathered.split([part.shape[-1] for part in parts], dim=-1)


def _column_parallel(context: TensorParallelContext, linear: nn.Linear, op: Operation) -> Forward:
    """Return a column-parallel linear's forward: x (…, D) for all tokens → this rank's columns
    (…, N / n). `op` is not read."""
    matmul = context.arithmetic.matmul

    def forward(x: Tensor) -> Tensor:
        return adapted(matmul, linear, x, matmul.linear(x, *context.local_rows(linear)))

    return forward


def _row_parallel(context: TensorParallelContext, linear: nn.Linear, op: Operation) -> Forward:
    """Return a row-parallel linear's forward: x (…, K / n) for all tokens → partial products
    (…, D), which are summed over the n ranks (collective); each then adds the bias to its own
    tokens: (B, t, D). `op` tells whether it is attention's, whose tokens are in sequence order."""
    matmul, tokens = context.arithmetic.matmul, context.tokens(by_time=_mixes_tokens(op))

    def forward(x: Tensor) -> Tensor:
        y = adapted(matmul, linear, x, matmul.linear(x, local(linear.weight)))
        y = sum_stream(y, *tokens)
        bias: Tensor | None = linear.bias
        return y if bias is None else y + bias.to(y.dtype)

    return forward


# -- attention's sinks ----------------------------------------------------------------------------


def _sinks(context: TensorParallelContext, sinks: Sinks, op: Operation) -> Forward:
    """Return the sinks' forward: () → the scores (H / n,) of this rank's heads, with n ranks along
    `tensor`. Neither `context` nor `op` is read."""
    return lambda: sink_scores(local(sinks.weight))


# -- the embedding --------------------------------------------------------------------------------


def _token_embedding(context: TensorParallelContext, table: nn.Embedding, op: Operation) -> Forward:
    """Return a vocabulary-parallel embedding's forward, (B, T) → (B, t, D): look up ids in this
    rank's range, zeros elsewhere, then sum over the ranks (collective). `op` is not read."""
    first = context.rank * context.widest(table.num_embeddings)

    def forward(tokens: Tensor) -> Tensor:
        rows = looked_up(local(table.weight), context.reorder(tokens) - first)
        return sum_stream(rows, *context.tokens())

    return forward


# -- the context --------------------------------------------------------------------------------


class TensorParallelContext(TensorContext):
    """One-dimensional tensor parallelism on one rank, one of n along `tensor`: how each kind of
    module computes on this rank's shards."""

    styles: Mapping[Role, Style] = {
        "token_embedding": _token_embedding,
        "head_norm": head_norm,
        "sinks": _sinks,
        "column_parallel": _column_parallel,
        "row_parallel": _row_parallel,
        "head": head,
    }
    """Residual norms and position embeddings have none: every rank computes them with replicated
    weights."""

    columns = "tensor"

    def __init__(
        self, sharding: Sharding, arithmetic: Arithmetic, mesh: Mesh, *, reads_at_once: bool
    ) -> None:
        """Set up one-dimensional tensor parallelism on this rank. Creates no groups.

        sharding: how the layout shards activations and parameters.
        arithmetic: the run's dtypes and matmul.
        mesh: this rank's coordinates and process groups.
        reads_at_once: True to multiply by all column-parallel matrices with the same input in one
            operation, which overlaps communication with computation.
        """
        super().__init__(sharding, arithmetic, mesh)
        self.columns_group = mesh.group_name("tensor")
        self.rank, self.size = self.coordinates["tensor"], self.layout.tensor
        self.reads_at_once = reads_at_once

    def tokens(self, *, by_time: bool = False) -> tuple[Order, str]:
        """Return (order, group name): the layout in which a module gets all tokens, and the group
        over which to gather or sum them. The order is `whole` without `sequence`: every rank has
        the whole stream. With `sequence` it is `by_time`, (B, T) in sequence order, if `by_time`
        asks for that; by default it is `by_process`, (n · B, T / n) in rank order, for modules that
        treat each token independently."""
        if not self.layout.sequence:
            return "whole", self.columns_group
        return ("by_time" if by_time else "by_process"), self.columns_group

    def reorder(self, tokens: Tensor) -> Tensor:
        """Return token ids (B, T) in the layout that all-gathered tokens come in: (n · B, T / n)
        with `sequence`, else unchanged."""
        if not self.layout.sequence:
            return tokens
        return tokens.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)

    def local_rows(self, linear: nn.Linear) -> list[Tensor]:
        """Return the local matrix rows (N, D), and the bias (N,) if any, that this rank uses in a
        column-parallel linear: its shard. If there are fewer KV heads than ranks, key and value
        matrices are replicated instead, and a rank uses the rows for the KV head that its own
        queries read."""
        found = [local(each) for each in (linear.weight, linear.bias) if each is not None]
        n_replicas = self.sharding.kv_replicas
        if isinstance(linear.weight, DTensor) or n_replicas == 1:
            return found
        n_shards = self.size // n_replicas
        return [each.chunk(n_shards)[self.rank * n_shards // self.size] for each in found]

    def vector(self, vector: Tensor | None) -> Tensor | None:
        """Return this rank's elements (N / n,) of a DTensor (N,), without communication; None for
        None."""
        return None if vector is None else local(vector)

    def columns_matmul(self, weight: Tensor) -> Matmul:
        """Return the run's matmul for any `weight`: inputs are whole, so that it needs no
        communication."""
        return self.arithmetic.matmul

    def head_input(self, x: Tensor) -> Tensor:
        """All-gather the residual stream x (B, t, D) in sequence order: (B, T, D), in the matmul
        dtype. Collective."""
        return gather_stream(x, matmul_dtype(x), *self.tokens(by_time=True))

    def loss_inputs(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather the residual stream x (B, t, D), in the matmul dtype, and return it with the
        targets (B, T) put in the same token order. Collective."""
        return gather_stream(x, matmul_dtype(x), *self.tokens()), self.reorder(targets)

    def prepare(self, model: GPT, run: Sequence[Operation]) -> None:
        """Change `model`, this rank's slice of the network, in place, for tensor parallelism. A
        sub-layer then multiplies the stream with all its column-parallel matrices in one product,
        and dropout numbers heads as in the whole model. With `sequence`, the residual stream
        between sub-layers is sharded by token, (B, T / n, D) on each of n ranks. `run` lists the
        operations that the slice computes."""
        for op in run:
            if op.role == "column_parallel":
                sub_layer: Any = model.get_submodule(op.name.rpartition(".")[0])
                if isinstance(sub_layer, LatentAttention):
                    sub_layer.gather = partial(_gather, self)
                else:
                    sub_layer.read = _matmuls(self, by_time=_mixes_tokens(op))
        for module in model.modules():
            if isinstance(module, AttentionDropout):
                module.head_offset = self.rank * (model.config.attention.n_heads // self.size)
        if self.layout.sequence:
            model.stream_positions = partial(_local_positions, self.rank, self.size)
