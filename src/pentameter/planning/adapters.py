"""Low-rank adapters: which matrices they adapt, and the table of what a run holds and trains.

To a matrix W (outputs, inputs) an adapter adds (alpha ÷ rank) · B A, of A (rank, inputs) and B
(outputs, rank) (Hu et al. 2021, "LoRA"). A begins as `torch.nn.Linear` does and as in PEFT, uniform
within ± inputs^-0.5, B at zero, so that an adapted model begins as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pentameter.config.choices import SPLITS_BACKWARD, look_up
from pentameter.config.messages import shown
from pentameter.config.schema import Config, LoraConfig, ModelConfig
from pentameter.errors import ConfigError, nearest
from pentameter.planning.architecture import Init, ParameterSpec, parameter_table
from pentameter.planning.layout import Layout

A, B = "lora_a", "lora_b"
"""Names of an adapter's parameters in the linear layer that it adapts."""


def training_table(
    config: Config, *, first_layer: int = 0, last_layer: int | None = None
) -> tuple[ParameterSpec, ...]:
    """The parameters of a run, or of a slice of its layers as in `parameter_table`: the model's,
    and those of its adapters, which alone are trained where there are any.

    Raises ConfigError for targets that are no linear layers of the model's blocks.
    """
    model, lora = config.model, config.lora
    table = parameter_table(model, first_layer=first_layer, last_layer=last_layer)
    if lora.rank is None:
        return table
    adapted = adapted_modules(model, lora)
    frozen = tuple(replace(spec, is_trained=False) for spec in table)
    of_adapters = (
        each for spec in table if _module(spec) in adapted for each in _adapter(spec, lora.rank)
    )
    return (*frozen, *of_adapters)


def adapted_modules(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """The linear layers that are adapted, by their paths in the model, such as
    `blocks.0.attention.qkv`. Raises ConfigError for targets that are none."""
    linear = [
        spec.name.removesuffix(".weight")
        for spec in parameter_table(model)
        if spec.is_block_matrix and spec.name.endswith(".weight")
    ]
    kinds = list(dict.fromkeys(path.rpartition(".")[2] for path in linear))
    for target in lora.targets:
        if target not in kinds:
            near = nearest(target, kinds)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"lora.targets has {shown(target)}, which is no linear layer of a block{hint} "
                f"(possible: {', '.join(kinds)}; all when absent)"
            )
    return [path for path in linear if path.rpartition(".")[2] in (lora.targets or kinds)]


def scale(lora: LoraConfig) -> float:
    """The factor of B A in what an adapter adds."""
    assert lora.rank is not None
    return lora.alpha / lora.rank


def adapters_obstacle(lora: LoraConfig, layout: Layout) -> str | None:
    """The first setting of a layout on which adapters cannot be trained, with the reason; None
    where they can, or where there are none."""
    if lora.rank is None:
        return None
    if layout.tensor_mode != "1d":
        mode = layout.tensor_mode
        return f"parallel.tensor_mode='{mode}', whose products know no adapters; use '1d'"
    if layout.kv_copies > 1:
        return (
            f"parallel.tensor={layout.tensor}, of which {layout.kv_copies} processes compute the "
            "same keys and values, each by its own rows; lower it"
        )
    splits = look_up(SPLITS_BACKWARD, layout.schedule, "parallel.schedule", "the adapters")
    if splits and layout.pipeline > 1:
        return (
            f"parallel.schedule='{layout.schedule}', which computes the gradients of weights "
            "apart, and most have none; use '1f1b' or another"
        )
    return None


def check_adapters(lora: LoraConfig, layout: Layout) -> None:
    """Raise ConfigError where adapters cannot be trained as a layout divides the model."""
    if (obstacle := adapters_obstacle(lora, layout)) is not None:
        raise ConfigError(f"lora.rank={lora.rank} is not possible with {obstacle}")


def _adapter(spec: ParameterSpec, rank: int) -> Iterator[ParameterSpec]:
    """The two parameters that adapt a matrix."""
    n_outputs, n_inputs = spec.shape
    init, path = Init("uniform", n_inputs**-0.5), _module(spec)
    yield ParameterSpec(
        f"{path}.{A}", (rank, n_inputs), ("rank", spec.axes[1]), init, True, spec.layer
    )
    yield ParameterSpec(
        f"{path}.{B}", (n_outputs, rank), (spec.axes[0], "rank"), Init("zeros"), True, spec.layer
    )


def _module(spec: ParameterSpec) -> str:
    """The path of the module whose weight this is; "" for another parameter."""
    return spec.name.removesuffix(".weight") if spec.name.endswith(".weight") else ""
