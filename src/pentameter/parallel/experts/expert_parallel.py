"""Expert parallelism: ranks hold different experts, or shards of an expert's matrices, and tokens
travel to them.

A rank sends each token's row for an expert to every rank that has a shard of that expert (one,
without `expert_tensor`), by one all-to-all among the ranks that together hold every expert once.
Results come back the same way, and their partial sums are added in rank order. How many rows each
rank sends and receives follows from the routing, may be none, and is exchanged first; every rank
takes part in every exchange. While rows are under way to their experts, and their gradients back,
a rank computes its shared experts. Ranks that hold the same tokens (tensor parallelism without
`sequence`) each take a shard of them, and all-gather the outputs.

The exchanges are custom operations, so that recomputation can keep their results. The model's code
stays unchanged.

Shapes: N tokens, D d_model; E experts, e of them on a rank; R rows that a rank sends, S rows that
it receives; n ranks in the exchange, m of which hold shards of the same experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.model.compiled import uncompiled
from pentameter.model.experts import (
    Compute,
    Exchange,
    Experts,
    GroupedLinear,
    RestoredRows,
    Routing,
    SortedRows,
    Tokens,
)
from pentameter.model.grouped_matmul import Groups
from pentameter.model.matmul import Matmul, matmul_dtype
from pentameter.parallel.gradients import local
from pentameter.parallel.linear import Forward
from pentameter.parallel.mesh import Mesh, group_named
from pentameter.parallel.tensor.collectives import gathered_shards
from pentameter.parallel.waits import finish
from pentameter.planning.layouts.sharding import shard_size


def parallelize_experts(model: nn.Module, mesh: Mesh, matmul: Matmul) -> dict[nn.Module, Forward]:
    """Have the experts in `model` exchange rows with other ranks, in place. Returns a forward for
    each expert's linear, which computes with this rank's shards of the matrices, which are
    DTensors; `install_forwards` puts them in."""
    layout = mesh.layout
    adds_bias = layout.parameter_coordinates(mesh.world.rank)["expert_tensor"] == 0
    forwards: dict[nn.Module, Forward] = {}
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        module.exchange = ExpertExchange(mesh.group_name("expert"), layout.expert_tensor)
        if layout.tensor > 1 and not layout.sequence:
            rank, group = mesh.coordinates["tensor"], mesh.group_name("tensor")
            module.tokens = TokenShards(rank, layout.tensor, group)
        for linear in (module.gate, module.up, module.down):
            if linear is not None:
                adds = adds_bias or linear is not module.down
                forwards[linear] = partial(_on_shards, matmul, linear, adds)
    return forwards


def _on_shards(
    matmul: Matmul, linear: GroupedLinear, adds_bias: bool, x: Tensor, groups: Groups
) -> Tensor:
    """Multiply rows by the experts' matrices, of which this rank has shards: return (S, outputs)
    for rows x (S, inputs) sorted by expert, where `groups` says which rows belong to which expert.

    adds_bias: True to add the bias. Where the outputs of several ranks are summed, only one of them
        does; on the others the bias is multiplied by 0, so that it still gets a gradient, of 0.
    """
    bias = None if linear.bias is None else local(linear.bias)
    if bias is not None and not adds_bias:
        bias = bias * 0
    return matmul.grouped_linear(x, local(linear.weight), bias, groups)


@dataclass
class ExpertExchange(Exchange):
    """The Exchange for experts that are sharded over ranks: it sends each row to the ranks that
    hold its expert, and sends the outputs back. `group_name` names the group of ranks that exchange
    rows; in it, every `n_shards` adjacent ranks hold shards of the same experts. `sent_bytes`
    counts as in Exchange. Methods are collective."""

    group_name: str
    n_shards: int
    sent_bytes: int = 0

    @uncompiled
    def dispatch(self, rows: Tensor, ends: Tensor) -> _Dispatched:
        """Start to send rows (R, D), in the matmul dtype, to their experts' ranks; return the
        exchange under way, for `outputs`. The rows are sorted by expert, and `ends` (E,) is the
        index after each expert's last. Collective; the host waits for the numbers of rows."""
        received, own_ends, n_sent, n_received = self.counted(len(rows), ends)
        leaving = self._for_each_shard(rows.to(matmul_dtype(rows)), n_sent)
        there = Transfer(n_sent, n_received, self.group_name)
        arriving, has_gradient = there.start(leaving), rows.requires_grad
        return _Dispatched(arriving, there, received, own_ends, len(rows), has_gradient)

    @uncompiled
    def outputs(self, compute: Compute, dispatched: _Dispatched) -> Tensor:
        """Return the outputs (R, D) of all experts for the rows that were `dispatched`; 0 for rows
        behind the last expert's. `compute` applies this rank's experts. Collective."""
        there = dispatched.there
        arrived = there.finish(dispatched.arriving)
        outputs = self._by_expert(compute, arrived, dispatched.received, dispatched.ends)
        back = Transfer(there.n_received, there.n_sent, self.group_name)
        returned = back.finish(back.start(outputs))
        if returned.requires_grad:  # counted by the backward pass, once where recomputed
            own = group_named(self.group_name).rank()
            n_others = sum(n for each in (there.n_sent, there.n_received) for n in each)
            n_others -= there.n_sent[own] + there.n_received[own]
            n_bytes = n_others * returned.shape[1] * arrived.itemsize
            returned.register_hook(partial(self._count, n_bytes * (1 + dispatched.has_gradient)))
        total = self._summed(returned, there.n_sent)
        return F.pad(total, (0, 0, 0, dispatched.n_rows - len(total)))

    def counted(self, n_rows: int, ends: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Exchange the numbers of rows that each rank will send. Returns (received, own_ends,
        n_sent, n_received): the rows that this rank will receive from each rank for each of its
        experts, int64 (n, e); the index after each of these experts' last row, once sorted, int64
        (e,), on the CPU; and how many it will send to and receive from each rank. This rank has
        `n_rows` rows sorted by expert; `ends` (E,) is the index after each expert's last.
        Collective; the host waits for the numbers, once."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        sent = counts.unflatten(0, (self.n_ranks // self.n_shards, -1))
        sent = sent.repeat_interleave(self.n_shards, 0)  # (n, e)
        received = exchange_counts(sent, self.group_name)
        on_host = torch.cat((sent.sum(1), received.flatten())).cpu()  # the host waits
        n_sent, there = on_host[: self.n_ranks], on_host[self.n_ranks :].view_as(received)
        own_ends = there.sum(0).cumsum(0)
        return received, own_ends, n_sent.tolist(), there.sum(1).tolist()

    def _count(self, n_bytes: int, _: Tensor) -> None:
        """Tensor hook, called when the tensor's gradient is known: add `n_bytes` to
        `sent_bytes`."""
        self.sent_bytes += n_bytes

    @property
    def n_ranks(self) -> int:
        """Ranks that exchange rows, n."""
        return group_named(self.group_name).size()

    def _for_each_shard(self, rows: Tensor, n_sent: Sequence[int]) -> Tensor:
        """Return rows (R, D) as they are sent: each expert's rows once for every rank that has a
        shard of it. Rows behind the last expert's are left out."""
        n_once = n_sent[:: self.n_shards]
        *blocks, _ = rows.split([*n_once, len(rows) - sum(n_once)])
        if self.n_shards == 1:
            return rows[: sum(n_once)]
        return torch.cat([block for block in blocks for _ in range(self.n_shards)])

    def _summed(self, returned: Tensor, n_sent: Sequence[int]) -> Tensor:
        """Return the outputs (R, D) of this rank's rows, from what other ranks have `returned`:
        several blocks for the same rows if an expert's matrices are sharded, which are added in
        rank order, in float32 at least. `n_sent` is the number of rows that went to each rank."""
        if self.n_shards == 1:
            return returned
        precise = torch.promote_types(returned.dtype, torch.float32)
        blocks = returned.split(list(n_sent))
        groups = (blocks[i : i + self.n_shards] for i in range(0, len(blocks), self.n_shards))
        sums = [torch.stack(group).sum(0, dtype=precise) for group in groups]
        return torch.cat(sums).to(returned.dtype)

    def _by_expert(self, compute: Compute, arrived: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs (S, D) for rows (S, D) in the order in which they arrived: by sending
        rank, then by expert. `compute` gets them sorted by expert. `counts` (n, e) says how many
        rows each rank sent for each expert; `ends` (e,), on the CPU, is the index after each
        expert's last of the sorted rows."""
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
        order = expert.repeat_interleave(counts.flatten(), output_size=len(arrived))
        order = order.argsort(stable=True)
        outputs = compute(SortedRows.apply(arrived, order, 1), ends)
        restored: Tensor = RestoredRows.apply(outputs, order)
        return restored


class _Dispatched(NamedTuple):
    """An exchange of rows under way: the rows that arrive, and what `ExpertExchange.outputs` needs
    to send outputs back."""

    arriving: Tensor
    """The rows sent to this rank (S, D), complete once `there` is finished."""
    there: Transfer
    received: Tensor
    """Numbers of rows from each rank for each expert here, int64 (n, e)."""
    ends: Tensor
    """The index after each expert's last of these rows, once sorted by expert: int64 (e,), on the
    CPU."""
    n_rows: int
    """Rows that this rank had for experts, including those for which no expert has room."""
    has_gradient: bool
    """Whether the rows get a gradient."""


# -- tokens that other ranks have, too ------------------------------------------------------------


@dataclass(frozen=True)
class TokenShards(Tokens):
    """The Tokens for n ranks that hold the same tokens, in the group of this name: each rank takes
    its shard of the tokens through the experts, and the outputs are all-gathered. `rank` is this
    one's number in the group."""

    rank: int
    n: int
    group_name: str

    @uncompiled
    def shard(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Return this rank's shard of tokens (N, D) and of their Routing. Collective in the
        backward pass."""
        own = routing._replace(
            experts=self.shard_of(routing.experts),
            weights=_Shard.apply(routing.weights, self),
        )
        return _Shard.apply(x, self), own

    @uncompiled
    def gather(self, y: Tensor, n_tokens: int) -> Tensor:
        """Return the outputs of all N = `n_tokens` tokens, (N, D), all-gathered from the ranks,
        given this rank's outputs y of its own shard of the tokens. Collective."""
        whole: Tensor = _Gather.apply(y, self, n_tokens)
        return whole

    def shard_of(self, whole: Tensor) -> Tensor:
        """Return this rank's shard (…, D) of a tensor (N, D); the last may be smaller or empty."""
        size = shard_size(len(whole), self.n, 0)
        return whole[self.rank * size : (self.rank + 1) * size]

    def gathered(self, shard: Tensor, n_rows: int) -> Tensor:
        """All-gather shards into a tensor (n_rows, D). Collective."""
        return gather_tokens(shard, shard_size(n_rows, self.n, 0), n_rows, self.group_name)


class _Shard(Function):
    """Autograd function: this rank's shard of a tensor that all ranks of a group hold alike. The
    gradients of the shards are all-gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shards: TokenShards) -> Tensor:
        """Take this rank's shard of `whole` (N, D), which every rank of the group holds; `shards`
        says which one that is."""
        ctx.shards, ctx.n_rows = shards, len(whole)
        return shards.shard_of(whole).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """All-gather the gradients g of all ranks' shards into the gradient (N, D) of the whole
        tensor. Collective."""
        return ctx.shards.gathered(g.contiguous(), ctx.n_rows), None


class _Gather(Function):
    """Autograd function: all ranks' shards, all-gathered into one tensor. Its gradient is the same
    on all ranks, and each takes its shard of it."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shards: TokenShards, n_rows: int) -> Tensor:
        """All-gather the shards of all ranks into one tensor (N, D), N = n_rows. `shards` knows the
        group. Collective."""
        ctx.shards = shards
        return shards.gathered(shard, n_rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's shard of the gradient g (N, D), which is the same on all ranks."""
        return ctx.shards.shard_of(g).contiguous(), None, None


# -- collectives ----------------------------------------------------------------------------------


def counts_exchanged(sent: Tensor, group_name: str) -> Tensor:
    """Exchange row counts, int64 (n, e), over the named group: row i of the result is what rank i
    sent to this one. Collective."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group_named(group_name))
    return received


def start_rows(
    rows: Tensor, sent: list[int], received: list[int], group_name: str, number: int
) -> Tensor:
    """Start to exchange rows (R, D) over the named group: `sent[i]` of them, in order, go to rank
    i. Returns the tensor (S, D) in which rows arrive, `received[i]` of them from rank i. It must
    not be read before the Transfer with this `number` has been waited for. Collective, also for a
    rank without rows."""
    result = rows.new_empty((sum(received), rows.shape[1]))
    group = group_named(group_name)
    work = dist.all_to_all_single(
        result, rows.contiguous(), received, sent, group=group, async_op=True
    )
    _transfers[number].work = work
    return result


exchange_counts = torch.library.custom_op(
    "pentameter::exchange_counts", counts_exchanged, mutates_args=()
)
exchange_rows = torch.library.custom_op("pentameter::exchange_rows", start_rows, mutates_args=())
gather_tokens = torch.library.custom_op(
    "pentameter::gather_tokens", gathered_shards, mutates_args=()
)
"""`gathered_shards` as another operation, whose results recomputation keeps."""


@exchange_rows.register_fake
def _(rows: Tensor, sent: list[int], received: list[int], group_name: str, number: int) -> Tensor:
    return rows.new_empty((sum(received), rows.shape[1]))


@gather_tokens.register_fake
def _(shard: Tensor, shard_size: int, n_rows: int, group_name: str) -> Tensor:
    return shard.new_empty((n_rows, *shard.shape[1:]))


# -- an exchange of rows that overlaps with compute ------------------------------------------------


class Transfer:
    """An exchange of rows over the named group, overlapped with computing: rank i gets `n_sent[i]`
    rows from this rank, and this rank `n_received[i]` from it. Call `start`, compute something
    else, then call `finish`. The backward pass exchanges the gradients in the other direction,
    overlapped with the gradients of that other computation.

    With recomputation the second forward pass may reuse kept results and start no exchange; `wait`
    then returns at once.
    """

    def __init__(self, n_sent: list[int], n_received: list[int], group_name: str) -> None:
        self.n_sent, self.n_received, self.group_name = n_sent, n_received, group_name
        self.work: dist.Work | None = None
        """The exchange that is under way, in either direction."""
        self.gradients: Tensor | None = None
        """The tensor (R, D) in which gradients arrive, in the backward pass."""
        self._number = next(_numbers)
        _transfers[self._number] = self

    def start(self, rows: Tensor) -> Tensor:
        """Start to send rows (R, D). Return the tensor (S, D) in which rows arrive, for `finish`.
        Collective."""
        arriving: Tensor = _Start.apply(rows, self)
        return arriving

    def finish(self, arriving: Tensor) -> Tensor:
        """Wait until the rows from other ranks have arrived in `arriving` (S, D), the result of
        `start`, and return them."""
        arrived: Tensor = _Finish.apply(arriving, self)
        return arrived

    def send(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Start to send rows (R, D) or, if `back`, gradients (S, D) the other way, outside of
        autograd. Returns the tensor in which the others' arrive."""
        sizes = (self.n_received, self.n_sent) if back else (self.n_sent, self.n_received)
        return exchange_rows(rows, *sizes, self.group_name, self._number)

    def wait(self) -> None:
        """Wait until the exchange of rows between ranks is done, if one is under way."""
        work, self.work = self.work, None
        if work is not None:
            finish(work, "all-to-all", group_named(self.group_name))


_transfers: WeakValueDictionary[int, Transfer] = WeakValueDictionary()
"""Maps a Transfer's number to it. A custom operation takes numbers, but no objects."""
_numbers = itertools.count()


class _Start(Function):
    """Autograd function that starts a Transfer; its backward pass waits for the gradients that the
    backward pass of `_Finish` has started to send."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        """Start to send the rows (R, D) to other ranks. Return the tensor (S, D) in which the rows
        from other ranks arrive; it must not be read before `_Finish`."""
        ctx.transfer = transfer
        return transfer.send(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        """Wait for the gradients (R, D) of the rows, and return them."""
        ctx.transfer.wait()
        gradients, ctx.transfer.gradients = ctx.transfer.gradients, None
        return gradients, None


class _Finish(Function):
    """Autograd function that waits for a Transfer; its backward pass starts to send the gradients
    back."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, transfer: Transfer) -> Tensor:
        """Wait for the rows from other ranks, and return them: `arriving` (S, D), the tensor that
        `_Start` returned, now complete."""
        ctx.transfer = transfer
        transfer.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """Start to send the gradients g (S, D) back. The result is g itself, whose values nobody
        reads: it only makes the backward pass go on to `_Start`."""
        ctx.transfer.gradients = ctx.transfer.send(g, back=True)
        return g, None
