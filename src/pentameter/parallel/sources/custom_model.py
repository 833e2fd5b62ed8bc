"""Custom models: `OwnModel` turns a user's module into a ModelSource, which the engine builds from.

The only requirement is the module's call. Optional hooks (`slice`, `tensor_table`, `blocks`) enable
pipeline parallelism, tensor parallelism and activation recomputation.

Shapes: B batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.keyed import bits, make_key
from pentameter.parallel.linear import install_forwards
from pentameter.parallel.local_shards import copy_shard
from pentameter.parallel.memory.recomputation import recomputed
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.adapters import add_adapters
from pentameter.parallel.sources.custom_call import custom_call
from pentameter.parallel.sources.custom_outline import custom_outline, modules_at
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.initial_values import (
    InitWeights,
    built_without_parameters,
    fill_shard,
    initialize_by_module,
    seeded,
)
from pentameter.parallel.sources.model_source import ModelSlice, ModelSource
from pentameter.parallel.sources.tied_parameters import tie_again, tied_names
from pentameter.planning.adapters import is_of_adapter
from pentameter.planning.outline import ModelOutline
from pentameter.planning.plan import Plan
from pentameter.tree import Tree

Build = Callable[[Config], nn.Module]
TensorTable = Callable[[Config, Placement], Mapping[str, ParallelStyle]]


@dataclass(frozen=True)
class OwnModel(ModelSource):
    """A custom module and how to parallelize it; `Trainer(config, model=OwnModel(…))`.

    A function alone, `Trainer(config, model=build)`, is `OwnModel(build)`. The module draws its own
    initial weights, the same on every rank: it is built on the CPU with PyTorch's generator seeded
    by the configuration's `seed`. Before that it is built without memory, for names and shapes.
    Buffers are taken as built, and never change.
    """

    build: Build
    """Returns the module for a resolved configuration. `module(tokens, targets)`, both int64 (B, T)
    with -1 for masked targets, returns the summed loss in nats, 0-dim. `module(tokens)` returns
    logits (B, T, V); a token's logits may depend only on it and earlier tokens. If the module takes
    tokens only, pentameter computes the loss; if it requires targets, it cannot be sampled from."""
    slice: Callable[[Config, range], nn.Module] | None = None
    """Returns a range within layers 0 … model.n_layers - 1, for pipelines. The slice that starts at
    0 takes the inputs; any other takes the residual stream (B, model.context_length,
    model.d_model). All but the last return the stream. If a slice's `forward` has a parameter
    called `inputs`, it also gets the batch's inputs by that name. Parameters have the same names
    and shapes as in the full module. A name in several slices is one tied parameter."""
    tensor_table: TensorTable | None = None
    """Returns path → style for the modules whose matrices `parallel.tensor` shards. Its second
    argument is the residual stream's placement: `Replicate()`, or `Shard(1)` with
    `parallel.sequence`. A path may contain `*`, as in `parallelize_module`. The loss must come out
    replicated."""
    blocks: str | tuple[str, ...] = ()
    """Paths (with `*` allowed) to the sub-modules whose activations `train.activation_checkpoint`
    recomputes, which ZeRO all-gathers one after another, whose matrices Muon takes, and whose
    linear layers [lora] adapts."""
    init_weights: InitWeights | None = None
    """Sets a sub-module's direct parameters: `init_weights(config, path, module)`, called for each
    sub-module with parameters, by its path in the full module, with PyTorch's generator seeded by
    the path. With it, no rank initializes more than its own slice, one sub-module at a time;
    without it, each rank builds the full module on the CPU."""
    count_targets: Callable[[Tree], int] | None = None
    """Returns how many targets (arrays, as `batches` gave them) count, i.e. the number of terms in
    the summed loss. If absent, targets are one integer array, and all but -1 count."""

    draws_from_generator = True
    may_leave_unused = True
    computes_with_dtensors = True
    takes_any_batch = True

    # -- planning -------------------------------------------------------------------------------

    def outline(self, config: Config) -> ModelOutline:
        """Return the module's outline: parameter names and shapes, the parallelism that its hooks
        permit, and FLOPs per token, None if it cannot run on `meta`. The module is built on `meta`,
        without memory. Raises ConfigError if it has no parameters, or if a hook's paths or slices
        do not fit it."""
        whole = self._shaped(config, None)
        styles = None if self.tensor_table is None else self.tensor_table(config, Replicate())
        slice_of = None if self.slice is None else partial(self._shaped, config)
        return custom_outline(config, self._name, whole, slice_of, self._patterns, styles)

    @property
    def _patterns(self) -> Sequence[str]:
        return (self.blocks,) if isinstance(self.blocks, str) else self.blocks

    @property
    def _name(self) -> str:
        """Name of the build function in messages, as `own_model.py:build`."""
        name = getattr(self.build, "__qualname__", type(self.build).__qualname__)
        try:
            return f"{Path(inspect.getfile(self.build)).name}:{name}"
        except TypeError:  # a callable object
            return str(name)

    def _construct(self, config: Config, layers: range | None) -> nn.Module:
        """Return the full module, or the slice with these layers (None for the full one), from the
        user's functions. Raises ConfigError if they return anything but a torch.nn.Module."""
        module: object
        if layers is None or self.slice is None or len(layers) == config.model.n_layers:
            module = self.build(config)
        else:
            module = self.slice(config, layers)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self._name} is to return a torch.nn.Module, and returned {type(module).__name__}"
            )
        return module

    def built(self, config: Config) -> nn.Module:
        """Build the full module on the CPU, with the values that its constructor draws from
        PyTorch's generator, seeded by the configuration's `seed`."""
        with seeded(config.seed):
            return self._construct(config, None)

    def _built(self, config: Config, layers: range | None) -> nn.Module:
        """Build the full module, or the slice with these layers, on the CPU; its parameters are on
        `meta` if `init_weights` will set their values."""
        made = partial(self._construct, config, layers)
        with seeded(config.seed):
            return made() if self.init_weights is None else built_without_parameters(made)

    def _buffers(self, config: Config, layers: range | None) -> dict[str, Tensor]:
        """Return the values of the buffers in the full module (`layers` None), or in the slice with
        these layers, by every name that they have. For modules whose parameters `init_weights`
        sets; these get no memory here. If building a slice draws random numbers, its buffers are
        taken from the full module, since a slice draws others."""
        with seeded(config.seed):
            began = torch.get_rng_state()
            module = built_without_parameters(partial(self._construct, config, layers))
            has_drawn = not torch.equal(torch.get_rng_state(), began)
        found = dict(module.named_buffers(remove_duplicate=False))
        if layers is None or not has_drawn:
            return found
        whole = self._buffers(config, None).items()
        return found | {n: v for n, v in whole if n in found and v.shape == found[n].shape}

    def _shaped(self, config: Config, layers: range | None) -> nn.Module:
        """Build the full module (`layers` None), or the slice with these layers, with all tensors
        on `meta`, without memory. If its code cannot run on `meta`, it is built on the CPU and
        moved there."""
        try:
            with torch.device("meta"):
                module = self._construct(config, layers)
        except (RuntimeError, TypeError):  # its code reads values, and none are on `meta`
            module = self._built(config, layers)
        tied = tied_names(module)
        module.to("meta")  # also tensors derived from others, which ignore the device context
        tie_again(module, tied)
        return module

    # -- assembly -------------------------------------------------------------------------------

    def build_slice(self, config: Config, layers: range, dtype: torch.dtype) -> nn.Module:
        """Build the slice with these layers on `meta`; floating-point tensors become fp64 if that
        is `dtype`, else fp32."""
        return _with_dtype(self._shaped(config, layers), dtype)

    def build_whole(self, config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Build the full module on `device`, with its constructor's values, but buffers as training
        has them; floating-point tensors become fp64 if that is `dtype`, else fp32."""
        module = self.built(config)
        if self.init_weights is not None:
            for name, value in self._buffers(config, None).items():
                module.get_buffer(name).copy_(value)
        return _with_dtype(module, dtype).to(device)

    def stage(self, plan: Plan, number: int, mesh: Mesh, arithmetic: Arithmetic) -> ModelSlice:
        """Build pipeline stage `number` on `meta` with the user's functions: matrices sharded over
        `tensor` by `tensor_table`, linear layers adapted. Return it with its call and its units.

        ZeRO all-gathers `blocks` one by one, in the weights' dtype, since their code may read
        weights outside matmuls. A stage after the first gets the batch's inputs if its `forward`
        has a parameter called `inputs`. Losses and streams have the parameters' dtype.
        """
        config, layers = plan.config, plan.stages[number]
        model = self.build_slice(config, layers, arithmetic.weights)
        if mesh.parameters is not None and plan.layout.tensor > 1:
            self._shard(model, plan, mesh.parameters["tensor"])
        add_adapters(model, plan.adapted_modules, config.lora)
        blocks = [each for path in self._patterns for each in modules_at(model, path).values()]
        how = config.train.activation_checkpoint
        forwards = recomputed(blocks, how, draws_from_generator=True)
        install_forwards(model, arithmetic.matmul, forwards)
        is_last = layers.stop >= config.model.n_layers or self.slice is None
        reads_inputs = number > 0 and "inputs" in inspect.signature(model.forward).parameters
        return ModelSlice(
            model,
            custom_call(model, config, self._name, is_last=is_last, reads_inputs=reads_inputs),
            [(block, False) for block in blocks],
            reads_inputs,
        )

    def _shard(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        """Shard this slice's modules over `mesh`, the `tensor` dimension, as `tensor_table` says,
        in place, and tie parameters again that were tied. Paths that the slice lacks are
        skipped."""
        assert self.tensor_table is not None  # the Plan has checked it
        tied = tied_names(model)
        stream = Shard(1) if plan.layout.sequence else Replicate()
        table = self.tensor_table(plan.config, stream)
        present = {path: style for path, style in table.items() if modules_at(model, path)}
        parallelize_module(model, mesh, present, src_data_rank=None)
        tie_again(model, tied)

    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Set all values in this rank's slices, in place. `models` maps stage number → slice, whose
        shards are already allocated.

        If `init_weights` is given, it sets one sub-module after another, and buffers are taken from
        a slice built anew, or from the full module if they may be drawn. If it is None, each rank
        builds the full module on the CPU with the seed, copies its own shards and buffers out of
        it, and frees it. LoRA adapters (A and B) are in neither; they are drawn from the seed and
        their names. Raises ConfigError for a buffer that the newly built module lacks, and for a
        parameter that `init_weights` leaves unset.
        """
        init_weights = self.init_weights
        whole = None if init_weights is not None else self.built(plan.config)
        specs = {spec.name: spec for spec in plan.table if is_of_adapter(spec)}
        for number, model in models.items():
            for name, parameter in model.named_parameters():
                if name in specs:
                    fill_shard(specs[name], parameter, plan.config.seed)
            values: dict[str, Tensor]
            if init_weights is not None:
                # The full module, because a slice may lack some direct parameters of a sub-module.
                whole_on_meta = self._shaped(plan.config, None)
                initialize_by_module(model, whole_on_meta, init_weights, plan.config)
                values = self._buffers(plan.config, plan.stages[number])
            else:
                assert whole is not None
                buffers = whole.named_buffers(remove_duplicate=False)  # a slice may lack the first
                values = dict(chain(whole.named_parameters(), buffers))
            with torch.no_grad():
                for name, shard in chain(model.named_parameters(), model.named_buffers()):
                    if name in values:
                        copy_shard(shard, values[name].detach())
                    elif name not in specs and not isinstance(shard, nn.Parameter):
                        raise ConfigError(f"the whole module of {self._name} has no buffer {name}")

    def n_targets(self, targets: Tree) -> int | None:
        """Return how many of `targets` (arrays) count in the loss, by the user's `count_targets`.
        None if the user gave no such function: then all targets except -1 count."""
        return None if self.count_targets is None else self.count_targets(targets)

    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """Return a seed for PyTorch's generator, int64 (B,), for each batch row in `rows`, int64
        (B,): from the configuration's seed, the step and the row's number in the global batch.
        `attended` is not read."""
        key = make_key(plan.config.seed, "generator", step)
        return torch.from_numpy(bits(key, rows.astype(np.int32)).astype(np.int64))


def _with_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    # `to(dtype)` would drop the imaginary part of complex buffers.
    return module.double() if dtype == torch.float64 else module.float()


def model_source(model: Build | ModelSource | None) -> ModelSource:
    """Return the ModelSource for a `model` argument: the built-in GPT for None, a source as it is,
    and a build function as `OwnModel(build)`. Raises TypeError for anything else."""
    if model is None:
        return GPTSource()
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, nn.Module) or not callable(model):
        raise TypeError(
            f"model is to be a function of the configuration that returns a torch.nn.Module, or "
            f"pm.OwnModel(…), not {type(model).__name__}: each process builds its own part"
        )
    return OwnModel(model)
