"""A module of somebody's own, as the engine asks for it.

Nothing is asked of the module but its call. What is said of it beside that (`slice`,
`tensor_table`, `blocks`) opens pipeline and tensor parallelism, and recomputation.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Literal

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
from pentameter.errors import ConfigError
from pentameter.keyed import bits, make_key
from pentameter.model.loss import loss_sum
from pentameter.parallel.gpt_source import GPTSource
from pentameter.parallel.local_parts import copy_part
from pentameter.parallel.model_source import Call, ModelSource
from pentameter.parallel.shared_parameters import share_again, shared_names
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
    takes tokens, another one the residual stream (B, T, model.d_model), which all but the last
    return. Its parameters have the names and shapes that they have in the whole module. A parameter
    of that name in the first and in the last slice is one parameter."""
    tensor_table: TensorTable | None = None
    """Returns path → style of the modules whose matrices processes share, for `parallel.tensor`.
    Given is where the residual stream is: `Replicate()`, or `Shard(1)` with `parallel.sequence`.
    A path may hold `*`, as for `parallelize_module`. The loss must come out whole."""
    blocks: str | tuple[str, ...] = ()
    """Paths of the sub-modules, `*` among them, whose activations `train.activation_checkpoint`
    computes again, which ZeRO gathers one after another, and whose matrices Muon takes."""

    draws_from_generator = True
    may_leave_unused = True

    # -- what planning asks ---------------------------------------------------------------------

    def outline(self, config: Config) -> ModelOutline:
        """Names and shapes of the module, and its FLOPs where it can run without values."""
        whole = self._shaped(config, None)
        table = tuple(self._table(whole, config))
        shapes = {spec.name: spec.shape for spec in table}
        if not shapes:
            raise ConfigError(f"the module that {self._name} builds has no parameters to train")

        def names_of(layers: range) -> frozenset[str]:
            if self.slice is None:
                return frozenset(shapes)
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
            return frozenset(own)

        can_divide = {"tensor": self.tensor_table, "pipeline": self.slice}
        gives = _gives(whole)
        return ModelOutline(
            table,
            names_of,
            _flops_per_token(whole, gives, config),
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
        """The whole module on the CPU, with its initial values."""
        with _seeded(config.seed):
            return self._made(config, None)

    def _shaped(self, config: Config, layers: range | None) -> nn.Module:
        """The module or a slice, its tensors on `meta`."""
        try:
            with torch.device("meta"):
                module = self._made(config, layers)
        except (RuntimeError, TypeError):  # its code reads values, and none are on `meta`
            with _seeded(config.seed):
                module = self._made(config, layers)
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

        def call_for_stream(
            model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None
        ) -> Tensor:
            stream: Tensor = model(x)
            return stream.to(dtype)

        def call_for_logits(
            model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None
        ) -> Tensor:
            logits: Tensor = model(x)
            return logits if targets is None else loss_sum(logits, targets, vocab_size)

        def call_for_loss(
            model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None
        ) -> Tensor:
            if targets is None:
                logits: Tensor = model(x)
                return logits
            loss: Tensor = model(x, targets)
            if loss.ndim:
                raise ConfigError(
                    f"the module that {name} builds, called with tokens and targets, returned "
                    f"{tuple(loss.shape)}; it is to return the summed loss, 0-dim. One that gives "
                    "logits takes tokens alone"
                )
            return loss.to(dtype)

        if layers.stop < config.model.n_layers and self.slice is not None:
            return call_for_stream
        return call_for_logits if _gives(model) == "logits" else call_for_loss

    def divide(
        self, models: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh | None, world: World
    ) -> None:
        """Cut matrices over `tensor`, as the table says."""
        layout = plan.layout
        if mesh is None or layout.tensor == 1:
            return
        assert self.tensor_table is not None  # the Plan has seen to it
        for model in models:
            shared = shared_names(model)
            table = self.tensor_table(plan.config, Shard(1) if layout.sequence else Replicate())
            here = {path: style for path, style in table.items() if _found(model, path)}
            parallelize_module(model, mesh["tensor"], here, src_data_rank=None)
            share_again(model, shared)

    def initialize(self, models: Sequence[nn.Module], plan: Plan) -> None:
        """Copy this process's part out of a whole module that is built with the seed, on the CPU,
        and given up again."""
        whole = self.built(plan.config)
        values = dict(chain(whole.named_parameters(), whole.named_buffers()))
        with torch.no_grad():
            for model in models:
                for name, own in chain(model.named_parameters(), model.named_buffers()):
                    if name not in values:
                        raise ConfigError(f"the whole module of {self._name} has no buffer {name}")
                    copy_part(own, values[name].detach())

    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The sub-modules that `blocks` names."""
        return [module for path in self._patterns for module in _found(model, path).values()]

    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """The same, in the weights' own dtype: who knows what reads them."""
        return [(block, False) for block in self.recomputed_blocks(model)]

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


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """PyTorch's generator for the CPU seeded, and as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            whole(tokens, tokens) if gives == "loss" else whole(tokens)
    except Exception:  # a figure that a run can do without; a mistake shows when it trains
        return None
    finally:
        whole.train(was_training)
    return round(3 * counter.get_total_flops() / config.model.context_length) or None


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
