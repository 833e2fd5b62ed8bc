"""Expert parallelism: ranks hold different experts, or shards of an expert's matrices, and tokens
travel to them.

A rank sends each token's row for an expert to every rank that has a shard of that expert (one,
without `expert_tensor`), by one all-to-all among the ranks that together hold every expert once.
Results come back the same way, and their partial sums are added in rank order. How many rows each
rank sends and receives follows from the routing, may be none, and is exchanged first; every rank
takes part in every exchange. Ranks that hold the same tokens (tensor parallelism without
`sequence`) each take a shard of them, and all-gather the outputs.

The exchanges are custom operations, so that recomputation can keep their results. The model's code
stays unchanged.

Shapes: N tokens, D d_model; E experts, e of them on a rank; R rows that a rank sends, S rows that
it receives; n ranks in the exchange, m of which hold shards of the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from pentameter.model.experts import (
    Compute,
    Experts,
    GroupedLinear,
    Mix,
    RestoredRows,
    Routing,
    SortedRows,
)
from pentameter.model.matmul import Matmul, matmul_dtype
from pentameter.parallel.gradients import local
from pentameter.parallel.linear import Forward
from pentameter.parallel.mesh import Mesh, group_named
from pentameter.parallel.tensor.collectives import gathered_shards
from pentameter.planning.sharding import shard_size


def parallelize_experts(model: nn.Module, mesh: Mesh, matmul: Matmul) -> dict[nn.Module, Forward]:
    """Have the experts in `model` exchange rows with other ranks, in place, and return the forwards
    with which each expert's matrices compute on this rank's shards, which are DTensors."""
    layout = mesh.layout
    adds_bias = layout.parameter_coordinates(mesh.world.rank)["expert_tensor"] == 0
    forwards: dict[nn.Module, Forward] = {}
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        module.exchange = Exchange(mesh.group_name("expert"), layout.expert_tensor)
        if layout.tensor > 1 and not layout.sequence:
            rank, group = mesh.coordinates["tensor"], mesh.group_name("tensor")
            module.shard_tokens = TokenShards(rank, layout.tensor, group)
        for linear in (module.gate, module.up, module.down):
            if linear is not None:
                adds = adds_bias or linear is not module.down
                forwards[linear] = partial(_on_shards, matmul, linear, adds)
    return forwards


def _on_shards(
    matmul: Matmul, linear: GroupedLinear, adds_bias: bool, x: Tensor, ends: Tensor
) -> Tensor:
    """Return (S, outputs) for rows x (S, inputs), by this rank's shards of the experts' matrices.
    Of the ranks whose results are added, one `adds_bias`; the others' biases get a gradient of 0.
    """
    bias = None if linear.bias is None else local(linear.bias)
    if bias is not None and not adds_bias:
        bias = bias * 0
    return matmul.grouped_linear(x, local(linear.weight), bias, ends)


@dataclass
class Exchange:
    """Brings rows to the ranks that hold their experts, and the outputs back. Collective over the
    named group, in which `n_shards` neighbours hold shards of the same experts."""

    group_name: str
    n_shards: int
    sent_bytes: int = 0
    """Bytes of rows, outputs and their gradients that this rank has sent to others in passes whose
    backward pass is done; whoever reads it sets it back."""

    @torch.compiler.disable
    def __call__(self, compute: Compute, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs (R, D) of all experts for rows (R, D) sorted by expert, which end at
        `ends` (E,); 0 for rows behind the last. `compute` applies this rank's experts. Rows are
        sent in the matmul dtype."""
        received, n_sent, n_received = self.counted(len(rows), ends)
        leaving = self._for_each_shard(rows.to(matmul_dtype(rows)), n_sent)
        arrived = exchange_rows(leaving, n_sent, n_received, self.group_name)
        outputs = self._by_expert(compute, arrived, received)
        returned = exchange_rows(outputs, n_received, n_sent, self.group_name)
        if returned.requires_grad:  # counted by the backward pass, once where recomputed
            own = group_named(self.group_name).rank()
            n_others = sum(n_sent) - n_sent[own] + sum(n_received) - n_received[own]
            n_bytes = n_others * rows.shape[1] * leaving.itemsize
            returned.register_hook(partial(self._count, n_bytes * (1 + rows.requires_grad)))
        total = self._summed(returned, n_sent)
        return F.pad(total, (0, 0, 0, len(rows) - len(total)))

    def counted(self, n_rows: int, ends: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return the rows that this rank receives, int64 (n, e), from each rank for each expert
        here; how many it sends to each rank; and how many it receives from each. It has `n_rows`,
        sorted by expert, which end at `ends` (E,). Collective; the host waits for the numbers."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        sent = counts.unflatten(0, (self.n_ranks // self.n_shards, -1))
        sent = sent.repeat_interleave(self.n_shards, 0)  # (n, e)
        received = exchange_counts(sent, self.group_name)
        n_sent, n_received = torch.stack((sent.sum(1), received.sum(1))).tolist()
        return received, n_sent, n_received

    def _count(self, n_bytes: int, _: Tensor) -> None:
        """Add bytes, as the hook of a tensor whose gradient is known."""
        self.sent_bytes += n_bytes

    @property
    def n_ranks(self) -> int:
        """Ranks that exchange rows, n."""
        return group_named(self.group_name).size()

    def _for_each_shard(self, rows: Tensor, n_sent: Sequence[int]) -> Tensor:
        """Return rows (R, D) as they are sent: those for the experts of one rank once for each rank
        that has a shard of these, and none behind the last."""
        n_once = n_sent[:: self.n_shards]
        *blocks, _ = rows.split([*n_once, len(rows) - sum(n_once)])
        if self.n_shards == 1:
            return rows[: sum(n_once)]
        return torch.cat([block for block in blocks for _ in range(self.n_shards)])

    def _summed(self, returned: Tensor, n_sent: Sequence[int]) -> Tensor:
        """Return the outputs (R, D), given those of each shard of the experts' matrices, which are
        added in rank order, in float32 at least."""
        if self.n_shards == 1:
            return returned
        precise = torch.promote_types(returned.dtype, torch.float32)
        blocks = returned.split(list(n_sent))
        groups = (blocks[i : i + self.n_shards] for i in range(0, len(blocks), self.n_shards))
        sums = [torch.stack(group).sum(0, dtype=precise) for group in groups]
        return torch.cat(sums).to(returned.dtype)

    def _by_expert(self, compute: Compute, arrived: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs (S, D) for rows (S, D) in the order in which they arrived: by the rank
        that sent them, then by expert. `counts` (n, e) says how many each rank sent to each."""
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
        order = expert.repeat_interleave(counts.flatten(), output_size=len(arrived))
        order = order.argsort(stable=True)
        outputs = compute(SortedRows.apply(arrived, order, 1), counts.sum(0).cumsum(0))
        restored: Tensor = RestoredRows.apply(outputs, order)
        return restored


# -- tokens that other ranks have, too ------------------------------------------------------------


@dataclass(frozen=True)
class TokenShards:
    """Computes the experts' outputs for a shard of the tokens that `n` ranks of the named group all
    hold, of which this one is number `rank`, and all-gathers them."""

    rank: int
    n: int
    group_name: str

    @torch.compiler.disable
    def __call__(self, mix: Mix, x: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sums (N, D) for tokens x (N, D), on every rank. Collective, and its
        backward pass too."""
        own = replace(
            routing,
            experts=self.shard(routing.experts),
            weights=_Shard.apply(routing.weights, self),
        )
        y: Tensor = _Gather.apply(mix(_Shard.apply(x, self), own), self, len(x))
        return y

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard (…, D) of a tensor (N, D); the last may be smaller or empty."""
        size = shard_size(len(whole), self.n, 0)
        return whole[self.rank * size : (self.rank + 1) * size]

    def gather(self, shard: Tensor, n_rows: int) -> Tensor:
        """All-gather shards into a tensor (n_rows, D). Collective."""
        return gather_tokens(shard, shard_size(n_rows, self.n, 0), n_rows, self.group_name)


class _Shard(Function):
    """This rank's shard of a tensor that all ranks of a group have alike; the gradients of the
    shards are all-gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shards: TokenShards) -> Tensor:
        """Return this rank's shard of `whole` (N, D)."""
        ctx.shards, ctx.n_rows = shards, len(whole)
        return shards.shard(whole).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """All-gather the gradient to (N, D). Collective."""
        return ctx.shards.gather(g.contiguous(), ctx.n_rows), None


class _Gather(Function):
    """All ranks' shards as one tensor; each rank takes its shard of the gradient, which all ranks
    have alike."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shards: TokenShards, n_rows: int) -> Tensor:
        """All-gather the shards to (N, D), N = n_rows. Collective."""
        ctx.shards = shards
        return shards.gather(shard, n_rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's shard of the gradient g (N, D)."""
        return ctx.shards.shard(g).contiguous(), None, None


# -- collectives ----------------------------------------------------------------------------------


def counts_exchanged(sent: Tensor, group_name: str) -> Tensor:
    """Exchange row counts, int64 (n, e), over the named group: row i of the result is what rank i
    sent to this one. Collective."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group_named(group_name))
    return received


def rows_exchanged(rows: Tensor, sent: list[int], received: list[int], group_name: str) -> Tensor:
    """Exchange rows (R, D) over the named group, `sent[i]` of them with rank i, in order: (S, D),
    of which `received[i]` come from rank i. Collective, also for a rank without rows."""
    result = rows.new_empty((sum(received), rows.shape[1]))
    group = group_named(group_name)
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


exchange_counts = torch.library.custom_op(
    "pentameter::exchange_counts", counts_exchanged, mutates_args=()
)
exchange_rows = torch.library.custom_op(
    "pentameter::exchange_rows", rows_exchanged, mutates_args=()
)
gather_tokens = torch.library.custom_op(
    "pentameter::gather_tokens", gathered_shards, mutates_args=()
)
"""`gathered_shards` by a name of its own, whose results recomputation keeps."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.group_name = inputs


def _exchange_back(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    """Backward of an exchange of rows: send the gradients (S, D) back, (R, D)."""
    return exchange_rows(g, ctx.received, ctx.sent, ctx.group_name), None, None, None


exchange_rows.register_autograd(_exchange_back, setup_context=_keep)


@exchange_rows.register_fake
def _(rows: Tensor, sent: list[int], received: list[int], group_name: str) -> Tensor:
    return rows.new_empty((sum(received), rows.shape[1]))


@gather_tokens.register_fake
def _(shard: Tensor, shard_size: int, n_rows: int, group_name: str) -> Tensor:
    return shard.new_empty((n_rows, *shard.shape[1:]))
