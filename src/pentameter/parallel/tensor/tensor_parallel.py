"""Tensor parallelism in one dimension: several ranks shard each matrix in the model.

After Megatron-LM (Shoeybi et al. 2019) and, for `sequence`, Korthikanti et al. 2022. Each
operation's role, which follows from its axes, determines how its module computes; the model's code
stays unchanged. Sharded parameters are DTensors, so that later code can shard them again, save or
count them; modules compute with their local shards, and `tensor_products.py` communicates.

Shapes: B batch rows, T tokens, D d_model, V padded vocabulary, n ranks along `tensor`; t is T / n
with `sequence`, else T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss, chunked_loss_sum
from pentameter.model.matmul import matmul_dtype
from pentameter.parallel.gradients import local
from pentameter.parallel.linear import Forward, adapted, install_styles, slice_operations
from pentameter.parallel.mesh import name_of
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.tensor.collectives import all_reduce_tensor, gathered_columns
from pentameter.parallel.tensor.sharded_norm import sharded_norm
from pentameter.parallel.tensor.tensor_products import (
    Order,
    gather_stream,
    read_stream,
    sum_stream,
)
from pentameter.planning.architecture import Operation, Role
from pentameter.planning.plan import Plan

Style = Callable[["TensorParallelContext", Any, Operation], Forward]
"""Returns the sharded forward for an operation's module, given the context."""


