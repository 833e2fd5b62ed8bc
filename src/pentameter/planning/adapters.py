"""Low-rank adapters: the matrices they adapt, and the parameters and operations they add to a run.

An adapter adds (alpha ÷ rank) · B A to a matrix W (outputs, inputs), with A (rank, inputs) and B
(outputs, rank) (Hu et al. 2021, "LoRA"). Initialization follows `torch.nn.Linear` and PEFT: A is
uniform within ± inputs^-0.5 and B is zero, so that an adapted model initially computes exactly the
plain model's function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from pentameter.config.messages import shown
from pentameter.config.schema import Config, LoraConfig, ModelConfig
from pentameter.errors import ConfigError, nearest
from pentameter.planning.architecture import ActivationTensor, Init, Operation, ParameterSpec
from pentameter.planning.gpt import operations, parameter_table

A, B = "lora_a", "lora_b"
"""Names of an adapter's two parameters within the linear layer that it adapts."""

TableOf = Callable[[Config], tuple[ParameterSpec, ...]]
"""Function that returns the specs of the parameters that a run with a configuration saves, adapters
included."""


def training_table(
    config: Config, *, first_layer: int = 0, last_layer: int | None = None
) -> tuple[ParameterSpec, ...]:
    """Return the specs (name, shape, axes, initialization) for a run's parameters, from layer
    `first_layer` up to but not including `last_layer` (None: to the end): the model's, followed by
    its adapters'. With adapters, only theirs are trained.

    Raises ConfigError if a target is not a linear layer in the model's blocks, or if `lora.rank`
    exceeds the smaller side of an adapted matrix.
    """
    lora = config.lora
    table = parameter_table(config.model, first_layer=first_layer, last_layer=last_layer)
    if lora.rank is None:
        return table
    return with_adapters(table, _adapted(table, lora), lora.rank)


def with_adapters(
    table: Sequence[ParameterSpec], adapted: Sequence[ParameterSpec], rank: int
) -> tuple[ParameterSpec, ...]:
    """Return the parameters in `table`, frozen, followed by the trained adapter parameters for the
    matrices `adapted`. `rank` is the adapters' inner dimension. Raises ConfigError if it exceeds
    the smaller side of an adapted matrix."""
    smallest = min(adapted, key=lambda spec: min(spec.shape), default=None)
    if smallest is not None and rank > min(smallest.shape):
        raise ConfigError(
            f"lora.rank={rank} is more than {smallest.name} {smallest.shape} has: a matrix of that "
            f"shape has at most rank {min(smallest.shape)}; lower lora.rank, name other layers in "
            "lora.targets, or leave [lora] out to train every weight"
        )
    frozen = (replace(spec, is_trained=False) for spec in table)
    return (*frozen, *(each for spec in adapted for each in _adapter(spec, rank)))


class Run(tuple[Operation, ...]):
    """The forward operations of a training run, those of adapters included, in the order of
    execution: a tuple of Operations, for the whole model or a slice of it."""

    @cached_property
    def alike_blocks(self) -> list[tuple[list[Operation], int]]:
        """Pairs (operations of one block, number of blocks equal to it), one for each kind of
        block. Blocks are equal if only names differ in their operations: they read, compute and
        save equally many bytes."""
        found: dict[object, tuple[list[Operation], int]] = {}
        for layer, group in itertools.groupby(self, key=lambda op: op.layer):
            if layer is not None:
                block = list(group)
                key = tuple(_nameless(op, layer) for op in block)
                first, n = found.get(key, (block, 0))
                found[key] = first, n + 1
        return list(found.values())

    @cached_property
    def groups(self) -> list[tuple[list[Operation], int]]:
        """Pairs (operations, count) whose operations, each taken `count` times, are the whole run:
        those outside any block with count 1, then `alike_blocks`."""
        return [([op for op in self if op.layer is None], 1), *self.alike_blocks]


