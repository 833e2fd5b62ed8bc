"""Mixture of experts: a router, and feed-forward layers from which it chooses some for each token;
their parameters and operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pentameter.config.choices import look_up
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import (
    ActivationTensor,
    ActivationType,
    Axis,
    ParameterSpec,
)
from pentameter.planning.sub_layers.building import (
    ONES,
    ZEROS,
    OperationList,
    SubLayer,
    projection_init,
)
from pentameter.planning.sub_layers.feed_forward import add_activation, column_parallel_names

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
        # A bias of scores is needed to run the model, and counted as its makers count theirs.
        is_state = model.balance != "bias"
        yield replace(balance, is_trained=False, is_state=is_state, sums_over=("time",))
    for spec in _feed_forward(model, path, layer, F, (E,), ("experts",)):
        yield replace(spec, n_chosen=model.n_chosen)
    if model.n_shared_experts:
        width = model.n_shared_experts * F
        yield from _feed_forward(model, f"{path}.shared", layer, width, (), ())
    if model.shared_expert_gate:
        yield _matrix(model, f"{path}.shared_gate.weight", (1, D), ("router", "embed"), layer)


def _feed_forward(
    model: ModelConfig,
    path: str,
    layer: int,
    width: int,
    groups: tuple[int, ...],
    group_axes: tuple[Axis, ...],
) -> Iterator[ParameterSpec]:
    """Yield the matrices and biases of a feed-forward layer whose inner width is `width`. `groups`
    and `group_axes` are a leading dimension and its axis, (E,) and ("experts",), for one matrix per
    expert; both are () for a single layer."""
    D = model.d_model
    for name in (*column_parallel_names(model), "down"):
        is_down = name == "down"
        shape = (*groups, *((D, width) if is_down else (width, D)))
        inner: tuple[Axis, ...] = ("embed", "expert_mlp") if is_down else ("expert_mlp", "embed")
        axes = (*group_axes, *inner)
        yield _matrix(model, f"{path}.{name}.weight", shape, axes, layer)
        if model.bias:
            yield _vector(f"{path}.{name}.bias", shape[:-1], axes[:-1], layer)


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
    """Add the router, the chosen experts' matmuls and the shared experts to `build`, for the tokens
    x, (T, D). Each token is a row in k experts. Experts may get unequally many rows, together
    always T · k."""
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
    result = _add_feed_forward(build, path, rows, k * F, k * D)
    build.add(f"{path}.combine", "activation", (result,), x, saves=(result,))
    if model.n_shared_experts:
        _add_feed_forward(build, f"{path}.shared", x, model.n_shared_experts * F, D)
    if model.shared_expert_gate:
        gate = _tensor(build, f"{path}.shared_gate", 1, "router")
        _add_grouped(build, f"{path}.shared_gate", x, gate)
    build.dropout(f"{path}.dropout", model.dropout)


def _add_feed_forward(
    build: OperationList, path: str, x: ActivationTensor, width: int, n_outputs: int
) -> ActivationTensor:
    """Add a feed-forward layer on x and return its result. `width` and `n_outputs` count the inner
    and the resulting numbers per token, summed over the rows that a token has: k · F and k · D for
    k chosen experts."""
    made = []
    for name in column_parallel_names(build.model):
        made.append(_tensor(build, f"{path}.{name}", width, "expert_mlp"))
        _add_grouped(build, f"{path}.{name}", x, made[-1])
    activated = add_activation(build, path, tuple(made))
    result = _tensor(build, f"{path}.down", n_outputs, "embed")
    _add_grouped(build, f"{path}.down", activated, result)
    return result


def _add_grouped(
    build: OperationList, name: str, x: ActivationTensor, result: ActivationTensor
) -> None:
    """Add the matmul `name` on x: each row is multiplied with its own expert's matrix, or every
    token with a single matrix in a shared expert."""
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


def _tensor(
    build: OperationList, name: str, width: int, axis: Axis, dtype: ActivationType = "products"
) -> ActivationTensor:
    """Return a record for a tensor with `width` numbers for each token in the residual stream, (T,
    width)."""
    shape = (build.model.context_length, width)
    return ActivationTensor(name, shape, ("time", axis), dtype)


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    return {}


EXPERTS = SubLayer("experts", _parameters, _add_operations, _even_sizes)
