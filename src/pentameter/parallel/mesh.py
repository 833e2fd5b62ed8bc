"""The device mesh with named dimensions, and its process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pentameter.errors import ConfigError
from pentameter.planning.layouts.layout import Layout, activation_ranks, placement_ranks
from pentameter.processes.group.world import World

EXCHANGES = ("cpu", "cuda")
"""Types of the devices whose tensors processes can exchange."""


@dataclass(frozen=True)
class Mesh:
    """A layout's device mesh as one rank sees it: the rank's coordinates, and the process groups to
    which it belongs."""

    layout: Layout
    world: World
    parameters: DeviceMesh | None = None
    """The DeviceMesh over PARAMETER_DIMENSIONS, on which parameters are placed; None for a single
    process that shards nothing."""
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """This rank's process groups for exchanging activations, by mesh dimension (`context`,
    `tensor`, a grid's `depth` and `row`), with ranks in coordinate order. A dimension with a single
    rank has no entry, except `tensor` outside of grids: that group is the DeviceMesh's own.
    `expert` is the group of `exchange_ranks`."""
    experts: DeviceMesh | None = None
    """The DeviceMesh over EXPERT_DIMENSIONS, on which experts are placed if the layout shards
    them."""

    @property
    def all_parameters(self) -> tuple[DeviceMesh, ...]:
        """The DeviceMeshes on which parameters are placed: none, one, or two with sharded
        experts."""
        return tuple(mesh for mesh in (self.parameters, self.experts) if mesh is not None)

    def along(self, *dimensions: str) -> DeviceMesh:
        """Return the sub-mesh with these mesh dimensions, all of which must belong to the same
        DeviceMesh: to PARAMETER_DIMENSIONS or to EXPERT_DIMENSIONS. Raises KeyError if there is
        none."""
        for mesh in self.all_parameters:
            if set(dimensions) <= set(mesh.mesh_dim_names or ()):
                return mesh[dimensions]
        raise KeyError(f"no mesh has the dimensions {', '.join(dimensions)}")

    @cached_property
    def named_groups(self) -> dict[str, dist.ProcessGroup]:
        """This rank's groups with several ranks, by mesh dimension. A group that belongs to several
        dimensions has only the first one's entry."""
        named = dict(self.groups)
        for mesh in self.all_parameters:
            for dimension in mesh.mesh_dim_names or ():
                named.setdefault(dimension, mesh.get_group(dimension))
        found: dict[str, dist.ProcessGroup] = {}
        for dimension, group in named.items():
            if group.size() > 1 and not any(group is other for other in found.values()):
                found[dimension] = group
        return found

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate along each of MESH_DIMENSIONS, by name."""
        return self.layout.coordinates(self.world.rank)

    def group_name(self, dimension: str) -> str:
        """Return the name by which `group_named` finds this rank's group along a dimension; "" if
        `groups` has none for it, as the dimension has a single rank."""
        return self.groups[dimension].group_name if dimension in self.groups else ""


def build_mesh(layout: Layout, device_type: str, world: World) -> Mesh:
    """Build the Mesh, with a DeviceMesh unless a single process shards nothing, and a second one
    for sharded experts. Each rank's groups in them are `placement_ranks(layout, rank)`.

    Collective: every rank in the layout calls it. Dimensions with size 1 are included, so that any
    caller can name them. The groups are created here and not by `init_device_mesh`, which would
    leave them PyTorch's timeout (half an hour) and give each dimension with size 1 its own group,
    whose threads wake up a hundred times a second with gloo. Raises ConfigError for a device on
    which processes cannot exchange tensors, and if no process group is initialized.
    """
    if world.size == 1 and not layout.zero:
        return Mesh(layout, world)
    if device_type not in EXCHANGES:
        raise ConfigError(
            f"train.device={device_type} has no way to share tensors with other processes, or to "
            "shard them; set --train.device cpu, or parallel.zero 0 in one process"
        )
    if not dist.is_initialized():
        raise ConfigError(
            "[parallel] shares tensors out, and this process has no group to do it in; use the "
            "command line, or pentameter.processes.group.join.joined_world, with always_group=True "
            "for one process"
        )
    sharing, placed = activation_ranks(layout, world.rank), placement_ranks(layout, world.rank)
    created: dict[tuple[int, ...], dist.ProcessGroup] = {}
    parameters, *more = [_device_mesh(along, device_type, world, created) for along in placed]
    found = {
        dimension: _new_group(members, world, dimension) for dimension, members in sharing.items()
    }
    if not layout.is_grid:  # by which DTensor communicates, too
        found["tensor"] = parameters["tensor"].get_group()
    _NAMED.update({group.group_name: group for group in found.values()})
    return Mesh(layout, world, parameters, found, *more)


def _device_mesh(
    along: Mapping[str, Sequence[int]],
    device_type: str,
    world: World,
    created: dict[tuple[int, ...], dist.ProcessGroup],
) -> DeviceMesh:
    """Return the DeviceMesh over all ranks, in row-major order, whose dimensions are the keys of
    `along`, outermost first; each value has the ranks in this rank's group along it. Groups are
    taken from `created` (ranks → group), to which new ones are added. Collective."""
    groups_of_ranks = [tuple(members) for members in along.values()]
    dimensions = dict(zip(groups_of_ranks, along, strict=True))
    # PyTorch names a group after its ranks and the number of groups before it, and DTensor caches
    # names by equal meshes for as long as the process lives. Innermost dimensions come first, so
    # that a tensor group has the same name in the next layout that these processes run.
    innermost_first = groups_of_ranks[::-1]
    for members in sorted(innermost_first, key=lambda members: len(members) == 1):
        if members not in created:
            created[members] = make_group(members, world, dimensions[members])
    groups = [created[members] for members in groups_of_ranks]
    ranks = torch.arange(world.size).reshape([len(members) for members in groups_of_ranks])
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(along))


_NAMED: dict[str, dist.ProcessGroup] = {}


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group that `build_mesh` registered under a name in this process. For
    PyTorch's custom operations, which take strings but no groups. Raises KeyError for any other
    name."""
    return _NAMED[name]


def make_group(ranks: Iterable[int], world: World, dimension: str = "") -> dist.ProcessGroup:
    """Return a process group over `ranks`, which include this one: the world's own group if they
    are all ranks. Collective over these ranks only. dimension: along which it lies, for PyTorch's
    records of its collectives."""
    members = sorted(ranks)
    if len(members) < world.size:
        return _new_group(members, world, dimension)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _new_group(members: Sequence[int], world: World, dimension: str) -> dist.ProcessGroup:
    """Create a process group over `members`, this rank included, with the world's timeout.
    Collective over these ranks only."""
    group = dist.new_group(
        members,
        timeout=timedelta(seconds=world.timeout_seconds),
        use_local_synchronization=True,
        group_desc=dimension or None,
    )
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group
