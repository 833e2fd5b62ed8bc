"""Helpers with which each sub-layer lists its parameters and its operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import (
    INNER_AXES,
    ActivationTensor,
    ActivationType,
    Axis,
    Collective,
    Init,
    Operation,
    OperationKind,
    ParameterSpec,
    residual_stream,
)

ZEROS, ONES = Init("zeros"), Init("ones")


@dataclass(frozen=True)
class SubLayer:
    """One kind of sub-layer, a frozen record of functions that list its parameters and its
    operations. A sub-layer reads the residual stream and adds to it."""

    name: str
    """Its module's name within a block; its norm is called `<name>_norm`."""
    parameters: Callable[[ModelConfig, str, int], Iterator[ParameterSpec]]
    """Yields its parameters, given the model's configuration, its path in the model and its block's
    index."""
    add_operations: Callable[[OperationList, str, ActivationTensor], None]
    """Appends its operations to the OperationList, given its path and the tensor that it reads."""
    even_sizes: Callable[[ModelConfig], dict[Axis, dict[str, int]]]
    """Returns the axes whose shards must be equal: axis → key in `[model]` → size."""


# -- parameters -----------------------------------------------------------------------------------


def vector(
    name: str, n: int, axis: Axis, init: Init, layer: int | None, *also: Axis
) -> ParameterSpec:
    """Return the spec for a bias or a norm's weight with n elements. `layer` is its block's index,
    None outside the blocks. Its gradient is a sum over tokens, the residual stream's if `axis` is
    `embed`, else all of a sequence; and over the axes in `also`."""
    tokens: Axis = "time" if axis == "embed" else "context"
    return ParameterSpec(name, (n,), (axis,), init, False, layer, sums_over=(tokens, *also))


def norm(model: ModelConfig, path: str, layer: int | None) -> Iterator[ParameterSpec]:
    """Yield the specs for a norm on the residual stream: its weight (D,), and its bias (D,) if
    norms have one. `layer` is its block's index, None outside the blocks."""
    yield vector(f"{path}.weight", model.d_model, "embed", ONES, layer)
    if model.norm_has_bias:
        yield vector(f"{path}.bias", model.d_model, "embed", ZEROS, layer)


def linear(
    model: ModelConfig,
    path: str,
    layer: int,
    shape: tuple[int, int],
    axes: tuple[Axis, Axis],
    *,
    bias: bool,
    is_fused: bool = False,
) -> Iterator[ParameterSpec]:
    """Yield the specs for a block's linear layer: a matrix with `shape` (outputs, inputs), and a
    vector (outputs,) if `bias`. Pass `is_fused` for the fused projection to queries, keys and
    values, whose initialization differs."""
    init = projection_init(model, shape, axes, is_fused=is_fused)
    yield ParameterSpec(f"{path}.weight", shape, axes, init, True, layer)
    if bias:
        yield vector(f"{path}.bias", shape[0], axes[0], ZEROS, layer)


def projection_init(
    model: ModelConfig, shape: tuple[int, int], axes: tuple[Axis, Axis], *, is_fused: bool
) -> Init:
    """Return the initialization for a block's matrix; `uniform` follows PyTorch's encoder layer.

    The encoder layer's linears are U(±n_in^-0.5). Its fused query, key and value projection uses
    Xavier's U(±(6 / (n_in + n_out))^0.5) (Glorot and Bengio, 2010), for the fused shape.
    """
    n_out, n_in = shape
    scale = 1.0
    if model.residual_init_scale and axes[0] == "embed" and axes[1] in INNER_AXES:
        # GPT-2: what adds to the stream is scaled so that 2 · n_layers additions keep the stream's
        # variance (Radford et al., 2019).
        scale = (2 * model.n_layers) ** -0.5
    match model.init:
        case "normal":
            return Init("normal", model.init_std * scale)
        case "uniform" if is_fused:
            return Init("uniform", math.sqrt(6 / (n_in + n_out)))
        case "uniform":
            return Init("uniform", n_in**-0.5 * scale)
        case unknown:
            refuse_unknown(unknown, "model.init", "the parameter table")


# -- operations -----------------------------------------------------------------------------------


