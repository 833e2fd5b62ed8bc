"""Low-rank adapters: which matrices they adapt; what a run with them holds, trains and computes.

To a matrix W (outputs, inputs) an adapter adds (alpha ÷ rank) · B A, of A (rank, inputs) and B
(outputs, rank) (Hu et al. 2021, "LoRA"). A begins as `torch.nn.Linear` does and as in PEFT, uniform
within ± inputs^-0.5, B at zero, so that an adapted model begins as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from pentameter.config.messages import shown
from pentameter.config.schema import Config, LoraConfig, ModelConfig
from pentameter.errors import ConfigError, nearest
from pentameter.planning.architecture import (
    ActivationTensor,
    Init,
    Operation,
    ParameterSpec,
    operations,
    parameter_table,
)
from pentameter.planning.layout import Layout

A, B = "lora_a", "lora_b"
"""Names of an adapter's parameters in the linear layer that it adapts."""


def training_table(
    config: Config, *, first_layer: int = 0, last_layer: int | None = None
) -> tuple[ParameterSpec, ...]:
    """The parameters of a run, or of a slice of its layers as in `parameter_table`: the model's,
    and those of its adapters, which alone are trained where there are any.

    Raises ConfigError for targets that are no linear layers of the model's blocks, and for a rank
    above the smaller side of a matrix that is adapted.
    """
    model, lora = config.model, config.lora
    table = parameter_table(model, first_layer=first_layer, last_layer=last_layer)
    if lora.rank is None:
        return table
    adapted = adapted_modules(model, lora)
    return with_adapters(table, [spec for spec in table if _module(spec) in adapted], lora.rank)


def with_adapters(
    table: Sequence[ParameterSpec], adapted: Sequence[ParameterSpec], rank: int
) -> tuple[ParameterSpec, ...]:
    """The parameters of `table`, frozen, and the trained ones of adapters of the matrices
    `adapted`. Raises ConfigError for a rank above the smaller side of one of these."""
    smallest = min(adapted, key=lambda spec: min(spec.shape), default=None)
    if smallest is not None and rank > min(smallest.shape):
        raise ConfigError(
            f"lora.rank={rank} is more than {smallest.name} {smallest.shape} has: a matrix of that "
            f"shape has at most rank {min(smallest.shape)}; lower lora.rank, or leave [lora] out "
            "to train every weight"
        )
    frozen = (replace(spec, is_trained=False) for spec in table)
    return (*frozen, *(each for spec in adapted for each in _adapter(spec, rank)))


class Run(tuple[Operation, ...]):
    """The operations of a run, or of a slice of it, as they run."""

    @cached_property
    def alike_blocks(self) -> list[tuple[list[Operation], int]]:
        """A block of each kind, and how many there are: those that differ in names alone read, make
        and save the same bytes."""
        found: dict[object, tuple[list[Operation], int]] = {}
        for layer, group in itertools.groupby(self, key=lambda op: op.layer):
            if layer is not None:
                block = list(group)
                key = tuple(_nameless(op, layer) for op in block)
                first, n = found.get(key, (block, 0))
                found[key] = first, n + 1
        return list(found.values())


@lru_cache(maxsize=1024)
def run_operations(model: ModelConfig, lora: LoraConfig, layers: range | None = None) -> Run:
    """The operations of a run, or of a slice of its layers as in `operations`: the model's, with
    those of an adapter ahead of the product that it adds to."""
    run = operations(model, layers)
    if lora.rank is None:
        return Run(run)
    adapted = set(adapted_modules(model, lora))
    # Nothing before the first adapter is trained, so backward ends there; a later stage sends the
    # gradient of what it received.
    is_first = run[0].layer is None
    first = next((i for i, op in enumerate(run) if op.name in adapted), len(run)) if is_first else 0
    without = run[first].reads if is_first and first < len(run) else ()
    found: list[Operation] = []
    for index, op in enumerate(run):
        constant = index < first or (bool(without) and op.reads == without)
        if op.name in adapted:
            found += _adapting(op, lora.rank, not constant)
        found.append(_frozen(op, index >= first, not constant))
    return Run(found)


def _nameless(op: Operation, layer: int) -> object:
    """What an operation of a block reads, makes and saves, with names that say nothing of the
    block's place."""

    def nameless(tensor: ActivationTensor) -> object:
        name = tensor.name.removeprefix(f"blocks.{layer}")
        return name, tensor.shape, tensor.axes, tensor.dtype

    groups = (op.reads, (op.result,), op.saves, op.saves_by_blocks)
    return (
        op.kind,
        op.contracts,
        op.reads_gradient,
        op.gives_gradient,
        tuple(tuple(map(nameless, group)) for group in groups),
        tuple((spec.shape, spec.axes, spec.is_trained) for spec in op.parameters),
    )


def adapted_modules(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """The linear layers that are adapted, by their paths in the model, such as
    `blocks.0.attention.qkv`. Raises ConfigError for targets that are none."""
    linear = [
        spec.name.removesuffix(".weight")
        for spec in parameter_table(model)
        if spec.is_block_matrix and spec.name.endswith(".weight")
    ]
    return targeted(linear, lora)


def targeted(linear: Sequence[str], lora: LoraConfig) -> list[str]:
    """Those of the paths of linear layers whose last name is a target; all where there is none.
    Raises ConfigError for a target that is none of them."""
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


def is_of_adapter(spec: ParameterSpec) -> bool:
    """Whether a parameter is one of an adapter's two."""
    return "rank" in spec.axes


def adapter_factor(lora: LoraConfig) -> float:
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
    if layout.splits_backward:
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


def _frozen(op: Operation, reads_gradient: bool, gives_gradient: bool) -> Operation:
    """An operation whose parameters are not trained: what only their gradients read is not kept.
    The head's gradient is as large as what it reads, and made with the loss."""
    parameters = tuple(replace(spec, is_trained=False) for spec in op.parameters)
    keeps = gives_gradient and op.kind not in ("product", "look_up")
    return replace(
        op,
        parameters=parameters,
        saves=op.saves if keeps else (),
        reads_gradient=reads_gradient,
        gives_gradient=gives_gradient,
    )


def _adapting(op: Operation, rank: int, gives_gradient: bool) -> Iterator[Operation]:
    """The two products of the adapter of a matrix."""
    of_inputs, of_ranks = _adapter(op.parameters[0], rank)
    low, added = (f"{op.name}.{each}" for each in (A, B))
    shape = (op.result.shape[0], rank)
    inner = ActivationTensor(low, shape, ("context", "rank"), "products")
    result = replace(op.result, name=added)
    yield Operation(
        low,
        "product",
        op.layer,
        op.reads,
        inner,
        (of_inputs,),
        op.contracts,
        op.saves,
        gives_gradient=gives_gradient,
    )
    yield Operation(added, "product", op.layer, (inner,), result, (of_ranks,), "rank", (inner,))


def _module(spec: ParameterSpec) -> str:
    """The path of the module whose weight this is; "" for another parameter."""
    return spec.name.removesuffix(".weight") if spec.name.endswith(".weight") else ""
