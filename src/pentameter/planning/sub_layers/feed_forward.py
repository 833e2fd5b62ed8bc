"""The feed-forward layer: its parameters and operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pentameter.config.choices import look_up
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ActivationTensor, Axis, ParameterSpec
from pentameter.planning.sub_layers.building import OperationList, SubLayer, linear

SAVES_INPUT = {"relu": False, "relu2": True, "gelu": True, "gelu_tanh": True}
"""Maps `model.feed_forward.activation` to the tensor that its derivative is computed from: its
input if True, its output if False."""

GATED_SAVES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("swiglu", "geglu", "geglu_tanh"), ("activation",)),
    "swiglu_clamped": ("clamped", "sigmoid", "activation", "up"),
}
"""Maps an activation with a gate (`model.feed_forward.activation`) to what it saves for the
backward pass besides its inputs."""


def column_parallel_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the matrices that map the residual stream to the inner width: `up`, and
    `gate` if the activation has one."""
    return ("gate", "up") if model.feed_forward.has_gate else ("up",)


def _parameters(model: ModelConfig, path: str, layer: int) -> Iterator[ParameterSpec]:
    D, d_ff, bias = model.d_model, model.feed_forward_width, model.bias
    for name in column_parallel_names(model):
        yield from linear(model, f"{path}.{name}", layer, (d_ff, D), ("mlp", "embed"), bias=bias)
    yield from linear(model, f"{path}.down", layer, (D, d_ff), ("embed", "mlp"), bias=bias)


def _add_operations(build: OperationList, path: str, x: ActivationTensor) -> None:
    model = build.model
    reads = tuple(build.linear(f"{path}.{name}", x) for name in column_parallel_names(model))
    build.linear(f"{path}.down", add_activation(build, path, reads))
    build.dropout(f"{path}.dropout", model.dropout)


def add_activation(
    build: OperationList, path: str, reads: tuple[ActivationTensor, ...]
) -> ActivationTensor:
    """Add the activation function to `build`, and return its result, shaped as each tensor in
    `reads`: the column-parallel matrices' results, (up,), or (gate, up) if the activation has a
    gate."""
    model = build.model
    activated = replace(reads[0], name=f"{path}.activation")
    saves: tuple[ActivationTensor, ...]
    if model.feed_forward.has_gate:
        between = look_up(
            GATED_SAVES,
            model.feed_forward.activation,
            "model.feed_forward.activation",
            "the operations",
        )
        saves = (*reads, *(replace(activated, name=f"{path}.gate.{each}") for each in between))
    else:
        name = model.feed_forward.activation
        slope_of_input = look_up(
            SAVES_INPUT, name, "model.feed_forward.activation", "the operations"
        )
        saves = reads if slope_of_input else (activated,)
    build.add(f"{path}.activation", "activation", reads, activated, saves=saves)
    return activated


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    return {"mlp": {"feed_forward.width": model.feed_forward_width}}


FEED_FORWARD = SubLayer("mlp", _parameters, _add_operations, _even_sizes)
