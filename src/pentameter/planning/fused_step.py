"""Whether fused operations support a configuration: the fused CPU step, and the GPU kernels for
attention with dropout.

An obstacle is text for a message that names the first unsupported setting; None means that there is
none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import cache
from typing import Literal

from pentameter.config.messages import shown
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT
from pentameter.config.tables import packaged_table
from pentameter.planning.layouts.layout import Layout


@cache
def fused_values() -> Mapping[str, Collection[object] | Literal["any"]]:
    """Return the values that the fused CPU step supports, by key of `[model]`: those that
    `fused_step.toml` lists, None as "none"."""
    return packaged_table("planning/fused_step.toml")


FUSED_PRECISIONS = ("auto", "fp64", "fp32", "tf32", "bf16", "fp16")
"""`train.precision` values whose matmuls the fused step computes."""


def architecture_obstacle(config: ModelConfig) -> str | None:
    """Return, as text, the first key in `[model]` whose value the fused CPU step (`fused_loss_sum`)
    does not support; None if it supports the architecture."""
    defaults = architecture(type(config)())
    for key, value in architecture(config).items():
        possible = fused_values().get(key)
        written = ABSENT if value is None else value
        is_usual = possible is None and value == defaults[key]
        if not (is_usual or possible == "any" or written in (possible or ())):
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
    for key, value in (("train.matmuls", config.train.matmuls), ("lora.rank", config.lora.rank)):
        if value is not None:
            return f"{key}={shown(value)}"
    copies = asdict(Layout(data=layout.data))  # the fused step supports data parallelism only
    for name, value in asdict(layout).items():
        if value != copies[name]:
            return f"parallel.{name}={value}"
    usual = {"stream": "weights", "activation_checkpoint": None}
    found = ((key, getattr(config.train, key)) for key in usual)
    return next((f"train.{key}={value!r}" for key, value in found if value != usual[key]), None)


MOST_KERNEL_CHANNELS = 128
"""Largest head size in channels for which the kernels that drop attention weights fit a tile into a
GPU's registers and shared memory."""


def dropout_kernel_obstacle(model: ModelConfig, layout: Layout, precision: str) -> str | None:
    """Return, as text, a run's first setting for which attention with dropout must materialize its
    weights on a GPU; None if the fused kernels support all. `precision` is `train.precision` with
    'auto' resolved. A particular GPU may have further obstacles, which a run checks separately."""
    if layout.has_ring:
        return f"parallel.context_mode={layout.context_mode!r}, which goes by blocks of its own"
    if model.attention.sinks:
        return "model.attention.sinks=true"
    size = model.query_channels
    if size > MOST_KERNEL_CHANNELS:
        return f"heads of {size} channels, more than {MOST_KERNEL_CHANNELS}"
    return "train.precision='fp64'" if precision == "fp64" else None
