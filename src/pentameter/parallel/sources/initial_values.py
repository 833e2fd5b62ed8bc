"""Initial values for this rank's shards: by the parameter table, or by a user's function.

For a custom module, the user's function initializes each sub-module's direct parameters, as
`torch.nn.Module.apply` would call it, with PyTorch's generator seeded by the sub-module's path. So
a value depends on the seed and that path alone, and no rank needs memory for more than one
sub-module on top of its own shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.keyed import WORD, make_key
from pentameter.model.initial import fill
from pentameter.parallel.local_shards import copy_shard, local_shard
from pentameter.planning.architecture import ParameterSpec

InitWeights = Callable[[Config, str, nn.Module], None]
"""`init_weights(config, path, module)`: sets a sub-module's direct parameters."""


def fill_shard(spec: ParameterSpec, parameter: Tensor, seed: int) -> None:
    """Fill this rank's shard of a parameter with its initial value, in place. `spec` has the
    parameter's name, full shape and distribution; values follow from the run's `seed`, the name and
    the element indices, and none outside the shard is drawn."""
    shard, offset = local_shard(parameter)
    sides = zip(offset, shard.shape, strict=True)
    fill(spec, shard, tuple((start, start + size) for start, size in sides), seed)


def built_without_parameters(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `build` returns, each parameter moved to `meta` as soon as it is
    registered; buffers keep their values."""

    def to_meta(module: nn.Module, name: str, parameter: Parameter) -> Any:
        if parameter.is_meta:  # tied: another module has it too
            return None
        return Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        return build()
    finally:
        handle.remove()


def initialize_by_module(
    target: nn.Module, shaped: nn.Module, init_weights: InitWeights, config: Config
) -> None:
    """Set this rank's shards of `target`'s parameters, in place, to the values that the user's
    `init_weights` sets; `shaped` is the full module on `meta`, unsharded, whose sub-modules get
    memory one by one.

    Raises ConfigError for a parameter that `init_weights` leaves unset or sets to NaN.
    """
    wanted = dict(target.named_parameters())
    for path, owner in shaped.named_modules():
        names = [
            name
            for name, _ in owner.named_parameters(recurse=False)
            if f"{path}.{name}".removeprefix(".") in wanted
        ]
        if not names:
            continue
        on_meta = dict(owner.named_parameters(recurse=False))
        for name, parameter in on_meta.items():
            empty = torch.full_like(parameter, torch.nan, device="cpu")
            setattr(owner, name, Parameter(empty, parameter.requires_grad))
        first_word, _ = make_key(config.seed, "weights", path)  # the generator reads 32 bits
        with seeded(first_word & WORD), torch.no_grad():
            init_weights(config, path, owner)
        for name in names:
            full = f"{path}.{name}".removeprefix(".")
            value = owner.get_parameter(name).detach()
            if value.isnan().any():
                raise ConfigError(
                    f"init_weights(config, {path!r}, {type(owner).__name__}) left {full} "
                    f"{tuple(value.shape)} without values, or gave it NaN; set every parameter "
                    "that the module has itself, `named_parameters(recurse=False)`"
                )
            copy_shard(wanted[full], value)
        for name, parameter in on_meta.items():
            setattr(owner, name, parameter)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator within the context, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
