"""Tied parameters: one parameter under several names in a module, kept as one; and replicas in
several pipeline stages, whose gradients are summed.

PyTorch gives each name its own tensor when a module leaves `meta`, or when tensor-parallel styles
replace parameters one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from pentameter.errors import ConfigError
from pentameter.parallel import gradients
from pentameter.parallel.mesh import Mesh, make_group

TiedNames = list[list[str]]
"""One list per tied parameter: the names it has in a module."""


def tied_names(module: nn.Module) -> TiedNames:
    """Return one list per tied parameter with its names in the module. FSDP keeps the parameter
    under the first name in each list."""
    found: dict[int, list[str]] = {}
    for prefix, owner in _children_first(module, ""):
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(f"{prefix}{name}")
    return [names for names in found.values() if len(names) > 1]


def tie_again(module: nn.Module, tied: TiedNames) -> None:
    """Tie parameters again, in place, by the names that `tied_names` returned before they were
    replaced. Raises ConfigError if they have been sharded differently since."""
    for first, *others in tied:
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


def give_memory(
    module: nn.Module, device: torch.device, for_buffers: torch.device | None = None
) -> None:
    """Allocate every parameter on a device, and every buffer there or on `for_buffers`,
    uninitialized, in place; tied parameters stay tied."""
    tied = tied_names(module)
    module.to_empty(device=device)
    tie_again(module, tied)
    for owner in module.modules() if for_buffers is not None else ():
        for name, buffer in [*owner.named_buffers(recurse=False)]:
            setattr(owner, name, torch.empty_like(buffer, device=for_buffers))


def tie(models: Sequence[nn.Module], tied: Mapping[str, Sequence[int]], mesh: Mesh) -> TiedReplicas:
    """Tie parameters across this rank's slices, in place, and return this rank's parameters that
    slices on other ranks hold, too. `models` are the slices; `tied` maps each tied parameter's name
    to the `pipeline` coordinates that hold it, the owner's first. Collective over the world, as it
    creates process groups."""
    tie_within(models, tied)
    if mesh.parameters is None:
        return TiedReplicas()
    own_stage = mesh.coordinates["pipeline"]
    named = {name: each for model in models for name, each in model.named_parameters()}
    elsewhere = {name: at for name, at in tied.items() if own_stage in at and len(at) > 1}
    replicas = frozenset(name for name, at in elsewhere.items() if at[0] != own_stage)
    held: list[tuple[dist.ProcessGroup, list[Parameter]]] = []
    # In the same order on every rank, so that no two wait for each other.
    for holders in sorted({tuple(sorted(at)) for at in elsewhere.values()}):
        if len(holders) == mesh.layout.pipeline:
            group = mesh.parameters["pipeline"].get_group()
        else:
            ranks = mesh.layout.ranks_along("pipeline", mesh.world.rank)
            group = make_group([ranks[each] for each in holders], mesh.world)
        names = sorted(name for name, at in elsewhere.items() if tuple(sorted(at)) == holders)
        held.append((group, [named[name] for name in names]))
    return TiedReplicas(replicas, held)


def tie_within(models: Sequence[nn.Module], names: Iterable[str]) -> None:
    """Make each of these parameter names one parameter across this rank's slices, in place: its
    gradients then accumulate without communication. Names in fewer than two slices are left
    alone."""
    for name in names:
        found: Parameter | None = None
        for model in models:
            if name not in dict(model.named_parameters()):
                continue
            if found is None:
                found = model.get_parameter(name)
                continue
            aliases = next((each for each in tied_names(model) if name in each), [name])
            for alias in aliases:
                _set(model, alias, found)


class TiedReplicas(NamedTuple):
    """This rank's parameters that stages on other ranks hold, too, such as an embedding whose
    replica is another stage's tied head."""

    replicas: frozenset[str] = frozenset()
    """Names of those that another stage owns, which counts and saves them."""
    held: Sequence[tuple[dist.ProcessGroup, Sequence[Parameter]]] = ()
    """(group, parameters) pairs: all of them, owned or not, with the process group of the ranks
    that hold them."""

    def add_up(self) -> None:
        """All-reduce each tied parameter's gradient over the ranks that hold it, in place.
        Collective."""
        for group, held in self.held:
            gradients.add_up_all(held, group)


def _set(module: nn.Module, name: str, parameter: Parameter) -> None:
    """Register `parameter` in `module` under a dotted name, in place of the present one."""
    path, _, own = name.rpartition(".")
    setattr(module.get_submodule(path), own, parameter)


def _placements(parameter: Parameter) -> Sequence[object]:
    """Return a DTensor's placements; none for a plain tensor."""
    return tuple(getattr(parameter, "placements", ()))


def _children_first(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield every sub-module, children first, with its parameter name prefix. A module with several
    names comes under the first, as in `named_parameters()`."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}{name}.")
    yield prefix, module
