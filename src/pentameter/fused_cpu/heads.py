"""Queries, keys and values in a linear layer's output, before bias, norm and rotation.

Shapes: B batch, T sequence, H query heads, G KV heads, K head size, R rotated channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.model.positions import Rotation


class HeadShape(NamedTuple):
    """An attention layer's heads, their norms' epsilon, and dropout."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    norm_eps: float
    context_length: int
    """Numbers the dropped elements, see `AttentionDropout`."""
    p: float

    @property
    def scale(self) -> float:
        """Factor 1 / √K on query · key."""
        return 1 / math.sqrt(self.head_size)

    @property
    def fused(self) -> bool:
        """Whether the projection's last dimension is (H, 3, K), head by head; else it is queries
        (H, K), then keys and values (G, 2, K)."""
        return self.n_heads == self.n_kv_heads

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views (…, H, K), (…, G, K) and (…, G, K) for queries, keys and values in x, the
        projection or a tensor laid out like it."""
        if self.fused:
            q, k, v = x.unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
            return q, k, v
        n_queries = self.n_heads * self.head_size
        k, v = x[..., n_queries:].unflatten(-1, (-1, 2, self.head_size)).unbind(-2)
        return x[..., :n_queries].unflatten(-1, (-1, self.head_size)), k, v

    def join(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Invert `split`: (…, width)."""
        if self.fused:
            return torch.stack((q, k, v), -2).flatten(-3)
        return torch.cat((q.flatten(-2), torch.stack((k, v), -2).flatten(-3)), -1)


class Projected(NamedTuple):
    """Queries, keys or values from a linear layer, with the bias and norm still to apply."""

    data: Tensor
    """(B, T, H, K), a view into the layer's output."""
    bias: Tensor | None
    """(H, K): the layer's bias, not yet added."""
    norm: Tensor | None
    """The norm's weight: (K,) for each head or (H, K) for all heads together."""


class Heads(NamedTuple):
    """Queries, keys and values, with the rotation and the norms' epsilon to apply before the
    matmul."""

    q: Projected
    k: Projected
    v: Projected
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
    """Return the heads in a projection (B, T, width); cosine and sine (T, R / 2) are the
    Rotation's."""
    data = shape.split(projected)
    biases = (None, None, None) if bias is None else shape.split(bias)
    q, k, v = map(Projected, data, biases, (q_norm, k_norm, None))
    return Heads(q, k, v, rotation_of(cosine, sine), shape.norm_eps)


def rotation_of(cosine: Tensor | None, sine: Tensor | None) -> Rotation | None:
    """Return the Rotation with these tables (T, R / 2), None without tables."""
    return None if cosine is None or sine is None else Rotation(cosine, sine)
