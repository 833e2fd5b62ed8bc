"""A custom model as a ModelSource.

The only requirement is the module's call. Optional hooks (`slice`, `tensor_table`, `blocks`) enable
pipeline parallelism, tensor parallelism and activation recomputation.

Shapes: B batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.flop_counter import FlopCounterMode

from pentameter.config.schema import Config
from pentameter.data.batches.tree import Tree
from pentameter.errors import ConfigError
from pentameter.keyed import bits, make_key
from pentameter.model.loss import loss_sum
from pentameter.parallel.local_shards import copy_shard
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.adapters import add_adapters
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.initial_values import (
    InitWeights,
    built_without_parameters,
    fill_shard,
    initialize_by_module,
    seeded,
)
from pentameter.parallel.sources.model_source import Call, ModelSource
from pentameter.parallel.sources.tied_parameters import tie_again, tied_names
from pentameter.planning.adapters import is_of_adapter, targeted, with_adapters
from pentameter.planning.architecture import Axis, Init, ParameterSpec
from pentameter.planning.outline import ModelOutline
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

Build = Callable[[Config], nn.Module]
TensorTable = Callable[[Config, Placement], Mapping[str, ParallelStyle]]
Gives = Literal["logits", "loss", "both"]


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
        """Return the module's parameter names and shapes, and its FLOPs if it can run on `meta`.
        Raises ConfigError for a module without parameters, and for a slice with parameters that the
        full module lacks or has in another shape."""
        whole = self._shaped(config, None)
        table = tuple(self._table(whole, config))
        shapes = {spec.name: spec.shape for spec in table}
        if not shapes:
            raise ConfigError(f"the module that {self._name} builds has no parameters to train")
        gives = _gives(whole)
        flops = _flops_per_token(whole, gives, config)
        if config.lora.rank is not None:
            paths = self._adapted(whole, config)
            n_before, adapted = len(table), [s for s in table if s.name in _weights(paths)]
            table = with_adapters(table, adapted, config.lora.rank)
            n_added = sum(spec.n_elements for spec in table[n_before:])
            # A frozen weight has no gradient.
            flops = None if flops is None else flops * 2 // 3 + 6 * n_added
        names = frozenset(spec.name for spec in table)

        def names_of(layers: range) -> frozenset[str]:
            if self.slice is None:
                return names
            layer_slice = self._shaped(config, layers)
            own = {name: tuple(p.shape) for name, p in layer_slice.named_parameters()}
            for name, shape in own.items():
                if shapes.get(name) != shape:
                    there = f"has {shapes[name]}" if name in shapes else "does not have"
                    raise ConfigError(
                        f"the slice of layers {layers.start}–{layers.stop - 1} has {name} of shape "
                        f"{shape}, which the whole module that {self._name} builds {there}; give a "
                        "parameter the name that `named_parameters()` of the whole module says"
                    )
            return frozenset(own) | {
                name
                for name in names.difference(shapes)
                if f"{name.rpartition('.')[0]}.weight" in own
            }

        enabled_by = {"tensor": self.tensor_table, "pipeline": self.slice}
        return ModelOutline(
            table,
            names_of,
            flops,
            built_by=self._name,
            divided_by=frozenset(name for name, how in enabled_by.items() if how is not None),
            recomputes=bool(self._patterns),
            gives_logits=gives != "loss",
        )

    def _table(self, whole: nn.Module, config: Config) -> Iterator[ParameterSpec]:
        """Yield the parameter specs: grouped by blocks for Muon, with weight decay for matrices,
        sharded as the styles say. Raises ConfigError for a path that matches no sub-module."""
        layers = dict(enumerate(_matching(whole, self._patterns, "blocks")))
        dimensions: dict[str, int] = {}
        if self.tensor_table is not None:
            for path, style in self.tensor_table(config, Replicate()).items():
                for name, module in _matching(whole, [path], "tensor_table").items():
                    dimensions |= {
                        f"{name}.{own}": d for own, d in _sharded_dimensions(module, style).items()
                    }
        for name, parameter in whole.named_parameters():
            axes: list[Axis] = ["embed"] * parameter.ndim
            if name in dimensions:
                axes[dimensions[name]] = "mlp"
            layer = next((n for n, path in layers.items() if name.startswith(f"{path}.")), None)
            yield ParameterSpec(
                name,
                tuple(parameter.shape),
                tuple(axes),
                Init("own"),
                decay=parameter.ndim > 1,
                layer=layer,
                sums_over=("time",),
            )

    def _adapted(self, whole: nn.Module, config: Config) -> list[str]:
        """Return paths to the linear layers that [lora] adapts. Raises ConfigError if there are
        none."""
        linear = [
            f"{path}.{name}".removesuffix(".")
            for path, block in _matching(whole, self._patterns, "blocks").items()
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        ]
        if not linear:
            raise ConfigError(
                f"lora.rank={config.lora.rank} adapts the torch.nn.Linear layers within `blocks`, "
                f"and the module that {self._name} builds has none there; give pm.OwnModel "
                "`blocks`, like 'blocks.*', or leave [lora] out"
            )
        return targeted(list(dict.fromkeys(linear)), config.lora)

    @property
    def _patterns(self) -> Sequence[str]:
        return (self.blocks,) if isinstance(self.blocks, str) else self.blocks

    @property
    def _name(self) -> str:
        """The build function's name for messages: `own_model.py:build`."""
        name = getattr(self.build, "__qualname__", type(self.build).__qualname__)
        try:
            return f"{Path(inspect.getfile(self.build)).name}:{name}"
        except TypeError:  # a callable object
            return str(name)

    def _construct(self, config: Config, layers: range | None) -> nn.Module:
        """Return the module, or a slice, as the user's functions build it. Raises ConfigError if
        they return anything but a torch.nn.Module."""
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
        """Build the full module on the CPU, with the values that its constructor sets."""
        with seeded(config.seed):
            return self._construct(config, None)

    def _built(self, config: Config, layers: range | None) -> nn.Module:
        """Build the module or a slice on the CPU; its parameters are on `meta` if `init_weights`
        will set their values."""
        made = partial(self._construct, config, layers)
        with seeded(config.seed):
            return made() if self.init_weights is None else built_without_parameters(made)

    def _shaped(self, config: Config, layers: range | None) -> nn.Module:
        """Build the module or a slice with its tensors on `meta`."""
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
        """Build the slice with the user's functions; floating-point tensors become fp64 or fp32."""
        module = self._shaped(config, layers)
        # `to(dtype)` would drop the imaginary part of complex buffers.
        return module.double() if dtype == torch.float64 else module.float()

    def call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """Return a Call whose losses and streams have the parameters' dtype. It raises ConfigError
        for a loss that is not 0-dim, and for logits with targets that are not one integer tensor.
        """
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        vocab_size, name = config.model.vocab_size, self._name
        assert vocab_size is not None  # resolved
        reads_inputs = layers.start > 0 and self.reads_inputs(model)

        def run(model: nn.Module, x: Tree, *targets: Tree) -> Tensor:
            """Call the module: x (B, …), or (stream (B, T, D), inputs), then targets (B, …)
            if any."""
            if not reads_inputs:
                return cast("Tensor", model(x, *targets))
            stream, inputs = x
            return cast("Tensor", model(stream, *targets, inputs=inputs))

        def call_for_stream(
            model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
        ) -> Tensor:
            """Return the residual stream (B, T, D)."""
            return run(model, x).to(dtype)

        def call_for_logits(
            model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
        ) -> Tensor:
            """Return logits (B, T, V) without targets, else their summed cross-entropy, 0-dim."""
            logits = run(model, x)
            if targets is None:
                return logits
            if not isinstance(targets, Tensor) or targets.is_floating_point():
                raise ConfigError(
                    f"the loss of logits is known of one tensor of integer targets; let the module "
                    f"that {name} builds take (inputs, targets) and return its summed loss"
                )
            n_classes = vocab_size if logits.ndim == 3 else logits.shape[-1]
            return loss_sum(logits, targets, min(n_classes, logits.shape[-1]))

        def call_for_loss(
            model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
        ) -> Tensor:
            """Return the module's own summed loss, 0-dim; its logits without targets."""
            if targets is None:
                return run(model, x)
            loss = run(model, x, targets)
            if loss.ndim:
                raise ConfigError(
                    f"the module that {name} builds, called with inputs and targets, returned "
                    f"{tuple(loss.shape)}; it is to return the summed loss, 0-dim. One that gives "
                    "logits takes inputs alone"
                )
            return loss.to(dtype)

        if layers.stop < config.model.n_layers and self.slice is not None:
            return call_for_stream
        return call_for_logits if _gives(model) == "logits" else call_for_loss

    def divide(
        self,
        models: Sequence[nn.Module],
        plan: Plan,
        arithmetic: Arithmetic,
        mesh: DeviceMesh | None,
        world: World,
    ) -> None:
        """Shard matrices over `tensor`, as the table says, and adapt linear layers."""
        for model in models:
            if mesh is not None and plan.layout.tensor > 1:
                self._parallelize(model, plan, mesh)
            if plan.config.lora.rank is not None:
                add_adapters(model, plan, arithmetic.matmul)

    def _parallelize(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        """Apply the tensor table's styles to those modules that this slice has, and tie parameters
        again."""
        assert self.tensor_table is not None  # the Plan has checked it
        tied = tied_names(model)
        stream = Shard(1) if plan.layout.sequence else Replicate()
        table = self.tensor_table(plan.config, stream)
        present = {path: style for path, style in table.items() if _found(model, path)}
        parallelize_module(model, mesh["tensor"], present, src_data_rank=None)
        tie_again(model, tied)

    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Have `init_weights` set the values in each slice, one sub-module after another; or copy
        this rank's shards out of a full module, built on the CPU with the seed and freed again.
        Adapters are drawn from the seed and their names. Raises ConfigError for a buffer that the
        full module lacks."""
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
                values = dict(self._built(plan.config, plan.stages[number]).named_buffers())
            else:
                assert whole is not None
                values = dict(chain(whole.named_parameters(), whole.named_buffers()))
            with torch.no_grad():
                for name, shard in chain(model.named_parameters(), model.named_buffers()):
                    if name in values:
                        copy_shard(shard, values[name].detach())
                    elif name not in specs and not isinstance(shard, nn.Parameter):
                        raise ConfigError(f"the whole module of {self._name} has no buffer {name}")

    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the sub-modules that `blocks` names."""
        return [module for path in self._patterns for module in _found(model, path).values()]

    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """Return the same modules, gathered in the weights' dtype: their code may read weights
        outside matmuls."""
        return [(block, False) for block in self.recomputed_blocks(model)]

    def reads_inputs(self, model: nn.Module) -> bool:
        """Return whether the slice's `forward` has a parameter called `inputs`."""
        return "inputs" in inspect.signature(model.forward).parameters

    def n_targets(self, targets: Tree) -> int | None:
        """Return the count from `count_targets`; None if it is absent."""
        return None if self.count_targets is None else self.count_targets(targets)

    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """Return a seed for PyTorch's generator for each row, int64 (B,)."""
        key = make_key(plan.config.seed, "generator", step)
        return torch.from_numpy(bits(key, rows.astype(np.int32)).astype(np.int64))


def model_source(model: Build | ModelSource | None) -> ModelSource:
    """Return the source that a `model` argument stands for: the built-in GPT for None.

    Raises TypeError for anything but a function or a source.
    """
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


def _gives(module: nn.Module) -> Gives:
    """Return the module's kind of output, from its `forward` signature: tokens alone, or targets
    too."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [each for each in parameters if each.kind in kinds]
    if len(positional) < 2:
        return "logits"
    return "loss" if positional[1].default is inspect.Parameter.empty else "both"


def _flops_per_token(whole: nn.Module, gives: Gives, config: Config) -> int | None:
    """Return FLOPs per trained token: three times the forward pass's matmuls on `meta`, since each
    matmul has two gradients. None if the module cannot run on `meta`, or has no matmuls that are
    counted."""
    tokens = torch.zeros((1, config.model.context_length), dtype=torch.int64, device="meta")
    was_training = whole.training
    whole.eval()
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # raised by modules that take no tokens
            FlopCounterMode(display=False) as counter,
        ):
            whole(tokens, tokens) if gives == "loss" else whole(tokens)
    except Exception:  # a run can do without this figure; a bug will show in training
        return None
    finally:
        whole.train(was_training)
    return round(3 * counter.get_total_flops() / config.model.context_length) or None


def _weights(paths: Collection[str]) -> set[str]:
    """Return the weights' names in the modules at these paths."""
    return {f"{path}.weight" for path in paths}


def _found(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return name → sub-module for those that match a path, whose components may be patterns."""
    patterns = path.split(".")
    found = {}
    for name, child in module.named_modules():
        names = name.split(".")
        if name and len(names) == len(patterns) and all(map(fnmatchcase, names, patterns)):
            found[name] = child
    return found


def _matching(whole: nn.Module, paths: Sequence[str], key: str) -> dict[str, nn.Module]:
    """Return the sub-modules that match any path. Raises ConfigError for a path that
    matches none."""
    found: dict[str, nn.Module] = {}
    for path in paths:
        matches = _found(whole, path)
        if not matches:
            known = ", ".join(name for name, _ in whole.named_children())
            raise ConfigError(f"`{key}`: no sub-module is at {path!r}; at the top are {known}")
        found |= matches
    return found


def _sharded_dimensions(module: nn.Module, style: ParallelStyle) -> dict[str, int]:
    """Return parameter name → the dimension that a style shards in a module. A style that is not
    PyTorch's own is opaque: its parameters are counted as replicated."""
    columns = isinstance(style, ColwiseParallel)
    if not columns and not isinstance(style, RowwiseParallel):
        return {}
    if isinstance(module, nn.Embedding):
        return {"weight": 1 if columns else 0}
    return {"weight": 0, "bias": 0} if columns else {"weight": 1}
