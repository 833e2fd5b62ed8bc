"""A module of somebody's own, as the engine asks for it.

Nothing is asked of the module but its call. What is said of it beside that (`slice`,
`tensor_table`, `blocks`) opens pipeline and tensor parallelism, and recomputation.
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
from pentameter.parallel.adapters import add_adapters
from pentameter.parallel.gpt_source import GPTSource
from pentameter.parallel.initial_values import (
    InitWeights,
    built_without_parameters,
    fill_part,
    initialize_by_module,
    seeded,
)
from pentameter.parallel.local_parts import copy_part
from pentameter.parallel.model_source import Call, ModelSource
from pentameter.parallel.shared_parameters import share_again, shared_names
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
    """A module of one's own, and how it is divided; `Trainer(config, model=OwnModel(…))`.

    A function alone, `Trainer(config, model=build)`, is `OwnModel(build)`. It draws its own initial
    weights, in every process the same: it is built on the CPU with PyTorch's generator seeded by
    the configuration's `seed`. Before, it is built without memory, for names and shapes. Buffers
    are taken as they are built, and never change.
    """

    build: Build
    """Returns the module of a resolved configuration. It is called as `module(tokens, targets)`,
    int64 (B, T) each, -1 for targets that do not count, and gives the summed loss in nats, 0-dim;
    as `module(tokens)` it gives logits (B, T, V), of which a token's may depend on it and those
    before it alone. Where it takes tokens only, the loss is ours; where it needs targets, nothing
    is sampled from it."""
    slice: Callable[[Config, range], nn.Module] | None = None
    """Returns some of the layers 0 … model.n_layers - 1, for pipelines: the slice that begins at 0
    takes the inputs, another one the residual stream (B, model.context_length, model.d_model),
    which all but the last return; one whose `forward` has a parameter called `inputs` is given the
    batch's inputs by that name as well. Its parameters have the names and shapes that they have in
    the whole module. A parameter of one name in several slices is one parameter."""
    tensor_table: TensorTable | None = None
    """Returns path → style of the modules whose matrices processes share, for `parallel.tensor`.
    Given is where the residual stream is: `Replicate()`, or `Shard(1)` with `parallel.sequence`.
    A path may hold `*`, as for `parallelize_module`. The loss must come out whole."""
    blocks: str | tuple[str, ...] = ()
    """Paths of the sub-modules, `*` among them, whose activations `train.activation_checkpoint`
    computes again, which ZeRO gathers one after another, whose matrices Muon takes, and whose
    linear layers [lora] adapts."""
    init_weights: InitWeights | None = None
    """Sets the parameters a sub-module has itself: `init_weights(config, path, module)`, called
    for each sub-module with parameters, by its path in the whole module, with PyTorch's generator
    seeded by the path. With it no process gives values to more than its own slice, one sub-module
    at a time; without, each builds the whole module on the CPU."""
    count_targets: Callable[[Tree], int] | None = None
    """Returns how many of the targets (arrays, as `batches` gave them) count: the terms of the
    summed loss. When absent, targets are one integer array, of which those other than -1 count."""

    draws_from_generator = True
    may_leave_unused = True
    takes_any_batch = True

    # -- what planning asks ---------------------------------------------------------------------

    def outline(self, config: Config) -> ModelOutline:
        """Names and shapes of the module, and its FLOPs where it can run without values."""
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
            # Of a frozen weight there is no gradient.
            flops = None if flops is None else flops * 2 // 3 + 6 * n_added
        names = frozenset(spec.name for spec in table)

        def names_of(layers: range) -> frozenset[str]:
            if self.slice is None:
                return names
            part = self._shaped(config, layers)
            own = {name: tuple(p.shape) for name, p in part.named_parameters()}
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

        can_divide = {"tensor": self.tensor_table, "pipeline": self.slice}
        return ModelOutline(
            table,
            names_of,
            flops,
            built_by=self._name,
            divided_by=frozenset(name for name, how in can_divide.items() if how is not None),
            recomputes=bool(self._patterns),
            gives_logits=gives != "loss",
        )

    def _table(self, whole: nn.Module, config: Config) -> Iterator[ParameterSpec]:
        """The parameters: in blocks as Muon asks, matrices decaying, divided as the styles say."""
        layers = dict(enumerate(_matching(whole, self._patterns, "blocks")))
        divided: dict[str, int] = {}
        if self.tensor_table is not None:
            for path, style in self.tensor_table(config, Replicate()).items():
                for name, module in _matching(whole, [path], "tensor_table").items():
                    divided |= {f"{name}.{own}": d for own, d in _divided(module, style).items()}
        for name, parameter in whole.named_parameters():
            axes: list[Axis] = ["embed"] * parameter.ndim
            if name in divided:
                axes[divided[name]] = "mlp"
            layer = next((n for n, path in layers.items() if name.startswith(f"{path}.")), None)
            yield ParameterSpec(
                name,
                tuple(parameter.shape),
                tuple(axes),
                Init("own"),
                decay=parameter.ndim > 1,
                layer=layer,
            )

    def _adapted(self, whole: nn.Module, config: Config) -> list[str]:
        """Paths of the linear layers that [lora] adapts. Raises ConfigError where there is none."""
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
        """The function, for people: `own_model.py:build`."""
        name = getattr(self.build, "__qualname__", type(self.build).__qualname__)
        try:
            return f"{Path(inspect.getfile(self.build)).name}:{name}"
        except TypeError:  # an object that can be called
            return str(name)

    def _made(self, config: Config, layers: range | None) -> nn.Module:
        """The module, or a slice of it, as the functions return it."""
        made: object
        if layers is None or self.slice is None or len(layers) == config.model.n_layers:
            made = self.build(config)
        else:
            made = self.slice(config, layers)
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"{self._name} is to return a torch.nn.Module, and returned {type(made).__name__}"
            )
        return made

    def built(self, config: Config) -> nn.Module:
        """The whole module on the CPU, with the values that its constructor gives it."""
        with seeded(config.seed):
            return self._made(config, None)

    def _built(self, config: Config, layers: range | None) -> nn.Module:
        """The module or a slice on the CPU; its parameters on `meta` where `init_weights` is to
        give them values."""
        made = partial(self._made, config, layers)
        with seeded(config.seed):
            return made() if self.init_weights is None else built_without_parameters(made)

    def _shaped(self, config: Config, layers: range | None) -> nn.Module:
        """The module or a slice, its tensors on `meta`."""
        try:
            with torch.device("meta"):
                module = self._made(config, layers)
        except (RuntimeError, TypeError):  # its code reads values, and none are on `meta`
            module = self._built(config, layers)
        shared = shared_names(module)
        module.to("meta")  # also what was made of other tensors
        share_again(module, shared)
        return module

    # -- what assemble asks ---------------------------------------------------------------------

    def build_slice(self, config: Config, layers: range, dtype: torch.dtype) -> nn.Module:
        """The slice that the functions build, its numbers with a point in fp64 or fp32."""
        module = self._shaped(config, layers)
        # `to(dtype)` would take the imaginary part of complex buffers away.
        return module.double() if dtype == torch.float64 else module.float()

    def call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """A call that gives sums and streams in the dtype of the parameters."""
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        vocab_size, name = config.model.vocab_size, self._name
        assert vocab_size is not None  # resolved
        reads_inputs = layers.start > 0 and self.reads_inputs(model)

        def run(model: nn.Module, x: Tree, *targets: Tree) -> Tensor:
            if not reads_inputs:
                return cast("Tensor", model(x, *targets))
            stream, inputs = x
            return cast("Tensor", model(stream, *targets, inputs=inputs))

        def call_for_stream(
            model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
        ) -> Tensor:
            return run(model, x).to(dtype)

        def call_for_logits(
            model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
        ) -> Tensor:
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
        self, models: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh | None, world: World
    ) -> None:
        """Cut matrices over `tensor`, as the table says, and adapt linear layers."""
        for model in models:
            if mesh is not None and plan.layout.tensor > 1:
                self._parallelize(model, plan, mesh)
            if plan.config.lora.rank is not None:
                lora = (spec.name for spec in plan.table if is_of_adapter(spec))
                paths = dict.fromkeys(name.rpartition(".")[0] for name in lora)
                add_adapters(model, paths, plan)

    def _parallelize(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        assert self.tensor_table is not None  # the Plan has seen to it
        shared = shared_names(model)
        stream = Shard(1) if plan.layout.sequence else Replicate()
        table = self.tensor_table(plan.config, stream)
        here = {path: style for path, style in table.items() if _found(model, path)}
        parallelize_module(model, mesh["tensor"], here, src_data_rank=None)
        share_again(model, shared)

    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Have `init_weights` draw the values of each slice, one sub-module after another; or copy
        this process's part out of a whole module that is built with the seed, on the CPU, and given
        up again. Adapters are drawn from the seed and their names."""
        init_weights = self.init_weights
        whole = None if init_weights is not None else self.built(plan.config)
        specs = {spec.name: spec for spec in plan.table if is_of_adapter(spec)}
        for number, model in models.items():
            for name, parameter in model.named_parameters():
                if name in specs:
                    fill_part(specs[name], parameter, plan.config.seed)
            values: dict[str, Tensor]
            if init_weights is not None:
                # Of the whole module, as a slice may lack some of what a sub-module has itself.
                whole_on_meta = self._shaped(plan.config, None)
                initialize_by_module(model, whole_on_meta, init_weights, plan.config)
                values = dict(self._built(plan.config, plan.stages[number]).named_buffers())
            else:
                assert whole is not None
                values = dict(chain(whole.named_parameters(), whole.named_buffers()))
            with torch.no_grad():
                for name, own in chain(model.named_parameters(), model.named_buffers()):
                    if name in values:
                        copy_part(own, values[name].detach())
                    elif name not in specs and not isinstance(own, nn.Parameter):
                        raise ConfigError(f"the whole module of {self._name} has no buffer {name}")

    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The sub-modules that `blocks` names."""
        return [module for path in self._patterns for module in _found(model, path).values()]

    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """The same, in the weights' own dtype: who knows what reads them."""
        return [(block, False) for block in self.recomputed_blocks(model)]

    def reads_inputs(self, model: nn.Module) -> bool:
        """Whether the `forward` of a slice has a parameter called `inputs`."""
        return "inputs" in inspect.signature(model.forward).parameters

    def n_targets(self, targets: Tree) -> int | None:
        """What `count_targets` says."""
        return None if self.count_targets is None else self.count_targets(targets)

    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """A seed of PyTorch's generator for each row, (B,)."""
        key = make_key(plan.config.seed, "generator", step)
        return torch.from_numpy(bits(key, rows.astype(np.int32)).astype(np.int64))


