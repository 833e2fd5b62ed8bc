"""Parameters that a module has under several names, kept one through changes that would part them.

PyTorch gives each name a tensor of its own where a module leaves `meta`, or where styles of tensor
parallelism replace parameters one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from pentameter.errors import ConfigError

SharedNames = list[list[str]]
"""The names of each parameter that has several."""


def shared_names(module: nn.Module) -> SharedNames:
    """The names that share a parameter. The first of each list is the one that FSDP keeps it by."""
    found: dict[int, list[str]] = {}
    for prefix, owner in _children_first(module, ""):
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(f"{prefix}{name}")
    return [names for names in found.values() if len(names) > 1]


def share_again(module: nn.Module, shared: SharedNames) -> None:
    """Make one parameter again of those that were one. Raises ConfigError where they have been cut
    differently since."""
    for first, *others in shared:
        kept = module.get_parameter(first)
        for name in others:
            other = module.get_parameter(name)
            if _placements(other) != _placements(kept) or other.shape != kept.shape:
                raise ConfigError(
                    f"{first} and {name} are one parameter, and the table of styles cuts one as "
                    f"{_placements(kept) or 'a whole'}, the other as "
                    f"{_placements(other) or 'a whole'}; cut both alike"
                )
            _set(module, name, kept)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer memory on a device, without values, in place."""
    shared = shared_names(module)
    module.to_empty(device=device)
    share_again(module, shared)


def share_parameter(name: str, source: nn.Module, target: nn.Module) -> None:
    """Let `target` have the parameter `name` of `source` instead of its own."""
    _set(target, name, source.get_parameter(name))


def _set(module: nn.Module, name: str, parameter: Parameter) -> None:
    path, _, own = name.rpartition(".")
    setattr(module.get_submodule(path), own, parameter)


def _placements(parameter: Parameter) -> Sequence[object]:
    return tuple(getattr(parameter, "placements", ()))


def _children_first(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module within, with the prefix of its parameters' names; one that has several names
    comes under the first, as in `named_parameters()`."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}{name}.")
    yield prefix, module
