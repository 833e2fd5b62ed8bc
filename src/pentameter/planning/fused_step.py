"""The one answer to: can fused operations run a configuration, and if not, why? To the fused step
of a CPU, and to the kernels of a GPU that drop attention's weights.

An obstacle is a phrase that names what stands in the way, for a person to read; None says yes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from pentameter.config.messages import shown
from pentameter.config.schema import Config, ModelConfig
from pentameter.planning.architecture import head_size
from pentameter.planning.cluster import Device
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


MOST_KERNEL_CHANNELS = 128
"""Channels of a head of which the kernels of `model/dropout_kernels.py` hold a tile in a GPU's
registers and shared memory."""


def dropout_kernel_obstacle(model: ModelConfig, layout: Layout, precision: str) -> str | None:
    """The first setting of a run, with its value, for which attention that drops its weights writes
    them out on a GPU; None where the kernels take it. A chip may have an obstacle of its own, which
    a run looks for."""
    if layout.context > 1 and not layout.exchanges_heads:
        return f"parallel.context_mode={layout.context_mode!r}, which goes by blocks of its own"
    size = head_size(model)
    if size > MOST_KERNEL_CHANNELS:
        return f"heads of {size} channels, more than {MOST_KERNEL_CHANNELS}"
    return "train.precision='fp64'" if precision == "fp64" else None


def fuses_dropout(model: ModelConfig, layout: Layout, precision: str, device: Device) -> bool:
    """Whether kernels are planned to drop attention's weights on a device: on a GPU whose matrix
    units know bf16, as all do that the kernels serve, and whose fp32 peak is known. A run checks
    them before its first step, and warns where it writes the weights out after all."""
    is_served = device.units > 1 and {"bf16", "fp32"} <= device.tflops.keys()
    drops = model.attention_dropout > 0
    return drops and is_served and dropout_kernel_obstacle(model, layout, precision) is None
