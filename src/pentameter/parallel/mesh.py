"""The mesh of named dimensions that lays out everything several ranks work on together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pentameter.errors import ConfigError
from pentameter.planning.layout import PARAMETER_DIMENSIONS, Layout
from pentameter.planning.sharding import Placement
from pentameter.processes.world import World


def build_mesh(layout: Layout, device_type: str, world: World) -> DeviceMesh:
    """Build the DeviceMesh over PARAMETER_DIMENSIONS; each rank sits at its
    `layout.parameter_coordinates`.

    Collective: every rank in the layout calls it. Dimensions with size 1 are included, so that any
    caller can name them. The groups are created here and not by `init_device_mesh`, which would
    leave them PyTorch's timeout (half an hour) and give each dimension with size 1 its own group,
    whose threads wake up a hundred times a second with gloo. Raises ConfigError for a device on
    which processes cannot exchange tensors, and if no process group is initialized.
    """
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(
            f"train.device={device_type} has no way to share tensors with other processes, or to "
            "shard them; set --train.device cpu, or parallel.zero 0 in one process"
        )
    if not dist.is_initialized():
        raise ConfigError(
            "[parallel] shares tensors out, and this process has no group to do it in; use the "
            "command line, or pentameter.processes.join.joined_world, with always_group=True for "
            "one process"
        )
    coordinates = layout.parameter_coordinates(world.rank)
    ranks = torch.arange(layout.world_size).reshape(tuple(layout.parameter_sizes.values()))
    groups_of_ranks = []
    for name in PARAMETER_DIMENSIONS:
        along = tuple(
            slice(None) if each == name else coordinate for each, coordinate in coordinates.items()
        )
        groups_of_ranks.append(tuple(ranks[along].tolist()))
    # PyTorch names a group after its ranks and the number of groups before it, and DTensor caches
    # names by equal meshes for as long as the process lives. Innermost dimensions come first, so
    # that a tensor group has the same name in the next layout that these processes run.
    created: dict[tuple[int, ...], dist.ProcessGroup] = {}
    innermost_first = groups_of_ranks[::-1]
    for members in sorted(innermost_first, key=lambda members: len(members) == 1):
        if members not in created:
            created[members] = make_group(members, world)
    groups = [created[members] for members in groups_of_ranks]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=PARAMETER_DIMENSIONS)


def shard_parameters(
    model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> None:
    """Replace, in place, each parameter that a dimension of `mesh` shards by a DTensor, as
    `placements` say by name. The others stay plain tensors, replicated on every rank.

    Nothing is sent: parameters are on `meta`, to be initialized or loaded afterwards.
    """
    assert mesh.mesh_dim_names is not None  # every mesh here has dimension names
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = placements[f"{path}.{name}".removeprefix(".")]
            sharded = [placement.dimension(each) for each in mesh.mesh_dim_names]
            if all(dimension is None for dimension in sharded):
                continue
            dtensor_placements = [Replicate() if each is None else Shard(each) for each in sharded]
            shards = distribute_tensor(parameter, mesh, dtensor_placements, src_data_rank=None)
            sharded_parameter = nn.Parameter(shards, requires_grad=parameter.requires_grad)
            module.register_parameter(name, sharded_parameter)


_NAMED: dict[str, dist.ProcessGroup] = {}


def name_of(group: dist.ProcessGroup) -> str:
    """Return the group's name, for `group_named`: custom operations in PyTorch take text, but no
    group."""
    _NAMED[group.group_name] = group
    return group.group_name


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group last passed to `name_of` under this name."""
    return _NAMED[name]


def group_along(dimension: str, layout: Layout, world: World) -> dist.ProcessGroup:
    """Create the group whose ranks differ only in one of MESH_DIMENSIONS, ordered by their
    coordinate along it. It is always a new group, even if another has the same members. Collective
    over it."""
    coordinates, size = layout.coordinates(world.rank), layout.sizes[dimension]
    members = [layout.rank_of(**{**coordinates, dimension: each}) for each in range(size)]
    return _new_group(members, world)


def make_group(ranks: Iterable[int], world: World) -> dist.ProcessGroup:
    """Return a group of `ranks`, which include this one. Collective over these ranks only."""
    members = sorted(ranks)
    if len(members) < world.size:
        return _new_group(members, world)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _new_group(members: Sequence[int], world: World) -> dist.ProcessGroup:
    """Create a group of `members` with the world's timeout. Collective over these ranks only."""
    group = dist.new_group(
        members,
        timeout=timedelta(seconds=world.timeout_seconds),
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group
