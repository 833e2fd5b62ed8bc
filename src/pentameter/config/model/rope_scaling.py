"""The schema of `[model.rope_scaling]`: rotary positions for a longer context."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from pentameter.config.section import NonNegativeFloat, PositiveFloat, Section, Switch, Width

YARN_KEYS = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
"""Keys that act with `type = "yarn"` only."""
LONGROPE_KEYS = ("short_factors", "long_factors")
"""Keys that act with `type = "longrope"` only."""


class RopeScalingConfig(Section):
    """Rotary frequencies for a longer context than the one a model was first trained on."""

    type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] | None = None
    """`linear`: positions are divided by factor (Chen et al. 2023). `llama3`: slow frequencies are
    divided by factor, fast ones kept, those between interpolated (Llama 3.1). `yarn`: the same,
    interpolated over the channels between beta_fast and beta_slow, with attention sharpened (Peng
    et al. 2023). Two go by the length of the text, in training by context_length: `dynamic` raises
    rope_theta from original_context_length on (NTK-aware); `longrope` divides frequencies by
    short_factors up to it, by long_factors beyond, with attention sharpened (Ding et al. 2024,
    Phi-3). None ("none") leaves frequencies unchanged."""
    factor: PositiveFloat = 8.0
    """Factor by which frequencies fall; `longrope`: see attention_factor."""
    low_frequency_factor: PositiveFloat = 1.0
    """`llama3`: a frequency that rotates fewer times than this in the original context is slow."""
    high_frequency_factor: PositiveFloat = 4.0
    """`llama3`: one that rotates more often than this is fast."""
    original_context_length: Width = 8192
    """All but `linear`: tokens of the context before it was extended."""
    beta_fast: PositiveFloat = 32.0
    """`yarn`: a frequency that rotates more often than this in the original context is kept."""
    beta_slow: PositiveFloat = 1.0
    """`yarn`: one that rotates fewer times than this is divided by factor; must be less than
    beta_fast."""
    truncate: Switch = True
    """`yarn`: the channels where beta_fast and beta_slow are reached are rounded to whole ones,
    outwards (gpt-oss does not)."""
    attention_factor: PositiveFloat | None = None
    """`yarn`, `longrope`: factor of rotated queries and keys; when absent, for `yarn`
    (0.1 · mscale · ln(factor) + 1) ÷ (0.1 · mscale_all_dim · ln(factor) + 1), for `longrope`
    √(1 + ln(factor) ÷ ln(original_context_length))."""
    mscale: PositiveFloat = 1.0
    """`yarn`: see attention_factor."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """`yarn` with latent attention: scores, of all channels of a head, are multiplied by
    (0.1 · mscale_all_dim · ln(factor) + 1)² (DeepSeek-V2)."""
    short_factors: tuple[PositiveFloat, ...] = ()
    """`longrope`: divisor of each frequency, one for each pair of rotated channels, for texts of up
    to original_context_length tokens; 1 for all when absent."""
    long_factors: tuple[PositiveFloat, ...] = ()
    """`longrope`: the same for longer texts; `factor` for all when absent."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"model.rope_scaling.low_frequency_factor={self.low_frequency_factor} must be "
                f"below model.rope_scaling.high_frequency_factor={self.high_frequency_factor}"
            )
        if self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"model.rope_scaling.beta_slow={self.beta_slow} must be below "
                f"model.rope_scaling.beta_fast={self.beta_fast}"
            )
        if self.attention_factor is not None and self.mscale != 1.0:
            raise ValueError(
                f"model.rope_scaling.mscale={self.mscale} is for computing attention_factor, and "
                f"model.rope_scaling.attention_factor={self.attention_factor}; leave one out"
            )
        where = "model.rope_scaling"
        self.check_effect(where, YARN_KEYS, "type", "yarn")
        self.check_effect(where, LONGROPE_KEYS, "type", "longrope")
        self.check_effect(where, ("attention_factor",), "type", "yarn", "longrope")
        return self

    def check_fit(self, rope_theta: float, attention: str, n_channels: int) -> None:
        """Raise ValueError unless these settings fit a model with this `rope_theta`, `attention`,
        its `attention.type`, and `n_channels` rotated channels in a head."""
        for key in LONGROPE_KEYS:
            if (n := len(getattr(self, key))) not in (0, n_channels // 2):
                raise ValueError(
                    f"model.rope_scaling.{key} has {n} numbers, and {n_channels // 2} pairs of a "
                    "head's channels rotate: give one for each, or leave it out"
                )
        if self.type == "longrope" and self.original_context_length < 2:
            raise ValueError(
                f"model.rope_scaling.original_context_length={self.original_context_length} must "
                "be above 1: attention is sharpened by its logarithm"
            )
        if self.type == "dynamic" and n_channels <= 2:
            raise ValueError(
                f"model.rope_scaling.type='dynamic' spreads the change over a head's pairs of "
                f"channels, and {n_channels} channels rotate; more must, or take 'linear'"
            )
        if self.type == "yarn" and rope_theta <= 1:
            raise ValueError(
                f"model.rope_theta={rope_theta} must be above 1 with model.rope_scaling.type="
                "'yarn': frequencies fall from one pair of channels to the next"
            )
        if self.mscale_all_dim and attention != "latent":
            raise ValueError(
                f"model.rope_scaling.mscale_all_dim={self.mscale_all_dim} is of latent attention, "
                f"and model.attention.type={attention!r}; leave it out, and set attention_factor"
            )

    @property
    def goes_by_length(self) -> bool:
        """Whether frequencies depend on the length of the text."""
        return self.type in ("dynamic", "longrope")

    def begins_anew_at(self, n_tokens: int) -> bool:
        """Return whether a text of `n_tokens` has other frequencies than one token before, so that
        what was cached of it is computed again. With `dynamic`, cached keys keep theirs."""
        return self.type == "longrope" and n_tokens == self.original_context_length + 1

    @property
    def rotation_factor(self) -> float:
        """The factor of rotated queries and keys: with `yarn` and `longrope` `attention_factor`, or
        its default; otherwise 1."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.type == "longrope":
            longer = math.log(max(self.factor, 1.0)) / math.log(self.original_context_length)
            return math.sqrt(1.0 + longer)
        return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """The factor of attention scores in latent attention; 1 unless `mscale_all_dim` is set."""
        return self._sharpening(self.mscale_all_dim) ** 2

    def _sharpening(self, mscale: float) -> float:
        """Return 0.1 · mscale · ln(factor) + 1, from the YaRN paper, section 3.4, where `mscale` is
        1; 1 for a factor up to 1."""
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1.0
