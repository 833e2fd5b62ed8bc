"""Token positions in their sequence: how they pass through the model, and how they are encoded.

Shapes: B batch, T tokens, D d_model, H heads, K head size, R rotated channels in a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig


class Positions(NamedTuple):
    """Positions of a forward pass's tokens in their sequence, int64 (T,), counted from 0.

    There are two tensors because tensor parallelism may shard the residual stream along the
    sequence: the stream is then a block of the sequence, while attention sees every token.
    """

    stream: Tensor
    """Positions (T,) of the tokens in the local residual stream: embedding and dropout use them."""
    attention: Tensor
    """Positions (T,) of the tokens that attention sees; a longer tensor than `stream` if the stream
    is sharded along the sequence."""
    rotation: Rotation | None
    """Rotation of these queries and keys by their positions; None unless positions are rotary."""


class Rotation(NamedTuple):
    """Rotary embedding's cosines and sines (T, R / 2) of the angles that rotate pairs of channels,
    fp32 or fp64. Calling it rotates a tensor."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return queries or keys x (B, T, H, K) with their first R channels rotated, channel i
        paired with i + R / 2, in x's dtype."""
        half = self.cosine.shape[1]
        precise = x.to(torch.promote_types(x.dtype, self.cosine.dtype))
        a, b = precise[..., :half], precise[..., half : 2 * half]
        cosine, sine = self.cosine[:, None], self.sine[:, None]
        parts = [a * cosine - b * sine, b * cosine + a * sine, precise[..., 2 * half :]]
        return torch.cat(parts, dim=-1).to(x.dtype)


def rotation(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotation | None:
    """Return the Rotation for queries and keys at int64 positions (T,), in `dtype` but at least
    fp32; None unless positions are rotary.

    It follows "RoFormer" (Su et al. 2021), with channels in the order that Hugging Face's
    models use. Angles are fp32 whatever the model's dtype, because published weights were
    trained with them.
    """
    if config.positions != "rotary":
        return None
    R = config.turning_channels
    pair = torch.arange(0, R, 2, device=positions.device, dtype=torch.float32)
    frequencies = _scaled(1.0 / config.rope_theta ** (pair / R), config)
    angles = positions.to(torch.float32)[:, None] * frequencies
    dtype = torch.promote_types(dtype, torch.float32)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def _scaled(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Return the rotary frequencies (R / 2,), in radians per token, lowered for a longer context as
    `model.rope_scaling` says; unchanged without it. Type `linear` divides all by `factor`; `llama3`
    divides low frequencies, keeps high ones, and interpolates between them."""
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
    """Return the fixed position embeddings (T, D) in `dtype` for int64 positions (T,): pairs sin,
    cos of position / 10000^(2i / D).

    From "Attention is all you need" (Vaswani et al., 2017), section 3.5. Computed in fp32, or in
    fp64 for that dtype; there is nothing to store.
    """
    precise = torch.promote_types(dtype, torch.float32)
    even = torch.arange(0, d_model, 2, device=positions.device, dtype=precise)
    angles = positions.to(precise)[:, None] * torch.pow(10000.0, -even / d_model)  # (T, D / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(dtype)
