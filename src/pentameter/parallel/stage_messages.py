"""Messages between pipeline stages, sharded over the tensor-parallel ranks that send them.

After Narayanan et al. 2021, section 4.1. If n tensor-parallel ranks hold the residual stream
replicated, all would send the same. Instead each sends 1/n of the sequence, and the receivers
all-gather it, which takes less within a node than sending the full stream from node to node.

Shapes: B batch rows, T tokens, D channels in the residual stream; t is T / n.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pentameter.parallel.tensor.tensor_products import gathered


class MessageShards(NamedTuple):
    """The shards of a message: this rank among the `n` ranks in a group, and the group's
    name."""

    rank: int
    n: int
    group_name: str

    def own(self, whole: Tensor) -> Tensor:
        """Copy this rank's shard (B, t, D) out of a replicated tensor (B, T, D)."""
        return whole.chunk(self.n, 1)[self.rank].clone(memory_format=torch.contiguous_format)

    def gather(self, own: Tensor) -> Tensor:
        """All-gather the shards (B, t, D) along the sequence into (B, T, D). Collective."""
        return gathered(own, own.dtype, "by_time", self.group_name)


class Message(Function):
    """The residual stream on its way between stages. If `shards`, take this rank's shard, to be
    sent; otherwise all-gather received shards. The gradient takes the inverse."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, parts: MessageShards, shards: bool) -> Tensor:
        """Shard the stream, (B, T, D) → (B, t, D), if `shards`; else all-gather it, (B, t, D) →
        (B, T, D)."""
        ctx.parts, ctx.shards = parts, shards
        return parts.own(stream) if shards else parts.gather(stream)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """All-gather the gradient, (B, t, D) → (B, T, D), if `shards`; else shard it, (B, T, D) →
        (B, t, D)."""
        return ctx.parts.gather(g) if ctx.shards else ctx.parts.own(g), None, None
