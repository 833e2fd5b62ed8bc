"""Queries, keys and values as they lie in what a linear layer made, and what they still lack.

Shapes: B batch, T time, H heads, G heads of keys and values, K head size, R channels that turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.model.positions import Rotation


class HeadShape(NamedTuple):
    """Heads of an attention layer, how their queries and keys are normed, and its dropout."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    norm_eps: float
    context_length: int
    """Numbers the elements that are dropped, see `AttentionDropout`."""
    p: float

    @property
    def fused(self) -> bool:
        """Whether a row of the projection is (H, 3, K), head by head; else it is the queries
        (H, K), then keys and values (G, 2, K)."""
        return self.n_heads == self.n_kv_heads

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views (…, H, K), (…, G, K) and (…, G, K) of queries, keys and values in x, the projection
        or what lies like it."""
        if self.fused:
            q, k, v = x.unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
            return q, k, v
        n_queries = self.n_heads * self.head_size
        k, v = x[..., n_queries:].unflatten(-1, (-1, 2, self.head_size)).unbind(-2)
        return x[..., :n_queries].unflatten(-1, (-1, self.head_size)), k, v

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `parts`: (…, width)."""
        if self.fused:
            return torch.stack((q, k, v), -2).flatten(-3)
        return torch.cat((q.flatten(-2), torch.stack((k, v), -2).flatten(-3)), -1)


class Part(NamedTuple):
    """Queries, keys or values as the linear layer made them."""

    data: Tensor
    """(B, T, H, K), a view of what the layer made."""
    bias: Tensor | None
    """(H, K): the layer's, not yet added."""
    norm: Tensor | None
    """The weight of the norm that acts on them, (K,) on each head or (H, K) on all together."""


class Heads(NamedTuple):
    """Queries, keys and values, and what is done to them before they are multiplied."""

    q: Part
    k: Part
    v: Part
    rotation: Rotation | None
    eps: float


def heads_of(
    shape: HeadShape,
    projected: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> Heads:
    """The heads in a projection (B, T, width); cosine and sine (T, R / 2) are the Rotation's."""
    data = shape.parts(projected)
    biases = (None, None, None) if bias is None else shape.parts(bias)
    q, k, v = map(Part, data, biases, (q_norm, k_norm, None))
    return Heads(q, k, v, rotation_of(cosine, sine), shape.norm_eps)


def rotation_of(cosine: Tensor | None, sine: Tensor | None) -> Rotation | None:
    """The Rotation of these tables (T, R / 2), where there are any."""
    return None if cosine is None or sine is None else Rotation(cosine, sine)
