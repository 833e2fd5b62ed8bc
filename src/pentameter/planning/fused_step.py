"""Whether fused operations support a configuration: the fused CPU step, and the GPU kernels for
attention with dropout.

An obstacle is text for a message that names the first unsupported setting; None means that there is
none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from pentameter.config.messages import shown
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.schema import Config
from pentameter.planning.layouts.layout import Layout

ANY = None

FUSES: Mapping[str, Collection[object] | None] = {
    "feed_forward.activation": ("relu", "relu2", "gelu", "gelu_tanh", "swiglu", "geglu"),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "sinusoidal", "rotary"),
    "attention.qk_norm": (None, "head", "width"),
    "attention.sliding_window_pattern": ANY,  # applies to sliding windows
    **dict.fromkeys(("rope_theta", "rotary_fraction", "rope_scaling"), ANY),
    **dict.fromkeys(
        ("attention.n_kv_heads", "attention.head_size", "norm_eps", "logit_softcap"), ANY
    ),
    **dict.fromkeys(("vocab_size", "vocab_multiple", "context_length"), ANY),
    **dict.fromkeys(("n_layers", "attention.n_heads", "d_model", "feed_forward.width"), ANY),
    **dict.fromkeys(
        ("tied_head", "head_bias", "attention.qkv_bias", "bias", "embedding_scale"), ANY
    ),
    **dict.fromkeys(("dropout", "attention.dropout", "embedding_dropout"), ANY),
    **dict.fromkeys(("init", "init_std", "residual_init_scale"), ANY),
    **dict.fromkeys(
        ("experts.count", "experts.per_token", "experts.width", "experts.dense_layers"), ANY
    ),
    **dict.fromkeys(("experts.n_shared", "experts.shared_gate", "experts.capacity"), ANY),
    "router.score_function": ("softmax", "sigmoid"),
    **dict.fromkeys(("router.top_k_first", "router.renormalize", "router.scale"), ANY),
    **dict.fromkeys(("router.bias", "router.groups", "router.open_groups"), ANY),
    **dict.fromkeys(("router.group_scores", "router.z_loss"), ANY),
    "router.balance": ("none", "bias", "sequence", "batch"),
    **dict.fromkeys(("router.balance_rate", "router.balance_weight"), ANY),
}
"""Maps a key in `[model]` to the values that the fused CPU step (`fused_loss_sum`) supports; ANY
for every value. A key that is not listed is supported at its default only, which is how models were
before the key existed. With any other value the plain model runs instead of the fused one."""


FUSED_PRECISIONS = ("auto", "fp64", "fp32", "tf32", "bf16", "fp16")
"""`train.precision` values whose matmuls the fused step computes."""


def architecture_obstacle(config: ModelConfig) -> str | None:
    """Return, as text, the first key in `[model]` whose value the fused CPU step (`fused_loss_sum`)
    does not support; None if it supports the architecture."""
    defaults = architecture(type(config)())
    for key, value in architecture(config).items():
        possible = FUSES.get(key, (defaults[key],))
        if possible is not None and value not in possible:
            return f"model.{key}={shown(value)}"
    return None


def fused_obstacle(config: Config, layout: Layout, built_by: str | None = None) -> str | None:
    """Return, as text, a run's first setting that the fused CPU step does not support, so that
    torch compiles the plain model instead; None if the fused step can run it. `built_by` names the
    function that builds a custom model, which is never supported; None for the GPT."""
    if built_by is not None:
        return f"the module that {built_by} builds"
    obstacle = architecture_obstacle(config.model)
    if obstacle is not None:
        return obstacle
    if config.train.precision not in FUSED_PRECISIONS:
        return f"train.precision={config.train.precision!r}"
    if config.lora.rank is not None:
        return f"lora.rank={config.lora.rank}"
    copies = asdict(Layout(data=layout.data))  # the fused step supports data parallelism only
    for name, value in asdict(layout).items():
        if value != copies[name]:
            return f"parallel.{name}={value}"
    how = config.train.activation_checkpoint
    return None if how is None else f"train.activation_checkpoint={how!r}"


MOST_KERNEL_CHANNELS = 128
"""Largest head size in channels for which the kernels that drop attention weights fit a tile into a
GPU's registers and shared memory."""


def dropout_kernel_obstacle(model: ModelConfig, layout: Layout, precision: str) -> str | None:
    """Return, as text, a run's first setting for which attention with dropout must materialize its
    weights on a GPU; None if the fused kernels support all. `precision` is `train.precision` with
    'auto' resolved. A particular GPU may have further obstacles, which a run checks separately."""
    if layout.context > 1 and not layout.exchanges_heads:
        return f"parallel.context_mode={layout.context_mode!r}, which goes by blocks of its own"
    if model.attention.sinks:
        return "model.attention.sinks=true"
    size = model.query_channels
    if size > MOST_KERNEL_CHANNELS:
        return f"heads of {size} channels, more than {MOST_KERNEL_CHANNELS}"
    return "train.precision='fp64'" if precision == "fp64" else None
