"""The schema of `[model.attention]`, and the sizes that follow from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from pentameter.config.section import NonNegative, Positive, Rate, Section, Switch, Width
from pentameter.errors import listed, nearest_divisors

LATENT_KEYS = ("kv_rank", "q_rank", "rope_head_size", "v_head_size")
"""Keys that act with `type = "latent"` only."""

_WITHOUT_LATENT = {
    "n_kv_heads": "computes keys and values of each head from the same numbers",
    "qk_norm": "norms the numbers that keys and queries are computed from",
    "sinks": "has no sinks beside its keys",
    "score_size": "divides scores by the square root of a query's channels",
}


class AttentionConfig(Section):
    """Attention: its heads, what they see, and how queries, keys and values are computed."""

    type: Literal["multi_head", "latent"] = "multi_head"
    """`latent`: a token's keys and values are computed from kv_rank numbers, which the cache holds
    in their place (multi-head latent attention, DeepSeek-V2)."""
    n_heads: Width = 6
    """Attention heads (H)."""
    n_kv_heads: Width | None = None
    """Heads of keys and values, each of which serves n_heads / n_kv_heads query heads
    (grouped-query attention; 1 is multi-query); n_heads when absent."""
    head_size: Width | None = None
    """Channels of a head (K); d_model / n_heads when absent."""
    kv_rank: Width | None = None
    """`latent`: numbers per token from which keys and values are computed; 4 × head_size when
    absent."""
    q_rank: Width | None = None
    """`latent`: numbers per token from which queries are computed; when absent, they are computed
    from the residual stream directly."""
    rope_head_size: Width | None = None
    """`latent`: rotated channels that each query and key has in addition to head_size; those of the
    key are the same for all heads. Half of head_size when absent."""
    v_head_size: Width | None = None
    """`latent`: channels of a value, at most head_size + rope_head_size; head_size when absent."""
    qk_norm: Literal["head", "width"] | None = None
    """RMSNorm of queries and keys before positions act: `head` of each head's channels (Qwen 3),
    `width` of all heads' together (OLMo 2). None ("none") has none."""
    score_size: Width | None = None
    """Attention scores are divided by the square root of this number (Gemma 2); head_size when
    absent."""
    sinks: Switch = False
    """A learned number per head takes part in the softmax of its attention scores, as one more key
    without a value, so that a head's weights may sum to less than 1 (gpt-oss)."""
    sliding_window: Positive | None = None
    """Tokens that a query sees, itself included; all earlier ones when absent."""
    sliding_window_pattern: Positive | tuple[NonNegative, ...] | None = None
    """With sliding_window: layers that see the whole context instead, every so many, the last of
    them, or a list of layers, counted from 0. All layers have the window when absent."""
    qkv_bias: Switch = False
    """A bias on the query, key and value projections."""
    out_bias: Switch | None = None
    """A bias on the output projection; as model.bias says when absent."""
    dropout: Rate = 0.0
    """On the attention weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.attention.n_kv_heads={self.n_kv_heads} must divide model.attention.n_heads="
                f"{self.n_heads}; nearest possible: "
                f"{listed(nearest_divisors(self.n_heads, self.n_kv_heads))}"
            )
        if self.sliding_window_pattern is not None and self.sliding_window is None:
            raise ValueError(
                f"model.attention.sliding_window_pattern={self.sliding_window_pattern} says which "
                "layers have no window, and model.attention.sliding_window is not set; set it, or "
                "leave both out"
            )
        self.check_effect("model.attention", LATENT_KEYS, "type", "latent")
        key = self.first_set(_WITHOUT_LATENT)
        if self.type == "latent" and key is not None:
            raise ValueError(
                f"model.attention.type='latent' {_WITHOUT_LATENT[key]}; leave "
                f"model.attention.{key} out"
            )
        return self

    def has_window(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, has a sliding window, which may be longer
        than the context: with `sliding_window`, all but those that `sliding_window_pattern`
        names."""
        return self.sliding_window is not None and not is_named(layer, self.sliding_window_pattern)

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


class AttentionSizes:
    """The sizes of attention that also follow from the model's width, positions and context: a base
    of ModelConfig, which has the keys."""

    if TYPE_CHECKING:
        attention: AttentionConfig
        context_length: int
        d_model: int
        rotary_fraction: float

    @property
    def head_channels(self) -> int:
        """The channels per attention head: `head_size`; if that is None, `d_model` ÷ `n_heads`."""
        attention = self.attention
        if attention.head_size is not None:
            return attention.head_size
        return self.d_model // attention.n_heads

    @property
    def turning_channels(self) -> int:
        """The channels per head that rotary embeddings rotate, an even number: `head_channels` ·
        `rotary_fraction`, or `rope_channels` with latent attention."""
        if self.attention.type == "latent":
            return self.rope_channels
        return round(self.head_channels * self.rotary_fraction)

    @property
    def query_factor(self) -> float:
        """The factor of queries, 1 unless `attention.score_size` is set: attention divides their
        scores by the square root of `head_channels`, and the model by that of `score_size`."""
        size = self.attention.score_size
        return 1.0 if size is None else (self.head_channels / size) ** 0.5

    @property
    def latent_channels(self) -> int:
        """With latent attention, the numbers per token that keys and values are computed from:
        `kv_rank`, or its default."""
        rank = self.attention.kv_rank
        return rank if rank is not None else 4 * self.head_channels

    @property
    def rope_channels(self) -> int:
        """With latent attention, the rotated channels that queries and keys have in addition to
        `head_channels`: `rope_head_size`, or its default."""
        size = self.attention.rope_head_size
        return size if size is not None else self.head_channels // 2

    @property
    def query_channels(self) -> int:
        """The channels per head that a query and a key have, the rotated ones included."""
        rotated = self.rope_channels if self.attention.type == "latent" else 0
        return self.head_channels + rotated

    @property
    def value_channels(self) -> int:
        """The channels per head that a value has."""
        size = self.attention.v_head_size
        return self.head_channels if size is None else size

    @property
    def cached_per_token(self) -> tuple[int, int, int]:
        """The sizes that a cache has for a token and layer: number of heads, channels per head of
        the first tensor (keys), and of the second (values). With latent attention the first is the
        latent, and the second the rotated key, which all heads share."""
        if self.attention.type == "latent":
            return 1, self.latent_channels, self.rope_channels
        return self.attention.kv_heads, self.head_channels, self.head_channels

    def window(self, layer: int) -> int | None:
        """Return how many tokens a query in layer number `layer`, from 0, attends to, itself
        included; None for the whole prefix. This is `sliding_window`, except in the layers that
        `sliding_window_pattern` names, or if the window is no shorter than the context."""
        size = self.attention.sliding_window
        if size is None or size >= self.context_length or not self.attention.has_window(layer):
            return None
        return size


def is_named(layer: int, layers: int | tuple[int, ...] | None) -> bool:
    """Return whether `layers`, the value of a key that names layers, names number `layer`, from 0:
    a number n names every nth layer, a tuple those in it, None no layer."""
    if isinstance(layers, int):
        return (layer + 1) % layers == 0
    return layers is not None and layer in layers
