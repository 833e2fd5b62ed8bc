"""Rotary positions in a GGUF file: the entries, and the tensor of factors for Llama 3.1's kind."""

from __future__ import annotations

import math
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
            return {
                **plain,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original_context_length,
                "rope.scaling.attn_factor": scaling.rotation_factor / usual,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }
        case "dynamic" | "longrope":
            raise ConfigError(
                "llama.cpp chooses no rotary frequencies by a text's length, as model.rope_scaling."
                f"type={scaling.type!r} does; --to hf writes the model for transformers and vLLM"
            )
        case unknown:
            refuse_unknown(unknown, "model.rope_scaling.type", "--to gguf")


def rotary_factors(model: ModelConfig, *, are_read: bool) -> torch.Tensor | None:
    """Return the numbers (R / 2,), fp32, by which each rotary frequency is divided, R rotated
    channels in a head: the tensor that llama.cpp's Llama takes for Llama 3.1's kind of longer
    context. None for a model without. Raises ConfigError unless `are_read`, by the architecture, if
    it has one."""
    if model.positions != "rotary" or model.rope_scaling.type != "llama3":
        return None
    if not are_read:
        raise ConfigError(
            "llama.cpp takes model.rope_scaling.type='llama3' for Llama's kind of model alone; "
            "--to hf writes the model for transformers and vLLM"
        )
    import torch

    from pentameter.model.positions import rotation

    frequencies = []
    for each in (model.updated({"rope_scaling.type": None}), model):
        turned = rotation(torch.tensor([1]), each, torch.float64, 1)
        assert turned is not None  # the positions are rotary
        frequencies.append(torch.atan2(turned.sine[0].double(), turned.cosine[0].double()))
    return (frequencies[0] / frequencies[1]).float()