def model_source(model: Build | ModelSource | None) -> ModelSource:
    """The source that a `model` argument stands for: the built-in GPT where it is None.

    Raises TypeError for what is neither a function nor a source.
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
    """What a module gives, by what its `forward` takes: tokens alone, or targets too."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [each for each in parameters if each.kind in kinds]
    if len(positional) < 2:
        return "logits"
    return "loss" if positional[1].default is inspect.Parameter.empty else "both"


def _flops_per_token(whole: nn.Module, gives: Gives, config: Config) -> int | None:
    """FLOPs of a trained token: the products of a forward pass without values, three times, as
    each product has two gradients. None where it cannot run so, or has no products that count."""
    tokens = torch.zeros((1, config.model.context_length), dtype=torch.int64, device="meta")
    was_training = whole.training
    whole.eval()
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # of one that takes no tokens
            FlopCounterMode(display=False) as counter,
        ):
            whole(tokens, tokens) if gives == "loss" else whole(tokens)
    except Exception:  # a figure that a run can do without; a mistake shows when it trains
        return None
    finally:
        whole.train(was_training)
    return round(3 * counter.get_total_flops() / config.model.context_length) or None


def _weights(paths: Collection[str]) -> set[str]:
    return {f"{path}.weight" for path in paths}


def _found(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Name → sub-module of those at a path, whose pieces may be patterns."""
    pieces = path.split(".")
    found = {}
    for name, child in module.named_modules():
        own = name.split(".")
        if name and len(own) == len(pieces) and all(map(fnmatchcase, own, pieces)):
            found[name] = child
    return found


def _matching(whole: nn.Module, paths: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The sub-modules at any of the paths. Raises ConfigError for a path where none is."""
    found: dict[str, nn.Module] = {}
    for path in paths:
        here = _found(whole, path)
        if not here:
            known = ", ".join(name for name, _ in whole.named_children())
            raise ConfigError(f"`{key}`: no sub-module is at {path!r}; at the top are {known}")
        found |= here
    return found


def _divided(module: nn.Module, style: ParallelStyle) -> dict[str, int]:
    """Name → the dimension along which a style cuts a parameter of a module. Of a style that is not
    PyTorch's own nothing is known: its parameters are counted whole."""
    columns = isinstance(style, ColwiseParallel)
    if not columns and not isinstance(style, RowwiseParallel):
        return {}
    if isinstance(module, nn.Embedding):
        return {"weight": 1 if columns else 0}
    return {"weight": 0, "bias": 0} if columns else {"weight": 1}