class OperationList:
    """Builds a list of forward operations: methods append to `found`, in execution order. `layer`
    is the current block's index, or None outside the blocks; `specs` are the slice's parameters by
    name."""

    def __init__(self, model: ModelConfig, specs: Mapping[str, ParameterSpec]) -> None:
        self.model = model
        self.specs = specs
        self.layer: int | None = None
        self.found: list[Operation] = []

    def norm(self, name: str, x: ActivationTensor) -> ActivationTensor:
        """Append a norm on the residual stream x, whose parameters are `name`.weight and perhaps
        `name`.bias, and return the result."""
        result = residual_stream(self.model, name, "weights")
        saves = (replace(x, dtype="weights"),)
        self.add(name, "norm", (x,), result, parameters=self.parameters(name), saves=saves)
        return result

    def linear(self, name: str, x: ActivationTensor) -> ActivationTensor:
        """Append a linear layer on x, whose weight in the parameter table is `name`.weight
        (outputs, inputs), and return its result (T, outputs)."""
        weight = self.specs[f"{name}.weight"]
        result = self.computed(name, weight.shape[0], weight.axes[0])
        self.matrix(name, "product", (x,), result)
        return result

    def matrix(
        self,
        name: str,
        kind: OperationKind,
        reads: tuple[ActivationTensor, ...],
        result: ActivationTensor,
        weight: str | None = None,
        collectives: Sequence[Collective] = (),
    ) -> None:
        """Append a matmul or an embedding look-up (`kind`), with the parameters under `name`; with
        `weight`, the matrix is that other module's. It has its own collectives, an all-gather for
        each input and a sum for the result, and those in `collectives`. What it saves is what the
        matmul reads: inputs with all tokens, in the matmul dtype."""
        parameters = self.parameters(name, weight)
        contracts = parameters[0].axes[0 if kind == "look_up" else 1]
        rounded = [replace(x, dtype="products") for x in reads]
        self.add(
            name,
            kind,
            reads,
            result,
            parameters=parameters,
            contracts=contracts,
            saves=tuple(replace(x, axes=("context", x.axes[1])) for x in rounded),
            collectives=(
                *(Collective("gather", result.axes[1], x) for x in rounded),
                Collective("sum", contracts, result),
                *collectives,
            ),
        )

    def dropout(self, name: str, rate: float) -> None:
        """Append dropout on a sub-layer's output before it joins the stream, which saves the mask;
        nothing if `rate` is 0."""
        if rate:
            x = residual_stream(self.model, name)
            mask = replace(x, name=f"{name}.mask", dtype="bool")
            self.add(name, "dropout", (x,), x, saves=(mask,))

    def local_matmul(
        self,
        name: str,
        x: ActivationTensor,
        result: ActivationTensor,
        *collectives: Collective,
        reads_context: bool = False,
    ) -> None:
        """Append a matmul on x with the parameters under `name`, which every rank computes with the
        tokens and shards that it has. Unlike `matrix`, it has no other `collectives` than those
        given. It saves x in the matmul dtype: this rank's tokens, or with `reads_context`, after an
        all-gather, all tokens."""
        parameters = self.parameters(name)
        saved = replace(x, dtype="products")
        self.add(
            name,
            "product",
            (x,),
            result,
            parameters=parameters,
            contracts=parameters[0].axes[-1],
            saves=(replace(saved, axes=("context", x.axes[1])) if reads_context else saved,),
            collectives=collectives,
        )

    def computed(
        self,
        name: str,
        width: int,
        axis: Axis,
        dtype: ActivationType = "products",
        *,
        tokens: Axis = "context",
    ) -> ActivationTensor:
        """Return an ActivationTensor within a sub-layer, with `width` numbers per token: (T,
        width), with the axes `tokens` and `axis`. Between two matmuls of attention, T counts all
        tokens of the sequence (`context`)."""
        shape = (self.model.context_length, width)
        return ActivationTensor(name, shape, (tokens, axis), dtype)

    def parameters(self, name: str, weight: str | None = None) -> tuple[ParameterSpec, ...]:
        """Return the ParameterSpecs of the module called `name`: of its weight and its bias, as far
        as it has them. With `weight`, another module's name, the weight is taken from that module,
        as for a tied head."""
        names = (f"{weight or name}.weight", f"{name}.bias")
        return tuple(self.specs[each] for each in names if each in self.specs)

    def add(self, name: str, kind: OperationKind, *tensors: Any, **costs: Any) -> None:
        """Append an Operation to the list. `tensors` are the tensors that it reads and the one that
        it computes; `costs` are its other fields by name."""
        self.found.append(Operation(name, kind, self.layer, *tensors, **costs))
