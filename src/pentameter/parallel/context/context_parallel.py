"""Context parallelism: ranks that shard each sequence.

Embedding, norms, linears and loss run on each rank's own positions; only attention needs the
others'. Either keys and values travel round a ring (`ring_attention.py`), or an all-to-all gives
each rank the full sequence for some of the heads, in exchange for its part of the sequence for all
heads, and back afterwards (Jacobs et al. 2023, "DeepSpeed Ulysses").

Shapes: B batch rows, H heads, K head size; T tokens in the full sequence, n ranks that shard it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.model.attention.dot_product import ALL_KEYS, DotProductAttention, Weighting
from pentameter.parallel.mesh import group_named
from pentameter.planning.layouts.layout import Layout


def own_positions(layout: Layout, rank: int, positions: Tensor) -> Tensor:
    """Return the positions of the tokens that one rank computes, (T / n,), out of a whole
    sequence's `positions` (T,); n is the number of ranks along `context`, `rank` this rank's
    coordinate there."""
    chunks = layout.positions(rank, len(positions))
    return torch.cat([positions[chunk.start : chunk.stop] for chunk in chunks])


class HeadsAttention(DotProductAttention):
    """Causal attention for context parallelism in all-to-all mode, a DotProductAttention. The n
    ranks of a group exchange tokens for heads, so that each computes H / n heads over full
    sequences. `rank` is this rank's number in the group, and `alone` the attention that it computes
    for its heads, without communication."""

    equal_widths = True

    def __init__(self, group: dist.ProcessGroup, rank: int, alone: DotProductAttention) -> None:
        self._group_name, self._n_ranks = group.group_name, group.size()
        self._rank, self._alone = rank, alone

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting = ALL_KEYS) -> Tensor:
        """Attend from q (B, H, T / n, K) to k and v (B, H or fewer, T / n, K). Returns
        (B, H, T / n, K). Collective."""
        size, n_heads = q.shape[-1], q.shape[1] // self._n_ranks
        sinks, dropout, first = how.sinks, how.dropout, self._rank * n_heads
        if sinks is not None:
            sinks = sinks.narrow(0, first, n_heads)
        if dropout is not None:
            dropout = dropout._replace(first_head=dropout.first_head + first)
        if q.shape == k.shape:
            together = exchange(torch.cat((q, k, v), dim=-1), True, self._group_name)
            q, k, v = together.split(size, dim=-1)
        else:
            q = exchange(q, True, self._group_name)
            k, v = exchange(torch.cat((k, v), dim=-1), True, self._group_name).split(size, dim=-1)
        y = self._alone(q, k, v, Weighting(how.window, sinks, dropout))
        return exchange(y, False, self._group_name)


def exchanged(x: Tensor, to_heads: bool, group_name: str) -> Tensor:
    """All-to-all over the n ranks in the named group: x (B, H, T / n, K) → (B, H / n, T, K) if
    `to_heads`, or back. Chunk i along one dimension goes to rank i, and the received chunks are
    concatenated along the other. Collective."""
    group = group_named(group_name)
    split_dim, concat_dim = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(group.size(), dim=split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=concat_dim)


exchange = torch.library.custom_op("pentameter::exchange", exchanged, mutates_args=())


@exchange.register_fake
def _(x: Tensor, to_heads: bool, group_name: str) -> Tensor:
    n = group_named(group_name).size()
    B, H, T, K = x.shape
    return x.new_empty((B, H // n, T * n, K) if to_heads else (B, H * n, T // n, K))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.to_heads, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Return the gradient for x, by the inverse all-to-all on the output gradient; None for the
    other arguments."""
    return exchange(grad, not ctx.to_heads, ctx.group_name), None, None


exchange.register_autograd(_backward, setup_context=_remember)
