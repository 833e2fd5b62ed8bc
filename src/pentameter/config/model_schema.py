"""The schema of `[model]`: the architecture's keys, their defaults and rules, and what follows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from pentameter.config.choices import (
    FINAL_NORM,
    GATES,
    NORM_MAY_HAVE_BIAS,
    POSITION_TABLE,
    look_up,
)
from pentameter.config.rope_scaling import RopeScalingConfig
from pentameter.config.section import (
    Depth,
    Factor,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Rate,
    Section,
    Switch,
    Width,
)
from pentameter.errors import ConfigError, listed, nearest_divisors

LATENT_KEYS = ("kv_rank", "q_rank", "rope_head_size", "v_head_size")
"""Keys that act with `attention = "latent"` only."""

EXPERT_KEYS = (
    "experts_per_token",
    "d_expert",
    "n_shared_experts",
    "shared_expert_gate",
    "dense_layers",
    "router",
    "router_top_k_first",
    "router_renormalize",
    "router_scale",
    "router_bias",
    "router_groups",
    "router_open_groups",
    "router_group_scores",
    "balance",
    "balance_rate",
    "balance_weight",
    "router_z_loss",
    "expert_capacity",
)
"""Keys that act with `n_experts` only."""


class AttentionSizes:
    """The sizes that follow from attention's keys: a base of ModelConfig, which has the keys."""

    if TYPE_CHECKING:
        context_length: int
        d_model: int
        n_heads: int
        n_kv_heads: int | None
        head_size: int | None
        attention: Literal["multi_head", "latent"]
        kv_rank: int | None
        rope_head_size: int | None
        v_head_size: int | None
        rotary_fraction: float
        sliding_window: int | None
        sliding_window_pattern: int | None

    @property
    def head_channels(self) -> int:
        """The channels per attention head: `head_size`; if that is None, `d_model` ÷ `n_heads`."""
        return self.head_size if self.head_size is not None else self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads: `n_kv_heads`, or `n_heads` if that is None."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several query heads share keys and values (grouped-query attention). Keys and
        values then have a separate projection matrix; otherwise one fused matrix computes queries,
        keys and values."""
        return self.kv_heads != self.n_heads

    @property
    def turning_channels(self) -> int:
        """The channels per head that rotary embeddings rotate, an even number: `head_channels` ·
        `rotary_fraction`, or `rope_channels` with latent attention."""
        if self.attention == "latent":
            return self.rope_channels
        return round(self.head_channels * self.rotary_fraction)

    @property
    def latent_channels(self) -> int:
        """With latent attention, the numbers per token that keys and values are computed from:
        `kv_rank`, or its default."""
        return self.kv_rank if self.kv_rank is not None else 4 * self.head_channels

    @property
    def rope_channels(self) -> int:
        """With latent attention, the rotated channels that queries and keys have in addition to
        `head_channels`: `rope_head_size`, or its default."""
        size = self.rope_head_size
        return size if size is not None else self.head_channels // 2

    @property
    def query_channels(self) -> int:
        """The channels per head that a query and a key have, the rotated ones included."""
        return self.head_channels + (self.rope_channels if self.attention == "latent" else 0)

    @property
    def value_channels(self) -> int:
        """The channels per head that a value has."""
        return self.head_channels if self.v_head_size is None else self.v_head_size

    @property
    def cached_per_token(self) -> tuple[int, int, int]:
        """The sizes that a cache has for a token and layer: number of heads, channels per head of
        the first tensor (keys), and of the second (values). With latent attention the first is the
        latent, and the second the rotated key, which all heads share."""
        if self.attention == "latent":
            return 1, self.latent_channels, self.rope_channels
        return self.kv_heads, self.head_channels, self.head_channels

    def window(self, layer: int) -> int | None:
        """Return how many tokens a query in layer number `layer`, from 0, attends to, itself
        included; None for the whole prefix. This is `sliding_window`, except in every
        `sliding_window_pattern`-th layer, or if the window is no shorter than the context."""
        size, every = self.sliding_window, self.sliding_window_pattern
        if size is None or size >= self.context_length:
            return None
        return None if every is not None and (layer + 1) % every == 0 else size


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
    n_heads: Width = 6
    """Attention heads (H)."""
    n_kv_heads: Width | None = None
    """Heads of keys and values, each shared by n_heads / n_kv_heads queries (grouped-query
    attention; 1 is multi-query); n_heads when absent."""
    head_size: Width | None = None
    """Channels of a head (K); d_model / n_heads when absent."""
    attention: Literal["multi_head", "latent"] = "multi_head"
    """`latent`: a token's keys and values are computed from kv_rank numbers, which the cache holds
    in their place (multi-head latent attention, DeepSeek-V2)."""
    kv_rank: Width | None = None
    """`latent`: the numbers from which keys and values are computed; 4 × head_size when absent."""
    q_rank: Width | None = None
    """`latent`: as many numbers from which queries are computed; straight from the stream when
    absent."""
    rope_head_size: Width | None = None
    """`latent`: channels beside head_size that rotate; one key of them serves all heads. Half of
    head_size when absent."""
    v_head_size: Width | None = None
    """`latent`: channels of a value, at most head_size + rope_head_size; head_size when absent."""
    qk_norm: Literal["head", "width"] | None = None
    """RMSNorm of queries and keys before positions act: `head` of each head's channels (Qwen 3),
    `width` of all heads' together (OLMo 2). None ("none") has none."""
    attention_sinks: Switch = False
    """A learned number per head takes part in the softmax of its attention scores, as one more key
    without a value, so that a head's weights may sum to less than 1 (gpt-oss)."""
    sliding_window: Positive | None = None
    """Tokens that a query sees, itself included; all earlier ones when absent."""
    sliding_window_pattern: Positive | None = None
    """With a window, every so many layers the last one sees the whole context; none when absent."""
    d_model: Width = 384
    """Width of the residual stream (D)."""
    d_ff: Width | None = None
    """Width of the feed-forward layer; 4 × d_model when absent."""
    activation: Literal[
        "relu", "relu2", "gelu", "gelu_tanh", "swiglu", "geglu", "swiglu_clamped"
    ] = "gelu"
    """Feed-forward non-linearity; `gelu` is exact, `gelu_tanh` GPT-2's approximation, `relu2` the
    square of `relu`. `swiglu` and `geglu` are SiLU or GELU of a gate, a matrix of its own, times
    the layer's inner width (Shazeer 2020). `swiglu_clamped`: gate · sigmoid(swiglu_alpha · gate) ·
    (inner width + 1), the gate at most swiglu_limit, the inner width within ± swiglu_limit
    (gpt-oss)."""
    swiglu_alpha: PositiveFloat = 1.702
    """`swiglu_clamped`: factor of the gate in the sigmoid."""
    swiglu_limit: PositiveFloat = 7.0
    """`swiglu_clamped`: bound of the gate and the inner width."""
    n_experts: Positive | None = None
    """Experts (E) in a layer: feed-forward layers, of which a router chooses some for each token;
    one feed-forward layer for all tokens when absent."""
    experts_per_token: Positive | None = None
    """Experts that the router chooses for a token; 2 when absent."""
    d_expert: Width | None = None
    """Width of an expert; d_ff when absent."""
    n_shared_experts: NonNegative = 0
    """Experts that take every token, as one feed-forward layer so many times d_expert wide."""
    shared_expert_gate: Switch = False
    """Multiply the shared experts' output by a learned number per token, a sigmoid (Qwen2-MoE)."""
    dense_layers: NonNegative | tuple[NonNegative, ...] = 0
    """Layers with one feed-forward layer instead of experts: so many first ones, or a list of
    layers, counted from 0."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """A token's scores of the experts: a softmax of its router logits, or the sigmoid of each
    (DeepSeek-V3). The k highest are chosen, of equal ones the lower expert, and weigh the
    experts' outputs."""
    router_top_k_first: Switch = False
    """`softmax` of the chosen experts' logits alone (gpt-oss), which sums to 1."""
    router_renormalize: Switch = False
    """Divide the chosen scores by their sum."""
    router_scale: PositiveFloat = 1.0
    """Factor of the chosen scores."""
    router_bias: Switch = False
    """A bias on the router's logits (gpt-oss)."""
    router_groups: Positive | None = None
    """Groups that the experts form, in order; a token chooses within `router_open_groups` of them,
    those whose `router_group_scores` highest scores sum to the most."""
    router_open_groups: Positive | None = None
    """Groups within which a token chooses; needs router_groups."""
    router_group_scores: Positive = 2
    """Scores by whose sum a group is compared with others, its highest: 2 (DeepSeek-V3) or 1
    (DeepSeek-V2)."""
    balance: Literal["none", "bias", "sequence", "batch"] = "none"
    """Method of balancing experts. `bias`: a number is added to each expert's score for
    choosing alone, and moves by balance_rate each step, up where the step's batch gave the expert
    fewer tokens than the mean (DeepSeek-V3). `sequence`: a loss for each sequence. `batch`: a loss
    over the step's batch, with the fractions of tokens of the step before."""
    balance_rate: PositiveFloat = 0.001
    """`bias`: by how much it moves in a step."""
    balance_weight: PositiveFloat = 0.01
    """`sequence`, `batch`: the loss's factor. It is 1 where experts get equally many tokens."""
    router_z_loss: NonNegativeFloat = 0.0
    """Factor of the mean squared log-sum-exp of a token's router logits (Zoph et al. 2022)."""
    expert_capacity: PositiveFloat | None = None
    """Tokens that an expert takes from a sequence, as a multiple of an equal share of
    context_length tokens; it leaves out later ones. When absent, all."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation of the residual stream."""
    norm_position: Literal["pre", "post", "output"] = "pre"
    """`pre`: x + f(norm(x)) and a final norm; `post`: norm(x + f(x)), as in the 2017 paper;
    `output`: x + norm(f(x)) and a final norm (OLMo 2)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to a norm's variance, or to RMSNorm's mean square."""
    parallel_residual: Switch = False
    """Attention and feed-forward layer of a block read the same stream, each through its own norm,
    and are added together (GPT-NeoX)."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """Position encoding; `rotary` rotates queries and keys (Su et al. 2021)."""
    rope_theta: PositiveFloat = 10000.0
    """Rotary: the base of the frequencies, theta^(-2i / channels)."""
    rotary_fraction: Factor = 1.0
    """Rotary: fraction of a head's channels that are rotated, the first ones."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Rotary: frequencies for a longer context."""
    tied_head: Switch = True
    """The output projection uses the token embedding's weight."""
    head_bias: Switch = False
    """A bias on the output projection."""
    qkv_bias: Switch = False
    """A bias on the query, key and value projections."""
    bias: Switch = False
    """Biases on the other linear layers and on the norms."""
    logit_softcap: PositiveFloat | None = None
    """Logits become softcap · tanh(logits / softcap), which bounds them (Gemma 2)."""
    dropout: Rate = 0.0
    """After each sub-layer's output projection."""
    attention_dropout: Rate = 0.0
    """On the attention weights."""
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_size is None and self.d_model % self.n_heads:
            near = ", ".join(map(str, nearest_divisors(self.d_model, self.n_heads)))
            raise ValueError(
                f"model.n_heads={self.n_heads} must divide model.d_model={self.d_model}; "
                f"nearest possible: {near}, or set model.head_size"
            )
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            near = ", ".join(map(str, nearest_divisors(self.n_heads, self.n_kv_heads)))
            raise ValueError(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}; "
                f"nearest possible: {near}"
            )
        _check_latent(self)
        _check_positions(self)
        _check_activation(self)
        if self.parallel_residual and self.norm_position != "pre":
            raise ValueError(
                "model.parallel_residual=true adds both layers of a block at once, and "
                f"model.norm_position={self.norm_position!r} norms between them; set "
                "model.norm_position='pre'"
            )
        if self.sliding_window_pattern is not None and self.sliding_window is None:
            raise ValueError(
                f"model.sliding_window_pattern={self.sliding_window_pattern} says which layers "
                "have no window, and model.sliding_window is not set; set it, or leave both out"
            )
        _check_experts(self)
        return self

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
        """The feed-forward layer's inner width: `d_ff`, or 4 · `d_model` if that is None."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    @property
    def n_chosen(self) -> int:
        """The number of experts that a token is sent to (k): `experts_per_token`, or 2 if that is
        None."""
        return 2 if self.experts_per_token is None else self.experts_per_token

    @property
    def expert_width(self) -> int:
        """An expert's inner width: `d_expert`, or `feed_forward_width` if that is None."""
        return self.d_expert if self.d_expert is not None else self.feed_forward_width

    def has_experts(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, has experts instead of one feed-forward
        layer: with `n_experts`, all layers except `dense_layers` (the first so many, or those
        listed)."""
        if self.n_experts is None:
            return False
        dense = self.dense_layers
        return layer >= dense if isinstance(dense, int) else layer not in dense

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward layer has a gate, a further matrix with the shape of `up`: with
        the activations `swiglu`, `geglu` and `swiglu_clamped`."""
        return look_up(GATES, self.activation, "model.activation", "the parameter table")

    @property
    def embedding_dropout_rate(self) -> float:
        """The dropout rate after the embedding: `embedding_dropout` if it is set (0 included), else
        `dropout`, the rate after the sub-layers."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

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
        """The same architecture with the default sizes filled in: `d_ff`, `head_size`,
        `n_kv_heads`, and an expert's; `d_ff` is `d_expert` if every layer has experts. Two resolved
        architectures can be compared."""
        sizes = {
            "d_ff": self.feed_forward_width,
            "head_size": self.head_channels,
            "n_kv_heads": self.kv_heads,
        }
        if self.attention == "latent":
            sizes |= {
                "kv_rank": self.latent_channels,
                "rope_head_size": self.rope_channels,
                "v_head_size": self.value_channels,
            }
        if self.n_experts is not None:
            sizes |= {"d_expert": self.expert_width, "experts_per_token": self.n_chosen}
            if all(map(self.has_experts, range(self.n_layers))):  # then no layer has another width
                sizes["d_ff"] = self.expert_width
        return self.model_copy(update=sizes)


def _check_latent(model: ModelConfig) -> None:
    """Raise ValueError unless the keys of latent attention, and those that it excludes, fit it."""
    if model.attention != "latent":
        for key in LATENT_KEYS:
            if not _is_default(model, key):
                raise ValueError(
                    f"model.{key} is of latent attention, and model.attention="
                    f"{model.attention!r}; set model.attention='latent', or leave it out"
                )
        return
    if model.positions != "rotary":
        raise ValueError(
            f"model.attention='latent' rotates some channels of queries and keys, and "
            f"model.positions={model.positions!r}; set model.positions='rotary'"
        )
    reasons = {
        "n_kv_heads": "computes keys and values of each head from the same numbers",
        "qk_norm": "norms the numbers that keys and queries are computed from",
        "attention_sinks": "has no sinks beside its keys",
        "rotary_fraction": "says by model.rope_head_size how many channels rotate",
    }
    for key, reason in reasons.items():
        if not _is_default(model, key):
            raise ValueError(f"model.attention='latent' {reason}; leave model.{key} out")
    if model.value_channels > model.query_channels:
        raise ValueError(
            f"model.v_head_size={model.v_head_size} must be at most model.head_size + "
            f"model.rope_head_size={model.query_channels}: one kernel multiplies both"
        )


def _is_default(model: ModelConfig, key: str) -> bool:
    """Return whether a key has its default value."""
    return bool(getattr(model, key) == ModelConfig.model_fields[key].default)


def _check_activation(model: ModelConfig) -> None:
    """Raise ValueError if a key of the clamped SwiGLU is set with another activation."""
    for key in ("swiglu_alpha", "swiglu_limit"):
        if model.activation != "swiglu_clamped" and not _is_default(model, key):
            raise ValueError(
                f"model.{key} is of a clamped SwiGLU, and model.activation="
                f"{model.activation!r}; set model.activation='swiglu_clamped', or leave it out"
            )


def _check_experts(model: ModelConfig) -> None:
    """Raise ValueError unless the keys about experts fit each other: none is set without
    `n_experts`, no more experts are chosen than there are, and at least one layer has experts."""
    if model.n_experts is None:
        for key in EXPERT_KEYS:
            if not _is_default(model, key):
                raise ValueError(
                    f"model.{key} is of experts, and model.n_experts is not set; set it, or "
                    "leave both out"
                )
        return
    E, k = model.n_experts, model.n_chosen
    if k > E:
        raise ValueError(f"model.experts_per_token={k} must be at most model.n_experts={E}")
    if isinstance(model.dense_layers, int):
        if model.dense_layers >= model.n_layers:
            raise ValueError(
                f"model.dense_layers={model.dense_layers} leaves none of model.n_layers="
                f"{model.n_layers} with experts; lower it, or leave model.n_experts out"
            )
    elif model.dense_layers and max(model.dense_layers) >= model.n_layers:
        raise ValueError(
            f"model.dense_layers has layer {max(model.dense_layers)}, and the last of "
            f"model.n_layers={model.n_layers} is {model.n_layers - 1}"
        )
    elif len(set(model.dense_layers)) == model.n_layers:
        raise ValueError(
            "model.dense_layers lists every layer, which leaves none with experts; leave "
            "model.n_experts out"
        )
    if model.shared_expert_gate and not model.n_shared_experts:
        raise ValueError(
            "model.shared_expert_gate=true gates shared experts, and there are none; set "
            "model.n_shared_experts, or leave it out"
        )
    _check_router(model)


def _check_router(model: ModelConfig) -> None:
    """Raise ValueError unless the router's keys fit each other: how it scores, balances and groups
    experts. Groups must have equal sizes, and the open ones hold `experts_per_token` experts."""
    E, k, groups = model.n_experts, model.n_chosen, model.router_groups
    assert E is not None
    if model.router_top_k_first and (model.router != "softmax" or model.router_renormalize):
        other = "router_renormalize=true" if model.router == "softmax" else "router='sigmoid'"
        raise ValueError(
            "model.router_top_k_first=true is a softmax of the chosen logits, which sums to 1: "
            f"model.{other} does not go with it; leave one out"
        )
    if model.router_top_k_first and model.balance == "bias":
        raise ValueError(
            "model.balance='bias' is added to scores before experts are chosen, and "
            "model.router_top_k_first=true has scores of the chosen ones alone; leave one out"
        )
    if (groups is None) != (model.router_open_groups is None):
        raise ValueError(
            "model.router_groups and model.router_open_groups say how many groups there are "
            "and how many a token chooses from; set both, or neither"
        )
    if groups is None and not _is_default(model, "router_group_scores"):
        raise ValueError(
            f"model.router_group_scores={model.router_group_scores} compares groups, and "
            "model.router_groups is not set; set it, or leave both out"
        )
    if groups is not None and model.router_open_groups is not None:
        if E % groups or E // groups < model.router_group_scores:
            near = ", ".join(map(str, nearest_divisors(E, groups)))
            raise ValueError(
                f"model.router_groups={groups} must divide model.n_experts={E} into groups of at "
                f"least model.router_group_scores={model.router_group_scores}; nearest possible: "
                f"{near}"
            )
        if model.router_open_groups > groups or model.router_open_groups * E // groups < k:
            raise ValueError(
                f"model.router_open_groups={model.router_open_groups} of {groups} groups of "
                f"{E // groups} experts must hold model.experts_per_token={k}, and be at most "
                f"{groups}"
            )
    for key, owners in (("balance_rate", ("bias",)), ("balance_weight", ("sequence", "batch"))):
        if model.balance not in owners and not _is_default(model, key):
            raise ValueError(
                f"model.{key} is of model.balance={' or '.join(map(repr, owners))}, and it is "
                f"{model.balance!r}; set that, or leave it out"
            )


def _check_positions(model: ModelConfig) -> None:
    """Raise ValueError if `d_model` is odd with sinusoidal positions, if rotary ones would rotate
    an odd number of channels, or if a key for rotary positions is set with others."""
    if model.positions == "sinusoidal" and model.d_model % 2:
        raise ValueError(
            f"model.d_model={model.d_model} must be even for model.positions='sinusoidal' "
            "(pairs of sine and cosine)"
        )
    if model.positions == "rotary":
        _check_rotary(model)
    else:
        for key in ("rope_theta", "rotary_fraction", "rope_scaling"):
            if not _is_default(model, key):
                raise ValueError(
                    f"model.{key} is of rotary positions, and model.positions="
                    f"{model.positions!r}; set model.positions='rotary', or leave it out"
                )


def _check_rotary(model: ModelConfig) -> None:
    """Raise ValueError unless head size · `rotary_fraction`, or latent attention's
    `rope_head_size`, is even (rotated channels are pairs), and `rope_scaling` fits the model."""
    model.rope_scaling.check_fit(model.rope_theta, model.attention)
    if model.attention == "latent":
        if model.rope_channels % 2 or not model.rope_channels:
            raise ValueError(
                f"model.rope_head_size={model.rope_channels} must be a positive even number (pairs "
                "that turn)"
            )
        return
    size = model.head_size or model.d_model // model.n_heads
    n_turning = size * model.rotary_fraction
    # 0.14 · 100 is 14.000000000000002: a fraction means the number that it was rounded from.
    if round(n_turning) % 2 or not math.isclose(n_turning, round(n_turning), rel_tol=1e-9):
        below = n_turning // 2 * 2
        shares = (each / size for each in (below, below + 2) if 0 < each <= size)
        raise ValueError(
            f"model.rotary_fraction={model.rotary_fraction} of the {size} channels of a head is "
            f"{n_turning:.10g}, which must be an even number (pairs that turn); nearest possible: "
            f"{listed(f'{share:.10g}' for share in shares)}"
        )
