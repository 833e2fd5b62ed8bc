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


class Message(Function):
    """The stream on its way between stages: it `cuts` the whole into this process's part, to be
    sent, or joins the parts that were received. The gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, parts: Parts, cuts: bool) -> Tensor:
        """(B, t, D), or (B, T, D)."""
        ctx.parts, ctx.cuts = parts, cuts
        return parts.own(stream) if cuts else parts.gather(stream)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """(B, T, D), or (B, t, D)."""
        return ctx.parts.gather(g) if ctx.cuts else ctx.parts.own(g), None, None
