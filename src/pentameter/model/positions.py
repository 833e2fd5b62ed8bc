"""Positions of tokens in their sequence: how they travel through the model, and what knows them.

Shapes: B batch, T time, D d_model, H heads, K head size, R channels of a head that turn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import turning_channels


class Positions(NamedTuple):
    """Positions of a forward pass's tokens, int64 (T,), counted from 0.

    Two tensors, because what shares the matrices of a model out may divide time between them: the
    residual stream is then a part of it, while attention sees every token.
    """

    stream: Tensor
    """Positions of the residual stream that is here: embedding and dropout act on it."""
    attention: Tensor
    """Positions of the tokens whose queries, keys and values attention gets."""
    rotation: Rotation | None
    """What turns these queries and keys, where positions are rotary."""


class Rotation(NamedTuple):
    """Cosines and sines (T, R / 2) of the angles by which pairs of channels turn, fp32 or fp64."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return x (B, T, H, K), its first R channels turned: number i of them with i + R / 2."""
        half = self.cosine.shape[1]
        precise = x.to(torch.promote_types(x.dtype, self.cosine.dtype))
        a, b = precise[..., :half], precise[..., half : 2 * half]
        cosine, sine = self.cosine[:, None], self.sine[:, None]
        parts = [a * cosine - b * sine, b * cosine + a * sine, precise[..., 2 * half :]]
        return torch.cat(parts, dim=-1).to(x.dtype)


def rotation(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotation | None:
    """Return the Rotation of queries and keys at int64 positions (T,); None where nothing turns.

    "RoFormer" (Su et al. 2021), in the order of channels that Hugging Face's models have. Angles
    are fp32 whatever the model's dtype, as published weights were trained with them.
    """
    if config.positions != "rotary":
        return None
    R = turning_channels(config)
    pair = torch.arange(0, R, 2, device=positions.device, dtype=torch.float32)
    frequencies = _scaled(1.0 / config.rope_theta ** (pair / R), config)
    angles = positions.to(torch.float32)[:, None] * frequencies
    dtype = torch.promote_types(dtype, torch.float32)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def _scaled(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Return the frequencies (R / 2,), in radians a token, for a longer context."""
    scaling = config.rope_scaling
    match scaling.type:
        case None:
            return frequencies
        case "linear":
            return frequencies / scaling.factor
        case "llama3":  # Llama 3.1's model card and code (Meta, 2024)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            turns = scaling.original_context_length / (2 * math.pi / frequencies)
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - kept) * frequencies / scaling.factor + kept * frequencies
        case unknown:
            refuse_unknown(unknown, "model.rope_scaling.type", "the model")


def sinusoidal_positions(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Return (T, D) for int64 positions (T,): pairs sin, cos of position / 10000^(2i / D).

    From "Attention is all you need" (Vaswani et al., 2017), section 3.5. Computed in fp32, or in
    fp64 for that dtype; there is nothing to store.
    """
    precise = torch.promote_types(dtype, torch.float32)
    even = torch.arange(0, d_model, 2, device=positions.device, dtype=precise)
    angles = positions.to(precise)[:, None] * torch.pow(10000.0, -even / d_model)  # (T, D / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(dtype)
