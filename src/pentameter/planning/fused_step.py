"""The one answer to: can the fused step of a CPU run a configuration, and if not, why?

An obstacle is a phrase that names what stands in the way, for a person to read; None says yes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from pentameter.config.messages import shown
from pentameter.config.schema import Config, ModelConfig
from pentameter.planning.layout import Layout

ANY = None

FUSES: Mapping[str, Collection[object] | None] = {
    "activation": ("relu", "relu2", "gelu", "gelu_tanh", "swiglu", "geglu"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_position": ("pre",),
    "positions": ("learned", "sinusoidal", "rotary"),
    "qk_norm": (None, "head", "width"),
    "sliding_window": (None,),
    "sliding_window_pattern": ANY,  # of sliding windows
    "parallel_residual": (False,),
    **dict.fromkeys(("rope_theta", "rotary_fraction", "rope_scaling"), ANY),
    **dict.fromkeys(("n_kv_heads", "head_size", "norm_eps", "logit_softcap"), ANY),
    **dict.fromkeys(("vocab_size", "vocab_multiple", "context_length"), ANY),
    **dict.fromkeys(("n_layers", "n_heads", "d_model", "d_ff"), ANY),
    **dict.fromkeys(("tied_head", "head_bias", "qkv_bias", "bias", "embedding_scale"), ANY),
    **dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), ANY),
    **dict.fromkeys(("init", "init_std", "residual_init_scale"), ANY),
}
"""Key of `[model]` → the values that `fused_loss_sum` computes, ANY where it takes them all from
the plain module. A key or a value that is not here is left to the plain module as a whole."""


def architecture_obstacle(config: ModelConfig) -> str | None:
    """The first key of `[model]`, with its value, that `fused_loss_sum` does not compute; None
    where it computes the architecture."""
    for key in type(config).model_fields:
        possible, value = FUSES.get(key, ()), getattr(config, key)
        if possible is not None and value not in possible:
            return f"model.{key}={shown(value)}"
    return None


def fused_obstacle(config: Config, layout: Layout, built_by: str | None = None) -> str | None:
    """The first setting of a run, with its value, that the fused step does not know: torch then
    compiles the plain model as a whole. None where the fused step runs it. `built_by` is the name
    of what builds a module of somebody's own."""
    if built_by is not None:
        return f"the module that {built_by} builds"
    obstacle = architecture_obstacle(config.model)
    if obstacle is not None:
        return obstacle
    if config.lora.rank is not None:
        return f"lora.rank={config.lora.rank}"
    copies = asdict(Layout(data=layout.data))  # all that the fused step can be divided into
    for name, value in asdict(layout).items():
        if value != copies[name]:
            return f"parallel.{name}={value}"
    how = config.train.activation_checkpoint
    return None if how is None else f"train.activation_checkpoint={how!r}"
