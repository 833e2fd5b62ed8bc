"""Context parallelism: processes that divide the time of each sequence.

Each embeds, norms, multiplies and scores the tokens of its own positions; only attention needs the
others'. Either keys and values travel round a ring (`ring_attention.py`), or processes exchange the
time that they have of all heads for all the time of some heads, and back (Jacobs et al. 2023,
"DeepSpeed Ulysses").

Shapes: B batch, H heads, K head size; T the whole time, n the processes that divide it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.config.choices import refuse_unknown
from pentameter.model.attention import Attend, Attention, attend
from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.parallel.mesh import group_named, name_of
from pentameter.parallel.ring_attention import RingAttention
from pentameter.planning.layout import Layout


def share_context(model: GPT, group: dist.ProcessGroup, layout: Layout) -> None:
    """Let a model compute the positions of this process's place in `group`, in place."""
    place, n_heads = group.rank(), layout.n_heads_here(model.config.n_heads)
    T = model.config.context_length
    model.attention_positions = partial(own_positions, layout, place)
    for attention in model.modules():
        if not isinstance(attention, Attention):
            continue
        match layout.context_mode:
            case "ring":
                starts = [
                    [piece.start for piece in layout.positions(each, T)]
                    for each in range(layout.context)
                ]
                attention.attend = RingAttention(group, starts)
            case "all-to-all":
                attention.attend = _exchanging(group)
                attention.weights_dropout.head_offset += place * (n_heads // layout.context)
            case unknown:
                refuse_unknown(unknown, "parallel.context_mode", "the engine")


def own_positions(layout: Layout, place: int, positions: Tensor) -> Tensor:
    """Those of the positions (T,) of a sequence that the process at `place` of its group has."""
    pieces = layout.positions(place, len(positions))
    return torch.cat([positions[piece.start : piece.stop] for piece in pieces])


def _exchanging(group: dist.ProcessGroup) -> Attend:
    """Attention to all positions by some of the heads, between two exchanges over `group`."""
    group_name = name_of(group)

    def attend_by_heads(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: AttentionDropout,
        dropout_keys: Tensor | None,
        positions: Tensor,
        window: int | None,
    ) -> Tensor:
        size = q.shape[-1]
        if q.shape == k.shape:
            together = exchange(torch.cat((q, k, v), dim=-1), True, group_name)
            q, k, v = together.split(size, dim=-1)
        else:
            q = exchange(q, True, group_name)
            k, v = exchange(torch.cat((k, v), dim=-1), True, group_name).split(size, dim=-1)
        every = torch.arange(q.shape[2], device=q.device)
        y = attend(
            q, k, v, dropout=dropout, dropout_keys=dropout_keys, positions=every, window=window
        )
        return exchange(y, False, group_name)

    return attend_by_heads


def exchanged(x: Tensor, to_heads: bool, group_name: str) -> Tensor:
    """Return (B, H / n, T, K) of x (B, H, T / n, K), or the other way round: part i of one
    dimension goes to process i, and the parts that come make up the other. Collective."""
    group = group_named(group_name)
    given, made = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(group.size(), dim=given))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=made)


exchange = torch.library.custom_op("pentameter::exchange", exchanged, mutates_args=())


@exchange.register_fake
def _(x: Tensor, to_heads: bool, group_name: str) -> Tensor:
    n = group_named(group_name).size()
    B, H, T, K = x.shape
    return x.new_empty((B, H // n, T * n, K) if to_heads else (B, H * n, T // n, K))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.to_heads, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return exchange(grad, not ctx.to_heads, ctx.group_name), None, None


exchange.register_autograd(_backward, setup_context=_remember)