@dataclass(frozen=True)
class TensorParallelContext:
    """This rank among those along `tensor`, the plan, and what it computes in."""

    plan: Plan
    arithmetic: Arithmetic
    rank: int
    size: int
    group_name: str

    @staticmethod
    def of(plan: Plan, arithmetic: Arithmetic, mesh: DeviceMesh) -> TensorParallelContext:
        """Build the context for this rank in `mesh`, whose only dimension is `tensor`."""
        rank, group_name = mesh.get_local_rank(), name_of(mesh.get_group())
        return TensorParallelContext(plan, arithmetic, rank, mesh.size(), group_name)

    def tokens(self, *, by_time: bool = False) -> tuple[Order, str]:
        """Return the order of all-gathered tokens, and the group to gather over, by name. Modules
        that treat each token independently take tokens in the order messages arrive, unless
        `by_time`."""
        if not self.plan.layout.sequence:
            return "whole", self.group_name
        return ("by_time" if by_time else "by_process"), self.group_name

    def reorder(self, tokens: Tensor) -> Tensor:
        """Return ids (B, T) in the order that `tokens()` says: unchanged, or (n · B, T / n)."""
        if not self.plan.layout.sequence:
            return tokens
        return tokens.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)

    def local_rows(self, linear: nn.Linear) -> list[Tensor]:
        """Return the local matrix rows (N, D), and the bias (N,) if any, that this rank uses in a
        column-parallel linear. If there are fewer key and value heads than ranks, their matrices
        are replicated, and a rank uses the rows for its own queries' head."""
        found = [local(each) for each in (linear.weight, linear.bias) if each is not None]
        n_copies = self.plan.sharding.kv_copies
        if isinstance(linear.weight, DTensor) or n_copies == 1:
            return found
        n_shards = self.size // n_copies
        return [each.chunk(n_shards)[self.rank * n_shards // self.size] for each in found]


def parallelize_tensor(model: GPT, mesh: DeviceMesh, plan: Plan, arithmetic: Arithmetic) -> None:
    """Have the model compute with matrices sharded over `mesh`, whose only dimension is `tensor`,
    in place. With `sequence` the residual stream between them is sharded along the sequence,
    (B, T / n, D)."""
    context = TensorParallelContext.of(plan, arithmetic, mesh)
    install_styles(model, STYLES, _head_loss, context)
    for op in slice_operations(model):
        if op.role == "column_parallel":
            sub_layer: Any = model.get_submodule(op.name.rpartition(".")[0])
            sub_layer.read = _matmuls(context, by_time=_mixes_tokens(op))
    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.head_offset = context.rank * (model.config.n_heads // context.size)
    if plan.layout.sequence:
        model.stream_positions = partial(_local_positions, context.rank, context.size)


def _mixes_tokens(op: Operation) -> bool:
    """Return whether the matrix belongs to attention, which needs a sequence's tokens in order."""
    return bool({op.contracts, op.result.axes[1]} & {"heads", "kv_heads"})


def _local_positions(rank: int, n_ranks: int, positions: Tensor) -> Tensor:
    """Return this rank's positions (T / n,) in the residual stream, out of all (T,)."""
    return positions.chunk(n_ranks)[rank]


# -- linears --------------------------------------------------------------------------------------


def _matmuls(context: TensorParallelContext, *, by_time: bool) -> Callable[..., list[Tensor]]:
    """Return a function that all-gathers the residual stream (B, t, D) once, and multiplies it with
    a sub-layer's column-parallel matrices: (…, N / n) for all tokens and each matrix."""
    plan, tokens = context.plan, context.tokens(by_time=by_time)
    as_one_operation = plan.rules.reads_at_once(plan.config.lora)

    def read(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        """Return x · weightᵀ + bias, (…, N / n) for all tokens, for each linear, given x
        (B, t, D)."""
        dtype = matmul_dtype(x)
        if not as_one_operation:
            gathered = gather_stream(x, dtype, *tokens)
            return [linear(gathered) for linear in linears]
        shards = [[each.to(dtype) for each in context.local_rows(linear)] for linear in linears]
        weights = [weight for weight, *_ in shards]
        biases = [bias for _, *rest in shards for bias in rest]
        return read_stream(x.to(dtype), weights, biases, *tokens, context.arithmetic.precision)

    return read


def _column_parallel(context: TensorParallelContext, linear: nn.Linear, op: Operation) -> Forward:
    """Column-parallel linear: x (…, D) for all tokens → this rank's columns (…, N / n)."""
    matmul = context.arithmetic.matmul

    def forward(x: Tensor) -> Tensor:
        return adapted(matmul, linear, x, matmul.linear(x, *context.local_rows(linear)))

    return forward


def _row_parallel(context: TensorParallelContext, linear: nn.Linear, op: Operation) -> Forward:
    """Row-parallel linear: x (…, K / n) for all tokens → partial sums (…, D), which are summed over
    the ranks; each then adds the bias to its tokens: (B, t, D)."""
    matmul, tokens = context.arithmetic.matmul, context.tokens(by_time=_mixes_tokens(op))

    def forward(x: Tensor) -> Tensor:
        y = adapted(matmul, linear, x, matmul.linear(x, local(linear.weight)))
        y = sum_stream(y, *tokens)
        bias: Tensor | None = linear.bias
        return y if bias is None else y + bias.to(y.dtype)

    return forward


# -- norms and embeddings -------------------------------------------------------------------------


def _head_norm(context: TensorParallelContext, norm: nn.RMSNorm, op: Operation) -> Forward:
    """RMSNorm for queries or keys (…, C). A rank has all channels in its heads, so a norm per head
    is local; a norm over all heads' channels communicates."""
    per_head = context.plan.config.model.qk_norm == "head"
    eps = norm.eps
    assert eps is not None

    def forward(x: Tensor) -> Tensor:
        weight = local(norm.weight)
        if per_head:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        y, _ = sharded_norm(x, weight, None, eps, False, context.group_name)
        return y

    return forward


def _token_embedding(context: TensorParallelContext, table: nn.Embedding, op: Operation) -> Forward:
    """Vocabulary-parallel embedding: look up ids in this rank's range, zeros elsewhere, then sum
    over the ranks. (B, T) → (B, t, D)."""
    first = context.rank * -(-table.num_embeddings // context.size)

    def forward(tokens: Tensor) -> Tensor:
        weight, rows = local(table.weight), context.reorder(tokens) - first
        in_range = (rows >= 0) & (rows < len(weight))
        embedded = F.embedding(torch.where(in_range, rows, 0), weight)
        return sum_stream(torch.where(in_range[..., None], embedded, 0.0), *context.tokens())

    return forward


# -- the head and its loss ------------------------------------------------------------------------


def _head(context: TensorParallelContext, head: Any, op: Operation) -> Forward:
    """Output head: x (B, t, D) → full logits (B, T, V), for inspection: no gradient flows through
    them."""
    matmul = context.arithmetic.matmul

    def forward(x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = head.weight if weight is None else weight
        gathered = gather_stream(x, matmul_dtype(x), *context.tokens(by_time=True))
        bias = None if head.bias is None else local(head.bias)
        columns = matmul.linear(gathered, local(weight), bias)
        V = len(weight)
        return gathered_columns(columns, -(-V // context.size), V, context.group_name)

    return forward


def _head_loss(context: TensorParallelContext, loss: HeadLoss) -> Forward:
    """Vocabulary-parallel loss: each rank computes it whole, from its columns of the logits."""

    # Compiled, ranks on one machine would load each other's code from a cache whose key has the
    # full weight's sizes only.
    @torch.compiler.disable
    def shards(
        x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return x (…, D) and targets for all tokens, this rank's rows (V / n, D) of the weight and
        (V / n,) of the bias."""
        gathered = gather_stream(x, matmul_dtype(x), *context.tokens())
        local_bias = None if bias is None else local(bias)
        return gathered, local(weight), local_bias, context.reorder(targets)

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        widest = -(-len(weight) // context.size)
        return chunked_loss_sum(
            *shards(x, weight, bias, targets),
            loss.vocab_size,
            softcap=loss.softcap,
            first_column=context.rank * widest,
            widest=widest,
            reduce=partial(all_reduce_tensor, context.group_name),
            matmul=context.arithmetic.matmul,
        )

    return forward


STYLES: Mapping[Role, Style] = {
    "token_embedding": _token_embedding,
    "head_norm": _head_norm,
    "column_parallel": _column_parallel,
    "row_parallel": _row_parallel,
    "head": _head,
}
"""Role → style; residual norms and position embeddings are replicated on every rank."""
