"""Rotary positions in a GGUF file: the entries, and the tensors of factors for Llama 3.1's kind and
for LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError

if TYPE_CHECKING:
    import torch


def rotary_entries(model: ModelConfig) -> dict[str, Any]:
    """Return a model's rotary positions as entries of a GGUF file, without the architecture's name;
    {} if it has none. Raises ConfigError for a setting of YaRN that llama.cpp does not have."""
    if model.positions != "rotary":
        return {}
    scaling = model.rope_scaling
    plain = {
        "rope.dimension_count": model.turning_channels,
        "rope.freq_base": float(model.rope_theta),
    }
    match scaling.type:
        case None | "llama3":
            return plain
        case "linear":
            return {**plain, "rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
        case "yarn":
            if not scaling.truncate:
                raise ConfigError(
                    "llama.cpp rounds the channels between which YaRN interpolates "
                    "(model.rope_scaling.truncate=true), and model.rope_scaling.truncate=false; "
                    "--to hf writes the model for transformers and vLLM"
                )
            usual = 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0  # which llama.cpp puts in itself
            attn_factor = scaling.rotation_factor / usual
            if model.attention.type == "latent":
                if scaling.rotation_factor != 1.0:
                    raise ConfigError(
                        "llama.cpp turns queries and keys of latent attention without another "
                        "factor (model.rope_scaling.mscale equal to mscale_all_dim), and here it "
                        f"is {scaling.rotation_factor:.6g}; --to hf writes the model for "
                        "transformers and vLLM"
                    )
                if scaling.mscale_all_dim:
                    plain["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling.mscale_all_dim
                    attn_factor = 1.0
            return {
                **plain,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original_context_length,
                "rope.scaling.attn_factor": attn_factor,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }
        case "longrope":
            return {
                **plain,
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": scaling.original_context_length,
                "rope.scaling.attn_factor": scaling.rotation_factor,
            }
        case "dynamic":
            raise ConfigError(
                "llama.cpp computes no rotary frequencies from a text's length, as "
                "model.rope_scaling.type='dynamic' does; --to hf writes the model for "
                "transformers and vLLM"
            )
        case unknown:
            refuse_unknown(unknown, "model.rope_scaling.type", "--to gguf")


def rotary_notes(model: ModelConfig) -> tuple[str, ...]:
    """Return lines for the user: what llama.cpp does otherwise with a model's rotary positions."""
    scaling = model.rope_scaling
    n = scaling.original_context_length
    if model.positions != "rotary" or scaling.type != "longrope" or model.context_length <= n:
        return ()
    return (
        f"llama.cpp takes the long factors of LongRoPE for every text if it runs with a context of "
        f"over {n:,} tokens, where they are meant for longer texts alone: keep -c to {n:,} for "
        "shorter ones",
    )


def rotary_factors(model: ModelConfig, computed: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, with the numbers (R / 2,), fp32, by which each rotary frequency
    is divided, R rotated channels in a head: one for Llama 3.1's kind of longer context, two for
    LongRoPE, {} for any other model. Raises ConfigError unless the model's type of `rope_scaling`
    is among those `computed`."""
    scaling = model.rope_scaling
    if model.positions != "rotary" or scaling.type is None:
        return {}
    if scaling.type not in computed:
        raise ConfigError(
            f"llama.cpp takes no model.rope_scaling.type={scaling.type!r} for this kind of model; "
            "--to hf writes it for transformers and vLLM"
        )
    import torch

    if scaling.type == "longrope":
        n = model.turning_channels // 2
        long = scaling.long_factors or (scaling.factor,) * n
        return {
            "rope_factors_long.weight": torch.tensor(long, dtype=torch.float32),
            "rope_factors_short.weight": torch.tensor(
                scaling.short_factors or (1.0,) * n, dtype=torch.float32
            ),
        }
    return {"rope_freqs.weight": _llama3_factors(model)} if scaling.type == "llama3" else {}


def _llama3_factors(model: ModelConfig) -> torch.Tensor:
    """Return the factors (R / 2,), fp32, of Llama 3.1's kind of longer context."""
    import torch

    from pentameter.model.positions import rotation

    frequencies = []
    for each in (model.updated({"rope_scaling.type": None}), model):
        turned = rotation(torch.tensor([1]), each, torch.float64, 1)
        assert turned is not None  # the positions are rotary
        frequencies.append(torch.atan2(turned.sine[0].double(), turned.cosine[0].double()))
    return (frequencies[0] / frequencies[1]).float()
