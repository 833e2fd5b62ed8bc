"""Mixture of experts: a router, and feed-forward layers from which it chooses some for each token;
their parameters and operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pentameter.config.choices import look_up
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ActivationTensor, Axis, Collective, ParameterSpec
from pentameter.planning.sub_layers.building import (
    ONES,
    ZEROS,
    OperationList,
    SubLayer,
    projection_init,
)
from pentameter.planning.sub_layers.feed_forward import add_activation, column_parallel_names

BALANCE_STATE = {"none": None, "sequence": None, "bias": ZEROS, "batch": ONES}
"""Maps `model.router.balance` to the initial value of the router's `balance` (E,), or to None if it
has none. That is state which training updates without a gradient: the scores' bias, or each
expert's tokens in the last step ÷ their mean over experts."""


def _parameters(model: ModelConfig, path: str, layer: int) -> Iterator[ParameterSpec]:
    E, D, F = model.experts.count, model.d_model, model.expert_width
    assert E is not None
    yield _matrix(model, f"{path}.router.weight", (E, D), ("router", "embed"), layer, decay=False)
    if model.router.bias:
        yield _vector(f"{path}.router.bias", (E,), ("router",), layer)
    key, balance = "model.router.balance", model.router.balance
    state = look_up(BALANCE_STATE, balance, key, "the parameter table")
    if state is not None:
        spec = ParameterSpec(f"{path}.router.balance", (E,), ("router",), state, False, layer)
        # A bias of scores is needed to run the model, and counted as its makers count theirs.
        is_state = balance != "bias"
        yield replace(spec, is_trained=False, is_state=is_state, sums_over=("time",))
    for spec in _feed_forward(model, path, layer, (E, F), ("experts", "expert_mlp")):
        yield replace(spec, n_chosen=model.experts.n_chosen)
    if model.experts.n_shared:
        width = model.experts.n_shared * F
        yield from _feed_forward(model, f"{path}.shared", layer, (width,), ("shared_mlp",))
    if model.experts.shared_gate:
        yield _matrix(model, f"{path}.shared_gate.weight", (1, D), ("router", "embed"), layer)


def _feed_forward(
    model: ModelConfig, path: str, layer: int, inner: tuple[int, ...], inner_axes: tuple[Axis, ...]
) -> Iterator[ParameterSpec]:
    """Yield the matrices and biases of a feed-forward layer. `inner` is its inner width, preceded
    by the number of experts if each has matrices of its own; `inner_axes` are the axes of
    `inner`."""
    D, (*groups, width), (*group_axes, axis) = model.d_model, inner, inner_axes
    for name in (*column_parallel_names(model), "down"):
        is_down = name == "down"
        shape = (*groups, *((D, width) if is_down else (width, D)))
        axes: tuple[Axis, ...] = (*group_axes, *(("embed", axis) if is_down else (axis, "embed")))
        yield _matrix(model, f"{path}.{name}.weight", shape, axes, layer)
        if model.bias:
            bias = _vector(f"{path}.{name}.bias", shape[:-1], axes[:-1], layer)
            # One of the ranks that add up `down`'s results adds its bias.
            yield replace(bias, sums_over=(*bias.sums_over, axis)) if is_down else bias


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
    """Return the ParameterSpec of a bias, or of one bias for each expert if the first of its `axes`
    is experts."""
    return ParameterSpec(name, shape, axes, ZEROS, False, layer, sums_over=("time",))


def _add_operations(build: OperationList, path: str, x: ActivationTensor) -> None:
    """Add the router, the chosen experts' matmuls and the shared experts to `build`, for the tokens
    x, (T, D). Each token is a row in each of its k experts. Experts may get unequally many rows, T
    · k in total."""
    model = build.model
    E, k, F, D = model.experts.count, model.experts.n_chosen, model.expert_width, model.d_model
    assert E is not None
    scores = build.computed(f"{path}.router", E, "router", "softmax", tokens="time")
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
    rows = build.computed(f"{path}.rows", k * D, "embed", tokens="received")
    returned = build.computed(f"{path}.returned", k * D, "embed", tokens="routed")
    result = _add_feed_forward(
        build,
        path,
        rows,
        (k * F, "expert_mlp"),
        k * D,
        dispatch=(Collective("dispatch", "experts", replace(returned, name=rows.name)),),
        combine=(Collective("combine", "experts", returned),),
    )
    tokens = Collective("tokens", "routed", x)
    build.add(
        f"{path}.combine", "activation", (result,), x, saves=(returned,), collectives=(tokens,)
    )
    if model.experts.n_shared:
        width = model.experts.n_shared * F
        _add_feed_forward(build, f"{path}.shared", x, (width, "shared_mlp"), D)
    if model.experts.shared_gate:
        gate = build.computed(f"{path}.shared_gate", 1, "router", tokens="time")
        build.local_matmul(f"{path}.shared_gate", x, gate)
    build.dropout(f"{path}.dropout", model.dropout)


def _add_feed_forward(
    build: OperationList,
    path: str,
    x: ActivationTensor,
    inner: tuple[int, Axis],
    n_outputs: int,
    *,
    dispatch: tuple[Collective, ...] = (),
    combine: tuple[Collective, ...] = (),
) -> ActivationTensor:
    """Add a feed-forward layer on x and return its result.

    inner: its inner numbers per token, and their axis.
    n_outputs: numbers per token in the result. Both are sums over the rows that a token has: k · F
        and k · D for k chosen experts.
    dispatch, combine: collectives of the first and of the last matmul.
    """
    made = []
    tokens = x.axes[0]
    for name in column_parallel_names(build.model):
        made.append(build.computed(f"{path}.{name}", *inner, tokens=tokens))
        build.local_matmul(f"{path}.{name}", x, made[-1], *(() if made[1:] else dispatch))
    activated = add_activation(build, path, tuple(made))
    result = build.computed(f"{path}.down", n_outputs, "embed", tokens=tokens)
    build.local_matmul(f"{path}.down", activated, result, *combine)
    return result


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    assert model.experts.count is not None
    return {
        "experts": {"experts.count": model.experts.count},
        "expert_mlp": {"experts.width": model.expert_width},
    }


EXPERTS = SubLayer("experts", _parameters, _add_operations, _even_sizes)
