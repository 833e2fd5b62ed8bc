"""Parameters that a module has under several names, kept one through changes that would part them;
and those that several pipeline stages have a copy of.

PyTorch gives each name a tensor of its own where a module leaves `meta`, or where styles of tensor
parallelism replace parameters one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

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


def share_within(models: Sequence[nn.Module], names: Iterable[str]) -> None:
    """Make one parameter of those of each of these names that several slices of this process have:
    their gradients then add up by themselves."""
    for name in names:
        found: Parameter | None = None
        for model in models:
            if name not in dict(model.named_parameters()):
                continue
            if found is None:
                found = model.get_parameter(name)
                continue
            aliases = next((each for each in shared_names(model) if name in each), [name])
            for alias in aliases:
                _set(model, alias, found)


class TiedCopies:
    """Parameters that stages in different processes share: an embedding, say, and the tied head's
    copy.

    Made by every process of the world at the same time. `copies` are those that this process holds
    as copies only.
    """

    def __init__(
        self, plan: Plan, mesh: DeviceMesh, world: World, named: Mapping[str, Parameter]
    ) -> None:
        layout = plan.layout
        coordinates = layout.coordinates(world.rank)
        here = coordinates["pipeline"]
        shared = {name: at for name, at in plan.tied.items() if here in at and len(at) > 1}
        self.copies = frozenset(name for name, at in shared.items() if at[0] != here)
        self._held: list[tuple[dist.ProcessGroup, list[Parameter]]] = []
        # In one order everywhere, so that no two processes wait for each other.
        for holders in sorted({tuple(sorted(at)) for at in shared.values()}):
            if len(holders) == layout.pipeline:
                group = mesh["pipeline"].get_group()
            else:
                ranks = (layout.rank_of(**{**coordinates, "pipeline": each}) for each in holders)
                group = make_group(ranks, world)
            names = sorted(name for name, at in shared.items() if tuple(sorted(at)) == holders)
            self._held.append((group, [named[name] for name in names]))

    def add_up(self) -> None:
        """Give all copies of a parameter the sum of their gradients."""
        for group, held in self._held:
            found = [gradients.local(each.grad) for each in held if each.grad is not None]
            if found:
                gradients.add_up(found, group)


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
