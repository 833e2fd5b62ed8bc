"""Context parallelism: ranks that shard each sequence.

Embedding, norms, linears and loss run on each rank's own positions; only attention needs the
others'. Either keys and values travel round a ring (`ring_attention.py`), or an all-to-all swaps
sequence shards with all heads for full sequences with some heads, and back (Jacobs et al. 2023,
"DeepSpeed Ulysses").

Shapes: B batch rows, H heads, K head size; T tokens in the full sequence, n ranks that shard it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.config.choices import refuse_unknown
from pentameter.model.attention.attention import Attend, CausalAttention, attend
from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.parallel.context.ring_attention import RingAttention
from pentameter.parallel.mesh import Mesh, group_named
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import Sharding


def parallelize_context(model: GPT, mesh: Mesh, sharding: Sharding) -> None:
    """Shard a model's computation along the sequence, in place: this rank computes the positions
    that its `context` coordinate has, and attention exchanges keys and values or heads with the
    other ranks. Raises ConfigError for an unknown `parallel.context_mode`."""
    layout, rank, group = sharding.layout, mesh.coordinates["context"], mesh.groups["context"]
    n_heads = sharding.n_heads_here(model.config.n_heads)
    T = model.config.context_length
    model.attention_positions = partial(own_positions, layout, rank)
    for attention in model.modules():
        if not isinstance(attention, CausalAttention):
            continue
        match layout.context_mode:
            case "ring":
                starts = [
                    [chunk.start for chunk in layout.positions(each, T)]
                    for each in range(layout.context)
                ]
                attention.attend = RingAttention(group, starts)
            case "all-to-all":
                attention.attend = _attention_by_heads(group.group_name, rank)
                attention.weights_dropout.head_offset += rank * (n_heads // layout.context)
            case unknown:
                refuse_unknown(unknown, "parallel.context_mode", "the engine")


def own_positions(layout: Layout, rank: int, positions: Tensor) -> Tensor:
    """Return the positions (T / n,) that the rank with `context` coordinate `rank` computes, out of
    a sequence's positions (T,), for n ranks along `context`."""
    chunks = layout.positions(rank, len(positions))
    return torch.cat([positions[chunk.start : chunk.stop] for chunk in chunks])


def _attention_by_heads(group_name: str, rank: int) -> Attend:
    """Return an attention function for the all-to-all mode, to be installed as `Attention.attend`:
    inside, full sequences with H / n heads on each of the n ranks in the group, of which this one
    has the number `rank`."""

    def attend_by_heads(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: AttentionDropout,
        dropout_keys: Tensor | None,
        positions: Tensor,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend from q (B, H, T / n, K) to k and v (B, H or fewer, T / n, K), with a sink (H,) for
        each head or None. Returns (B, H, T / n, K). Collective."""
        size, n_heads = q.shape[-1], q.shape[1] // group_named(group_name).size()
        if sinks is not None:
            sinks = sinks.narrow(0, rank * n_heads, n_heads)
        if q.shape == k.shape:
            together = exchange(torch.cat((q, k, v), dim=-1), True, group_name)
            q, k, v = together.split(size, dim=-1)
        else:
            q = exchange(q, True, group_name)
            k, v = exchange(torch.cat((k, v), dim=-1), True, group_name).split(size, dim=-1)
        indices = torch.arange(q.shape[2], device=q.device)
        y = attend(
            q,
            k,
            v,
            dropout=dropout,
            dropout_keys=dropout_keys,
            positions=indices,
            window=window,
            sinks=sinks,
        )
        return exchange(y, False, group_name)

    return attend_by_heads


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
