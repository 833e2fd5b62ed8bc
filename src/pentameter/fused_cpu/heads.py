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
    """An attention layer's sizes and constants: the number and size of its heads, the epsilon of
    query and key norms, the context length and the dropout probability `p`."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    norm_eps: float
    context_length: int
    """Longest sequence in tokens. Dropout numbers an attention weight by (head, query, key) in an
    array (H, context_length, context_length)."""
    p: float

    @property
    def scale(self) -> float:
        """Factor on the dot product query · key: 1 / √K."""
        return 1 / math.sqrt(self.head_size)

    @property
    def fused(self) -> bool:
        """Whether the projection's last dimension is (H, 3, K), head by head, as without grouped KV
        heads. Else it has the queries (H, K) first, then keys and values (G, 2, K)."""
        return self.n_heads == self.n_kv_heads

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views for queries (…, H, K), keys (…, G, K) and values (…, G, K) into x
        (…, width): the projection, its bias or its gradient."""
        if self.fused:
            q, k, v = x.unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
            return q, k, v
        n_queries = self.n_heads * self.head_size
        k, v = x[..., n_queries:].unflatten(-1, (-1, 2, self.head_size)).unbind(-2)
        return x[..., :n_queries].unflatten(-1, (-1, self.head_size)), k, v

    def join(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the projection (…, width) for queries (…, H, K), keys and values (…, G, K): the
        inverse to `split`."""
        if self.fused:
            return torch.stack((q, k, v), -2).flatten(-3)
        return torch.cat((q.flatten(-2), torch.stack((k, v), -2).flatten(-3)), -1)


class Projected(NamedTuple):
    """Queries, keys or values as a linear layer computed them, and the bias and norm weight that
    are still to be applied."""

    data: Tensor
    """Queries, keys or values (B, T, H, K), a view into the layer's output."""
    bias: Tensor | None
    """The layer's bias (H, K), not yet added; None without one."""
    norm: Tensor | None
    """The norm's weight: (K,) if each head is normed, (H, K) if all heads are normed together;
    None without a norm."""


class Heads(NamedTuple):
    """An attention layer's queries, keys and values as the linears computed them, and what a kernel
    is to apply to them before the matmul: each one's bias and norm (`Projected`), the rotation
    (None without rotary positions), and the norms' epsilon."""

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
    """Split a projection (B, T, width), the query, key and value linears' output, into Heads. Bias,
    norms and rotation are not applied here, only carried along for the kernels that read Heads.

    bias: the linears' (width,) or None. q_norm, k_norm: the norms' weights, (K,) for each head or
    (H, K) for all together, or None. cosine, sine: the rotary tables (T, R / 2) or None.
    """
    data = shape.split(projected)
    biases = (None, None, None) if bias is None else shape.split(bias)
    q, k, v = map(Projected, data, biases, (q_norm, k_norm, None))
    return Heads(q, k, v, rotation_of(cosine, sine), shape.norm_eps)


def rotation_of(cosine: Tensor | None, sine: Tensor | None) -> Rotation | None:
    """Return the Rotation with these tables, (T, R / 2) each; None if either table is None."""
    return None if cosine is None or sine is None else Rotation(cosine, sine)
