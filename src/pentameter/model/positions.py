"""Positions of tokens in their sequence: how they travel through the model, and a table of them.

Shapes: T time, D d_model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Positions(NamedTuple):
    """Positions of a forward pass's tokens, int64 (T,), counted from 0.

    Two tensors, because what shares the matrices of a model out may divide time between them: the
    residual stream is then a part of it, while attention sees every token.
    """

    stream: Tensor
    """Positions of the residual stream that is here: embedding and dropout act on it."""
    attention: Tensor
    """Positions of the tokens whose queries, keys and values attention gets."""


def sinusoidal_positions(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Return (T, D) for int64 positions (T,): pairs sin, cos of position / 10000^(2i / D).

    From "Attention is all you need" (Vaswani et al., 2017), section 3.5. Computed in fp32, or in
    fp64 for that dtype; there is nothing to store.
    """
    precise = torch.promote_types(dtype, torch.float32)
    even = torch.arange(0, d_model, 2, device=positions.device, dtype=precise)
    angles = positions.to(precise)[:, None] * torch.pow(10000.0, -even / d_model)  # (T, D / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(dtype)
