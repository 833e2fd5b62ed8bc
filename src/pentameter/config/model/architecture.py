"""The schema of `[model]`: the architecture's keys, their defaults and rules, and what follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from pentameter.config.choices import FINAL_NORM, NORM_MAY_HAVE_BIAS, POSITION_TABLE, look_up
from pentameter.config.model.attention import AttentionConfig, AttentionSizes, is_named
from pentameter.config.model.feed_forward import ExpertsConfig, FeedForwardConfig, RouterConfig
from pentameter.config.model.former_keys import TABLES, former_keys, with_present_keys
from pentameter.config.model.rope_scaling import RopeScalingConfig
from pentameter.config.section import (
    Depth,
    Factor,
    NonNegative,
    Positive,
    PositiveFloat,
    Rate,
    Section,
    Switch,
    Width,
)
from pentameter.errors import ConfigError, listed, nearest_divisors

ROTARY_KEYS = (
    "rope_theta",
    "window_rope_theta",
    "nope_layers",
    "rotary_fraction",
    "rope_scaling",
)
"""Keys that act with `positions = "rotary"` only."""


RotationKind = Literal["whole", "window"]
"""Name of one of a model's rotations: that of the model, or that of layers with a window."""


class ModelConfig(AttentionSizes, Section):
    """The architecture. Names and shapes of its parameters: `pentameter.planning.gpt`."""

    vocab_size: Positive | None = None
    """Distinct tokens; taken from the tokenizer when absent."""
    vocab_multiple: Width = 1
    """Pad the embedding and head rows to a multiple of this; padded rows are never predicted."""
    context_length: Width = 256
    """Tokens the model sees at once (T)."""
    n_layers: Depth = 6
    """Transformer blocks."""
    d_model: Width = 384
    """Width of the residual stream (D)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation of the residual stream."""
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    """`pre`: x + f(norm(x)) and a final norm; `post`: norm(x + f(x)), as in the 2017 paper;
    `output`: x + norm(f(x)) and a final norm (OLMo 2); `both`: x + norm(f(norm(x))), of two norms,
    and a final norm (Gemma 2)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to a norm's variance, or to RMSNorm's mean square."""
    parallel_residual: Switch = False
    """Attention and feed-forward layer of a block read the same stream, each through its own norm,
    and are added together (GPT-NeoX)."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """Position encoding; `rotary` rotates queries and keys (Su et al. 2021)."""
    rope_theta: PositiveFloat = 10000.0
    """Rotary: the base of the frequencies, theta^(-2i / channels)."""
    window_rope_theta: PositiveFloat | None = None
    """Rotary: the base in layers with a sliding window, where rope_scaling does not act (Gemma 3);
    as in other layers when absent."""
    nope_layers: Positive | tuple[NonNegative, ...] | None = None
    """Rotary: layers that rotate nothing, so that their attention knows no positions (SmolLM3):
    every so many, the last of them, or a list of layers, counted from 0. None when absent."""
    rotary_fraction: Factor = 1.0
    """Rotary: fraction of a head's channels that are rotated, the first ones."""
    tied_head: Switch = True
    """The output projection uses the token embedding's weight."""
    head_bias: Switch = False
    """A bias on the output projection."""
    bias: Switch = False
    """Biases on the other linear layers and on the norms."""
    logit_softcap: PositiveFloat | None = None
    """Logits become softcap · tanh(logits / softcap), which bounds them (Gemma 2)."""
    dropout: Rate = 0.0
    """After each sub-layer's output projection."""
    embedding_dropout: Rate | None = None
    """After the embedding; `dropout` when absent."""
    init: Literal["normal", "uniform"] = "normal"
    """`normal`: weights N(0, init_std), biases 0. `uniform`: embedding and head U(±0.1), block
    matrices U(±fan_in^-0.5) with the query/key/value projection Xavier-uniform, biases 0."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of `init = "normal"`."""
    residual_init_scale: Switch = False
    """Scale both residual projections of a block by (2 · n_layers)^-0.5 initially (GPT-2)."""
    embedding_scale: Switch = False
    """Multiply token embeddings by √d_model (the 2017 Transformer)."""
    attention: AttentionConfig = AttentionConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    experts: ExpertsConfig = ExpertsConfig()
    router: RouterConfig = RouterConfig()
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Rotary: frequencies for a longer context."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_keys(cls, values: Any) -> Any:
        return with_present_keys(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        n_heads = self.attention.n_heads
        if self.attention.head_size is None and self.d_model % n_heads:
            raise ValueError(
                f"model.attention.n_heads={n_heads} must divide model.d_model={self.d_model}; "
                f"nearest possible: {listed(nearest_divisors(self.d_model, n_heads))}, or set "
                "model.attention.head_size"
            )
        _check_latent(self)
        _check_positions(self)
        if self.parallel_residual and self.norm_position != "pre":
            raise ValueError(
                "model.parallel_residual=true adds both layers of a block at once, and "
                f"model.norm_position={self.norm_position!r} norms between them; set "
                "model.norm_position='pre'"
            )
        if self.experts.count is not None:
            self.experts.check_layers(self.n_layers)
        pattern = self.attention.sliding_window_pattern
        _check_listed("model.attention.sliding_window_pattern", pattern, self.n_layers)
        _check_listed("model.nope_layers", self.nope_layers, self.n_layers)
        self.router.check_experts(self.experts)
        return self

    if not TYPE_CHECKING:  # our own code has the present names

        def __getattr__(self, name: str) -> Any:
            """Return the value of a key by its former name, for custom models and hooks."""
            path = former_keys().get(name)
            return super().__getattr__(name) if path is None else attrgetter(path)(self)

    @property
    def padded_vocab_size(self) -> int:
        """The row count in embedding and head: `vocab_size`, rounded up to a multiple of
        `vocab_multiple`. Raises ConfigError if `vocab_size` is not set."""
        if self.vocab_size is None:
            raise ConfigError(
                "model.vocab_size is not set; take it from the tokenizer, or set --model.vocab_size"
            )
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def feed_forward_width(self) -> int:
        """The feed-forward layer's inner width: `width`, or 4 · `d_model` if that is None."""
        width = self.feed_forward.width
        return width if width is not None else 4 * self.d_model

    @property
    def expert_width(self) -> int:
        """An expert's inner width: `width`, or `feed_forward_width` if that is None."""
        width = self.experts.width
        return width if width is not None else self.feed_forward_width

    @property
    def embedding_dropout_rate(self) -> float:
        """The dropout rate after the embedding: `embedding_dropout` if it is set (0 included), else
        `dropout`, the rate after the sub-layers."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    def rotates_by(self, layer: int) -> RotationKind | None:
        """Return by which of the model's rotations layer number `layer`, from 0, rotates queries
        and keys: `window` in layers with a sliding window if they have a base of their own, else
        `whole`; None if the layer rotates nothing."""
        if self.positions != "rotary" or is_named(layer, self.nope_layers):
            return None
        has_own = self.window_rope_theta is not None and self.attention.has_window(layer)
        return "window" if has_own else "whole"

    @property
    def out_bias(self) -> bool:
        """Whether attention's output projection has a bias: `attention.out_bias`, or `bias` if that
        is None."""
        return self.bias if self.attention.out_bias is None else self.attention.out_bias

    @property
    def norm_has_bias(self) -> bool:
        """Whether norms have a bias: with `bias`, if `norm` is `layernorm`; RMSNorm has none by
        definition."""
        possible = look_up(NORM_MAY_HAVE_BIAS, self.norm, "model.norm", "the parameter table")
        return self.bias and possible

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm between the last block and the head: yes unless `norm_position`
        is `post`."""
        key = "model.norm_position"
        return look_up(FINAL_NORM, self.norm_position, key, "the parameter table")

    @property
    def has_position_table(self) -> bool:
        """Whether position embeddings are parameters, one row per position: if `positions` is
        `learned`."""
        return look_up(POSITION_TABLE, self.positions, "model.positions", "the parameter table")

    @property
    def resolved(self) -> ModelConfig:
        """The same architecture with defaults that follow from other keys (of sizes and biases)
        replaced by what follows, so that two of them can be compared. If every layer has experts,
        the feed-forward layer's width, which none uses, becomes an expert's."""
        sizes = {
            "feed_forward.width": self.feed_forward_width,
            "attention.head_size": self.head_channels,
            "attention.n_kv_heads": self.attention.kv_heads,
            "attention.out_bias": self.out_bias,
            "attention.score_size": self.attention.score_size or self.head_channels,
        }
        if self.attention.type == "latent":
            sizes |= {
                "attention.kv_rank": self.latent_channels,
                "attention.rope_head_size": self.rope_channels,
                "attention.v_head_size": self.value_channels,
            }
        if self.experts.count is not None:
            sizes |= {
                "experts.width": self.expert_width,
                "experts.per_token": self.experts.n_chosen,
            }
            if all(map(self.experts.are_in, range(self.n_layers))):  # no layer has another width
                sizes["feed_forward.width"] = self.expert_width
        return self.updated(sizes)


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Return key → value for all of `[model]`, with tables flattened: `n_layers`,
    `attention.n_heads`. Only `rope_scaling` stays one value, a section."""
    values: dict[str, Any] = {}
    for key, value in model:
        inside = {f"{key}.{name}": each for name, each in value} if key in TABLES else {key: value}
        values |= inside
    return values


def _check_listed(path: str, layers: int | tuple[int, ...] | None, n_layers: int) -> None:
    """Raise ValueError if the key at `path` lists a layer beyond the last of `n_layers`."""
    last = max(layers, default=0) if isinstance(layers, tuple) else 0
    if last >= n_layers:
        raise ValueError(
            f"{path} has layer {last}, and the last of model.n_layers={n_layers} is {n_layers - 1}"
        )


def _check_latent(model: ModelConfig) -> None:
    """Raise ValueError unless positions and sizes fit latent attention, if the model has it."""
    if model.attention.type != "latent":
        return
    if model.positions != "rotary":
        raise ValueError(
            f"model.attention.type='latent' rotates some channels of queries and keys, and "
            f"model.positions={model.positions!r}; set model.positions='rotary'"
        )
    if model.first_set(("rotary_fraction",)):
        raise ValueError(
            "model.attention.type='latent' says by model.attention.rope_head_size how many "
            "channels rotate; leave model.rotary_fraction out"
        )
    if model.first_set(("nope_layers",)):
        raise ValueError(
            "model.attention.type='latent' rotates some channels in every layer; leave "
            "model.nope_layers out"
        )
    if model.value_channels > model.query_channels:
        raise ValueError(
            f"model.attention.v_head_size={model.attention.v_head_size} must be at most "
            f"model.attention.head_size + model.attention.rope_head_size={model.query_channels}: "
            "one kernel multiplies both"
        )


def _check_positions(model: ModelConfig) -> None:
    """Raise ValueError if `d_model` is odd with sinusoidal positions, if rotary ones would rotate
    an odd number of channels, or if a key for rotary positions is set with others."""
    if model.positions == "sinusoidal" and model.d_model % 2:
        raise ValueError(
            f"model.d_model={model.d_model} must be even for model.positions='sinusoidal' "
            "(pairs of sine and cosine)"
        )
    model.check_effect("model", ROTARY_KEYS, "positions", "rotary")
    if model.window_rope_theta is not None and model.attention.sliding_window is None:
        raise ValueError(
            f"model.window_rope_theta={model.window_rope_theta} is the base in layers with a "
            "window, and model.attention.sliding_window is not set; set it, or leave both out"
        )
    if model.positions == "rotary":
        _check_rotary(model)
        scaling, n_channels = model.rope_scaling, model.turning_channels
        scaling.check_fit(model.rope_theta, model.attention.type, n_channels)


def _check_rotary(model: ModelConfig) -> None:
    """Raise ValueError unless head size · `rotary_fraction`, or latent attention's
    `rope_head_size`, is even (rotated channels are pairs)."""
    if model.attention.type == "latent":
        if model.rope_channels % 2 or not model.rope_channels:
            raise ValueError(
                f"model.attention.rope_head_size={model.rope_channels} must be a positive "
                "even number (pairs that turn)"
            )
        return
    size = model.head_channels
    n_turning = size * model.rotary_fraction
    # 0.14 · 100 is 14.000000000000002: a fraction means the number that it was rounded from.
    if round(n_turning) % 2 or not math.isclose(n_turning, round(n_turning), rel_tol=1e-9):
        below = n_turning // 2 * 2
        shares = [each / size for each in (below, below + 2) if 0 < each <= size]
        possible = listed(f"{share:.10g}" for share in shares)
        raise ValueError(
            f"model.rotary_fraction={model.rotary_fraction} of the {size} channels of a head is "
            f"{n_turning:.10g}, which must be an even number (pairs that turn); "
            + (f"nearest possible: {possible}" if shares else "give heads two channels or more")
        )