@lru_cache(maxsize=1024)
def run_operations(model: ModelConfig, lora: LoraConfig, layers: range | None = None) -> Run:
    """Return a run's forward operations in the layers `layers` (None: the whole model). With
    `lora.rank` set, an adapter's two matmuls come before the matmul whose result they are added to,
    and all other parameters are frozen. Operations before the first adapter then compute no
    gradients. Raises ConfigError for a target that is not a linear layer."""
    run = operations(model, layers)
    if lora.rank is None:
        return Run(run)
    parameters = (spec for op in run for spec in op.parameters)
    adapted = {_module(spec) for spec in _adapted(parameters, lora)}
    # Nothing before the first adapter is trained, so the backward pass ends there. A later pipeline
    # stage still sends back the gradient of its input.
    is_first = run[0].layer is None
    first = next((i for i, op in enumerate(run) if op.name in adapted), len(run)) if is_first else 0
    frozen_inputs = run[first].reads if is_first and first < len(run) else ()
    found: list[Operation] = []
    for index, op in enumerate(run):
        is_frozen = index < first or (bool(frozen_inputs) and op.reads == frozen_inputs)
        if op.name in adapted:
            found += _adapting(op, lora.rank, not is_frozen)
        found.append(_frozen(op, index >= first, not is_frozen))
    return Run(found)


def _nameless(op: Operation, layer: int) -> object:
    """Return a hashable key that is equal for operations in different blocks that do the same: the
    tensors that `op` reads, computes and saves, with the block's index `layer` taken out of their
    names."""

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


def _adapted(parameters: Iterable[ParameterSpec], lora: LoraConfig) -> list[ParameterSpec]:
    """Return the specs of the weights, among a model's or a slice's parameters, that get an adapter
    by [lora]. Raises ConfigError for a target that is not a linear layer."""
    linear = {path: spec for spec in parameters if spec.is_block_matrix and (path := _module(spec))}
    return [linear[path] for path in targeted(list(linear), lora)]


def targeted(linear: Sequence[str], lora: LoraConfig) -> list[str]:
    """Return the paths in `linear` that get an adapter. `linear` holds paths to linear layers, such
    as `blocks.0.attention.qkv`; all are chosen if `lora.targets` is empty, else those whose last
    component is in it. Raises ConfigError for a target that matches no path."""
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
    """Whether a parameter belongs to an adapter: its A or B."""
    return "rank" in spec.axes


def _adapter(spec: ParameterSpec, rank: int) -> Iterator[ParameterSpec]:
    """Yield the specs of A (rank, inputs) and B (outputs, rank) for a matrix (outputs, inputs)."""
    n_outputs, n_inputs = spec.shape
    init, path = Init("uniform", n_inputs**-0.5), _module(spec)
    outputs, inputs = spec.axes
    yield ParameterSpec(
        f"{path}.{A}",
        (rank, n_inputs),
        ("rank", inputs),
        init,
        True,
        spec.layer,
        sums_over=(*spec.sums_over, outputs),
    )
    yield ParameterSpec(
        f"{path}.{B}",
        (n_outputs, rank),
        (outputs, "rank"),
        Init("zeros"),
        True,
        spec.layer,
        sums_over=(*spec.sums_over, inputs),
    )


def _frozen(op: Operation, reads_gradient: bool, gives_gradient: bool) -> Operation:
    """Return `op` as it is in a run that trains adapters only: with its parameters frozen, and two
    flags set. Tensors that only its parameters' gradients would need are no longer saved: a matmul
    or a look-up saves none, nor does any operation without `gives_gradient`. The head is an
    exception: its input's gradient is computed together with the loss and saved, as many bytes as
    its input.

    reads_gradient: True if the backward pass computes the gradient of its result.
    gives_gradient: True if the backward pass computes the gradients of its inputs.
    """
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
    """Yield the two matmuls of an adapter (LoRA) on the linear layer whose matmul is `op` with
    input x: A x, with `rank` numbers per token, then B (A x). `gives_gradient` is True if the
    backward pass computes x's gradient."""
    a_spec, b_spec = _adapter(op.parameters[0], rank)
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
        (a_spec,),
        op.contracts,
        op.saves,
        gives_gradient=gives_gradient,
    )
    yield Operation(added, "product", op.layer, (inner,), result, (b_spec,), "rank", (inner,))


def _module(spec: ParameterSpec) -> str:
    """Return the path of the module that owns a weight, or "" for any other parameter."""
    return spec.name.removesuffix(".weight") if spec.name.endswith(".weight") else ""
