"""Parameters that a module has under several names, kept one through changes that would part them;
and those that two pipeline stages have a copy of.

PyTorch gives each name a tensor of its own where a module leaves `meta`, or where styles of tensor
parallelism replace parameters one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from pentameter.errors import ConfigError
from pentameter.parallel import gradients
from pentameter.parallel.mesh import make_group
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

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


class TiedCopies:
    """Parameters that the first stage shares with the last: an embedding, and the tied head's copy.

    Made by every process of the world at the same time. `copies` are those that this process holds
    as copies only.
    """

    def __init__(
        self, plan: Plan, mesh: DeviceMesh, world: World, named: Mapping[str, Parameter]
    ) -> None:
        self._held: list[Parameter] = []
        self.copies: frozenset[str] = frozenset()
        self._group: dist.ProcessGroup | None = None
        if not plan.tied_names:
            return
        last = plan.layout.pipeline - 1
        places = plan.layout.coordinates(world.rank)
        if places["pipeline"] not in (0, last):
            return
        self._held = [named[name] for name in sorted(plan.tied_names)]
        self.copies = plan.tied_names if places["pipeline"] == last else frozenset()
        if last == 1:
            self._group = mesh["pipeline"].get_group()
        else:
            ends = (plan.layout.rank_of(**{**places, "pipeline": end}) for end in (0, last))
            self._group = make_group(ends, world)

    def add_up(self) -> None:
        """Give both copies the sum of their gradients."""
        held = [gradients.local(each.grad) for each in self._held if each.grad is not None]
        if held:
            assert self._group is not None  # whoever holds a copy is in a pair
            gradients.add_up(held, self._group)


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
