"""Mixture of experts: a router, and feed-forward layers from which it chooses some for each token;
their parameters and operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pentameter.config.choices import look_up
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ActivationTensor, Axis, ParameterSpec
from pentameter.planning.sub_layers.building import (
    ONES,
    ZEROS,
    OperationList,
    SubLayer,
    projection_init,
)
from pentameter.planning.sub_layers.feed_forward import SAVES_INPUT, column_parallel_names

BALANCE_STATE = {"none": None, "sequence": None, "bias": ZEROS, "batch": ONES}
"""Maps `model.balance` to the initial value of the router's `balance` (E,), a state that training
updates without a gradient: the bias of the scores, or each expert's tokens in the last step ÷ their
mean over experts. None for no state."""


def _parameters(model: ModelConfig, path: str, layer: int) -> Iterator[ParameterSpec]:
    E, D, F = model.n_experts, model.d_model, model.expert_width
    assert E is not None
    yield _matrix(model, f"{path}.router.weight", (E, D), ("router", "embed"), layer, decay=False)
    if model.router_bias:
        yield _vector(f"{path}.router.bias", (E,), ("router",), layer)
    state = look_up(BALANCE_STATE, model.balance, "model.balance", "the parameter table")
    if state is not None:
        balance = ParameterSpec(f"{path}.router.balance", (E,), ("router",), state, False, layer)
        yield replace(balance, is_trained=False, is_state=True, sums_over=("time",))
    for name in (*column_parallel_names(model), "down"):
        is_down = name == "down"
        shape = (E, D, F) if is_down else (E, F, D)
        axes: tuple[Axis, ...] = ("experts", "embed", "expert_mlp")
        axes = axes if is_down else ("experts", "expert_mlp", "embed")
        spec = _matrix(model, f"{path}.{name}.weight", shape, axes, layer)
        yield replace(spec, n_chosen=model.n_chosen)
        if model.bias:
            bias = _vector(f"{path}.{name}.bias", shape[:2], axes[:2], layer)
            yield replace(bias, n_chosen=model.n_chosen)
    if not model.n_shared_experts:
        return
    width = model.n_shared_experts * F
    for name in (*column_parallel_names(model), "down"):
        is_down = name == "down"
        matrix = (D, width) if is_down else (width, D)
        axes = ("embed", "expert_mlp") if is_down else ("expert_mlp", "embed")
        yield _matrix(model, f"{path}.shared.{name}.weight", matrix, axes, layer)
        if model.bias:
            yield _vector(f"{path}.shared.{name}.bias", matrix[:1], axes[:1], layer)
    if model.shared_expert_gate:
        yield _matrix(model, f"{path}.shared_gate.weight", (1, D), ("router", "embed"), layer)


def _matrix(
    model: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[Axis, ...],
    layer: int,
    *,
    decay: bool = True,
) -> ParameterSpec:
    """Return the spec for a matrix (outputs, inputs), or for one per expert (E, outputs, inputs),
    whose gradient sums over the residual stream's tokens."""
    n_out, n_in = shape[-2:]
    init = projection_init(model, (n_out, n_in), (axes[-2], axes[-1]), is_fused=False)
    return ParameterSpec(name, shape, axes, init, decay, layer, sums_over=("time",))


def _vector(name: str, shape: tuple[int, ...], axes: tuple[Axis, ...], layer: int) -> ParameterSpec:
    """Return the spec for a bias, or for one per expert."""
    return ParameterSpec(name, shape, axes, ZEROS, False, layer, sums_over=("time",))


def _add_operations(build: OperationList, path: str, x: ActivationTensor) -> None:
    """Add the router, the chosen experts' matmuls over every token's k rows, and the shared experts
    to `build`. Experts may get unequally many rows: together they always take T · k."""
    model = build.model
    E, k, F, D = model.n_experts, model.n_chosen, model.expert_width, model.d_model
    assert E is not None
    scores = _tensor(build, f"{path}.router", E, "router", "softmax")
    state = build.specs.get(f"{path}.router.balance")
    balance = () if state is None else (state,)
    build.add(
        f"{path}.router",
        "product",
        (x,),
        scores,
        parameters=(*build.parameters(f"{path}.router"), *balance),
        contracts="embed",
        saves=(replace(x, name=f"{path}.router.input", dtype="softmax"), scores),
    )
    rows = _tensor(build, f"{path}.rows", k * D, "embed")
    made = []
    for name in column_parallel_names(model):
        made.append(_tensor(build, f"{path}.{name}", k * F, "expert_mlp"))
        _add_grouped(build, f"{path}.{name}", rows, made[-1])
    activated = _add_activation(build, path, tuple(made))
    result = _tensor(build, f"{path}.down", k * D, "embed")
    _add_grouped(build, f"{path}.down", activated, result)
    build.add(f"{path}.combine", "activation", (result,), x, saves=(result,))
    if model.n_shared_experts:
        _add_for_every_token(build, f"{path}.shared", x)
    build.dropout(f"{path}.dropout", model.dropout)


def _add_for_every_token(build: OperationList, path: str, x: ActivationTensor) -> None:
    """Add the shared experts, one feed-forward layer that reads every token."""
    model = build.model
    width = model.n_shared_experts * model.expert_width
    made = []
    for name in column_parallel_names(model):
        made.append(_tensor(build, f"{path}.{name}", width, "expert_mlp"))
        _add_grouped(build, f"{path}.{name}", x, made[-1])
    activated = _add_activation(build, path, tuple(made))
    result = _tensor(build, f"{path}.down", model.d_model, "embed")
    _add_grouped(build, f"{path}.down", activated, result)
    if model.shared_expert_gate:
        gate = _tensor(build, f"{path}_gate", 1, "router")
        _add_grouped(build, f"{path}_gate", x, gate)


def _add_grouped(
    build: OperationList, name: str, x: ActivationTensor, result: ActivationTensor
) -> None:
    """Add a matmul that multiplies each row with its expert's matrix, or each token with a shared
    one."""
    saved = replace(x, dtype="products")
    build.add(
        name,
        "product",
        (x,),
        result,
        parameters=build.parameters(name),
        contracts=build.parameters(name)[0].axes[-1],
        saves=(saved,),
    )


def _add_activation(
    build: OperationList, path: str, reads: tuple[ActivationTensor, ...]
) -> ActivationTensor:
    """Add the activation function, with its gate if the model has one, between an expert's
    matrices, and return its result."""
    model = build.model
    activated = replace(reads[0], name=f"{path}.activation")
    saves: tuple[ActivationTensor, ...]
    if model.has_gate:
        saves = (*reads, replace(activated, name=f"{path}.gate.activation"))
    else:
        name = model.activation
        slope_of_input = look_up(SAVES_INPUT, name, "model.activation", "the operations")
        saves = reads if slope_of_input else (activated,)
    build.add(f"{path}.activation", "activation", reads, activated, saves=saves)
    return activated


def _tensor(
    build: OperationList, name: str, width: int, axis: Axis, dtype: str = "products"
) -> ActivationTensor:
    """Return a record for a tensor with `width` numbers for each token in the residual stream, (T,
    width)."""
    shape = (build.model.context_length, width)
    return ActivationTensor(name, shape, ("time", axis), dtype)  # type: ignore[arg-type]


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    return {}


EXPERTS = SubLayer("experts", _parameters, _add_operations, _even_sizes)
