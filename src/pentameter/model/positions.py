"""Token positions in their sequence: how they pass through the model, and how they are encoded.

Shapes: B batch, T tokens, D d_model, H heads, K head size, R rotated channels in a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.config.choices import refuse_unknown
from pentameter.config.model.architecture import RotationKind
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
    rotations: Mapping[RotationKind, Rotation]
    """The model's rotations of these queries and keys by their positions; empty unless positions
    are rotary."""

    def rotation(self, kind: RotationKind | None) -> Rotation | None:
        """Return the rotation of that kind, None for None."""
        return None if kind is None else self.rotations[kind]


class Rotation(NamedTuple):
    """Rotary embedding's cosines and sines, (T, R / 2) each, of the angles that rotate pairs of
    channels, fp32 or fp64. Call it with queries or keys to rotate them."""

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


def rotations(
    positions: Tensor, config: ModelConfig, dtype: torch.dtype, length: int | Tensor
) -> dict[RotationKind, Rotation]:
    """Return the model's rotations of queries and keys at int64 positions (T,), as `rotation` has
    them: `whole`, and `window` if layers with a sliding window have a base of their own. Empty
    unless positions are rotary."""
    found: dict[RotationKind, Rotation] = {}
    kinds: tuple[RotationKind, ...] = ("whole", "window")
    for kind in kinds[: 1 if config.window_rope_theta is None else 2]:
        turned = rotation(positions, config, dtype, length, kind)
        if turned is not None:
            found[kind] = turned
    return found


def rotation(
    positions: Tensor,
    config: ModelConfig,
    dtype: torch.dtype,
    length: int | Tensor,
    kind: RotationKind = "whole",
) -> Rotation | None:
    """Return the model's Rotation of that `kind` for queries and keys at int64 positions (T,), in
    `dtype` but at least fp32; None unless positions are rotary.

    `length` is the number of tokens in the text so far, by which some kinds of `model.rope_scaling`
    choose frequencies; int64 (T,) if it is not the same for all tokens.

    It follows "RoFormer" (Su et al. 2021), with channels in the order that Hugging Face's
    models use. Angles are fp32 whatever the model's dtype, because published weights were
    trained with them.
    """
    if config.positions != "rotary":
        return None
    frequencies = _frequencies(config, positions.device, length, kind)
    angles = positions.to(torch.float32)[:, None] * frequencies
    dtype = torch.promote_types(dtype, torch.float32)
    factor = config.rope_scaling.rotation_factor if kind == "whole" else 1.0
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


def _frequencies(
    config: ModelConfig, device: torch.device, length: int | Tensor, kind: RotationKind
) -> Tensor:
    """Return the rotary frequencies (R / 2,), or (T, R / 2) for a `length` (T,), in radians per
    token, fp32, lowered for a longer context as `model.rope_scaling` says. Type `linear` divides
    all by `factor`; `llama3` and `yarn` divide low frequencies, keep high ones, and interpolate
    between them; `dynamic` and `longrope` go by the length of the text. Those of the kind `window`
    are as `window_rope_theta` gives them."""
    R, scaling = config.turning_channels, config.rope_scaling
    pair = torch.arange(0, R, 2, device=device, dtype=torch.float32)
    if kind == "window" and config.window_rope_theta is not None:
        return 1.0 / config.window_rope_theta ** (pair / R)
    radians = config.rope_theta ** (pair / R)  # tokens for an angle of 1
    frequencies = 1.0 / radians
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
        case "yarn":
            kept = 1 - _lowered_by_yarn(config, device)
            return (1 - kept) * (1.0 / (scaling.factor * radians)) + kept * frequencies
        case "dynamic" | "longrope":
            return _by_length(config, pair / R, _lengths(length, device)[..., None])
        case unknown:
            refuse_unknown(unknown, "model.rope_scaling.type", "the model")


def _by_length(config: ModelConfig, exponents: Tensor, length: Tensor) -> Tensor:
    """Return the rotary frequencies of the types `dynamic` and `longrope` for texts of this length,
    int64 (1,) or (T, 1): as they were published up to the original context, others beyond.
    exponents: of `rope_theta`, (R / 2,)."""
    is_long = length > config.rope_scaling.original_context_length
    radians = config.rope_theta**exponents
    if config.rope_scaling.type == "dynamic":
        raised = 1.0 / _raised_theta(config, length) ** exponents
        return torch.where(is_long, raised, 1.0 / radians)
    short, long = _longrope_factors(config, length.device)
    return 1.0 / (torch.where(is_long, long, short) * radians)


def _lengths(length: int | Tensor, device: torch.device) -> Tensor:
    """Return a text's length as a tensor, int64, without a copy from the host: 0-dim, or (T,)."""
    if isinstance(length, Tensor):
        return length
    return torch.full((), length, dtype=torch.int64, device=device)


def _raised_theta(config: ModelConfig, length: Tensor) -> Tensor:
    """Return `rope_theta` for a text longer than the original context, fp32 in the shape of
    `length`: raised so that the slowest frequency falls by factor · length ÷ original - (factor -
    1) and the fastest stays ("NTK-aware" and "dynamic" scaling, u/bloc97 and u/emozilla 2023)."""
    R, scaling = config.turning_channels, config.rope_scaling
    original, factor = scaling.original_context_length, scaling.factor
    longer = (factor * length.clamp(min=original) / original) - (factor - 1)
    return config.rope_theta * longer ** (R / (R - 2))


def _longrope_factors(config: ModelConfig, device: torch.device) -> Tensor:
    """Return the divisors of frequencies in short texts and in long ones, fp32 (2, R / 2)."""
    n, scaling = config.turning_channels // 2, config.rope_scaling
    factors = (scaling.short_factors or (1.0,) * n, scaling.long_factors or (scaling.factor,) * n)
    # Filled one by one: a copy from the host would wait for the device.
    full = partial(torch.full, (), dtype=torch.float32, device=device)
    return torch.stack([torch.stack([full(fill_value=each) for each in one]) for one in factors])


def _lowered_by_yarn(config: ModelConfig, device: torch.device) -> Tensor:
    """Return how far YaRN lowers each rotary frequency, fp32 (R / 2,): 0 keeps it, 1 divides it by
    the scaling factor. It is 0 up to the channel pair that rotates `beta_fast` times in the
    original context, 1 from the one that rotates `beta_slow` times, and linear in between (Peng et
    al. 2023, "YaRN", section 3.2)."""
    R, scaling = config.turning_channels, config.rope_scaling

    def pair_that_turns(times: float) -> float:
        tokens = scaling.original_context_length / (times * 2 * math.pi)
        return R * math.log(tokens) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)  # R - 1, not R / 2 - 1, as models were trained
    if first == last:
        last += 0.001
    pair = torch.arange(R // 2, device=device, dtype=torch.float32)
    return ((pair - first) / (last - first)).clamp(0, 1)


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
