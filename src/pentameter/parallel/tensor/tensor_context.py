"""The tensor modes' common base: this rank's part in tensor parallelism, and the modules that sum
over sharded heads or vocabulary in the same way in one dimension and in a grid.

Shapes: B batch rows, T tokens, D residual channels, V padded vocabulary; "local" is this rank's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.compiled import uncompiled
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss, chunked_loss_sum
from pentameter.model.matmul import Matmul
from pentameter.parallel.gradients import local
from pentameter.parallel.linear import Forward
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.tensor.collectives import all_reduce_tensor, gathered_columns
from pentameter.parallel.tensor.sharded_norm import sharded_norm
from pentameter.planning.architecture import Operation, Role
from pentameter.planning.gpt import operations
from pentameter.planning.layouts.sharding import Sharding

Style = Callable[[Any, Any, Operation], Forward]
"""Returns the forward that replaces a module's own, on local shards, given the TensorContext, the
module and its Operation in the plan."""


class TensorContext(ABC):
    """Base class for a tensor-parallel mode on one rank: how the model is sharded, the rank's
    coordinates and groups, the run's dtypes and matmul, and the forward of each kind of module on
    this rank's shards. Each subclass is one mode."""

    styles: Mapping[Role, Style]
    """Maps an operation's role (`column_parallel`, `norm`, …) to its Style; modules with other
    roles keep their own forward."""
    columns: str
    """The mesh dimension that shards heads, feed-forward width and vocabulary between two
    matmuls."""
    columns_group: str
    """Name of the process group along `columns`."""

    def __init__(self, sharding: Sharding, arithmetic: Arithmetic, mesh: Mesh) -> None:
        self.sharding = sharding
        self.layout = sharding.layout
        self.arithmetic = arithmetic
        self.coordinates = mesh.coordinates

    def forwards(self, model: GPT) -> dict[nn.Module, Forward]:
        """Return a module → forward mapping for a slice: forwards that compute on local shards, for
        the modules whose operation has a role in `styles`, and for the head's loss. They are not
        installed; `install_forwards` does that.

        The slice is changed in place all the same: `prepare` sets attributes that depend on this
        rank's shards, such as its first head's number.
        """
        run = operations(model.config, range(*model.layers))
        self.prepare(model, run)
        found: dict[nn.Module, Forward] = {}
        for op in run:
            if op.role is not None and op.role in self.styles:
                module = model.get_submodule(op.name)
                found[module] = self.styles[op.role](self, module, op)
        if model.is_last:
            found[model.head_loss] = head_loss(self, model.head_loss)
        return found

    @abstractmethod
    def prepare(self, model: GPT, run: Sequence[Operation]) -> None:
        """Set attributes of `model`, this rank's slice of the network, that depend on this rank's
        shards, in place; for example the whole model's number of its first head. `run` lists the
        operations that the slice computes, in order."""

    def widest(self, n: int) -> int:
        """Return the size of the largest shard, over all ranks, when n vocabulary rows or channels
        are sharded along the mesh dimension `columns`."""
        return self.sharding.local_shape((n,), ("vocab",))[0]

    @abstractmethod
    def vector(self, vector: Tensor | None) -> Tensor | None:
        """Return this rank's elements of a vector (N,), such as a bias, that belongs to the outputs
        of a column-parallel matrix. `vector` is the full DTensor; for None, return None. Collective
        in mode 3d."""

    @abstractmethod
    def columns_matmul(self, weight: Tensor) -> Matmul | Any:
        """Return the matmul that maps this rank's inputs to its output columns, for a
        column-parallel weight (N, D). It communicates in a grid, and does not in one dimension."""

    @abstractmethod
    def head_input(self, x: Tensor) -> Tensor:
        """Return the input of the output head, in the dtype of matmuls and with tokens in the order
        of the sequence, given this rank's shard of the residual stream, x (B, T, D)."""

    @abstractmethod
    def loss_inputs(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x, targets) for the tokens whose logits this rank computes, x (…, D) and targets
        (…,) in the same token order, given the local residual stream x (B, T, D) and targets
        (B, T)."""


def head_norm(context: TensorContext, norm: nn.RMSNorm, op: Operation) -> Forward:
    """Return the forward of an RMSNorm for queries or keys (…, C), where C is the channels of one
    head or of all this rank's heads. A norm of each head is local. One over all heads' channels,
    whose weight is a DTensor, is collective. `op` is not read."""
    eps = norm.eps
    assert eps is not None
    over_all_heads = isinstance(norm.weight, DTensor)

    def forward(x: Tensor) -> Tensor:
        if not over_all_heads:
            return F.rms_norm(x, x.shape[-1:], norm.weight, eps)
        weight = context.vector(norm.weight)
        assert weight is not None
        y, _ = sharded_norm(x, weight, None, eps, False, context.columns_group)
        return y

    return forward


def looked_up(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows (…, D) at indices `ids` (…,) in a table `weight` (V, D), zeros for ids
    outside it."""
    in_range = (ids >= 0) & (ids < len(weight))
    embedded = F.embedding(torch.where(in_range, ids, 0), weight)
    return torch.where(in_range[..., None], embedded, 0.0)


def head(context: TensorContext, module: Any, op: Operation) -> Forward:
    """Return the output head's forward: local residual stream (B, T, D) → full logits (B, T, V) on
    every rank, for inspection: no gradient flows through them. The forward is collective; `op` is
    not read."""

    def forward(x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = module.weight if weight is None else weight
        assert isinstance(weight, Tensor)
        inputs, bias = context.head_input(x), context.vector(module.bias)
        columns = context.columns_matmul(weight).linear(inputs, local(weight), bias)
        V = len(weight)
        return gathered_columns(columns, context.widest(V), V, context.columns_group)

    return forward


def head_loss(context: TensorContext, loss: HeadLoss) -> Forward:
    """Return the forward of the vocabulary-parallel loss: (x, weight, bias, targets) → summed loss
    in nats, 0-dim, on every rank, while each computes its own columns of the logits. The forward is
    collective; `loss` gives the vocabulary's size and the softcap."""

    # Compiled, ranks on one machine would load each other's code from a cache whose key has the
    # full weight's sizes only.
    @uncompiled
    def shards(
        x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return x (…, D) and targets (…,) for the tokens whose logits this rank computes, and its
        shards of the weight (V, D) and the bias (V,)."""
        inputs, local_targets = context.loss_inputs(x, targets)
        return inputs, local(weight), context.vector(bias), local_targets

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        widest = context.widest(len(weight))
        return chunked_loss_sum(
            *shards(x, weight, bias, targets),
            loss.vocab_size,
            softcap=loss.softcap,
            first_column=context.coordinates[context.columns] * widest,
            widest=widest,
            reduce=partial(all_reduce_tensor, context.columns_group),
            matmul=context.columns_matmul(weight),
        )

    return forward
