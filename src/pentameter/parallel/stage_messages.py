"""Messages between pipeline stages of which each tensor-parallel process sends its part.

After Narayanan et al. 2021, section 4.1. Where the stream is whole in each of n processes that
share a stage's matrices, all of them would send the same: each sends the n-th part of the time, and
the receivers gather it, which in a node takes less than sending the whole from node to node.

Shapes: B batch, T time, D channels of the stream; t is T / n.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pentameter.parallel.tensor_products import gathered


class Parts(NamedTuple):
    """The parts of a message: this process's place among the `n` of a group, by its name."""

    place: int
    n: int
    group_name: str

    def own(self, whole: Tensor) -> Tensor:
        """This process's part (B, t, D) of what all have, (B, T, D), in memory of its own."""
        return whole.chunk(self.n, 1)[self.place].clone(memory_format=torch.contiguous_format)

    def gather(self, own: Tensor) -> Tensor:
        """(B, T, D) of all parts. Collective."""
        return gathered(own, own.dtype, "by_time", self.group_name)


class CutMessage(Function):
    """This process's part of the stream, to be sent; of its gradient all parts are gathered."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, parts: Parts) -> Tensor:
        """(B, t, D)."""
        ctx.parts = parts
        return parts.own(stream)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """(B, T, D)."""
        return ctx.parts.gather(g), None


class JoinMessage(Function):
    """The stream of all parts that were received; of its gradient each sends its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, parts: Parts) -> Tensor:
        """(B, T, D)."""
        ctx.parts = parts
        return parts.gather(own)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """(B, t, D)."""
        return ctx.parts.own(g), None
