"""The mesh of named dimensions on which everything that several processes share is laid out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pentameter.errors import ConfigError
from pentameter.planning.layout import PARAMETER_DIMENSIONS, Layout
from pentameter.processes.world import World


def build_mesh(layout: Layout, device_type: str, world: World) -> DeviceMesh:
    """The DeviceMesh of PARAMETER_DIMENSIONS; the rank at each place is that of
    `layout.parameter_coordinates`.

    Collective: all processes of the layout call it. A dimension of size 1 is there too, so that
    whoever needs one can name it. The groups are made here, not by `init_device_mesh`, because
    that leaves them PyTorch's timeout of half an hour, and gives each dimension of size 1 a group
    of its own, whose threads wake up a hundred times a second with gloo. Raises ConfigError for
    a device that processes cannot share tensors on, and where the processes have not met.
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
    here = layout.parameter_coordinates(world.rank)
    ranks = torch.arange(layout.world_size).reshape(tuple(layout.parameter_sizes.values()))
    lines = []
    for name in PARAMETER_DIMENSIONS:
        along = tuple(slice(None) if each == name else place for each, place in here.items())
        lines.append(tuple(ranks[along].tolist()))
    # A group is named after its ranks and the number of groups before it, and DTensor remembers
    # names by meshes that are equal, for as long as the process lives. Nearest dimensions first:
    # then a tensor group has the same name in the next layout that these processes take up.
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    nearest_first = lines[::-1]
    for line in sorted(nearest_first, key=lambda line: len(line) == 1):
        if line not in made:
            made[line] = make_group(line, world)
    groups = [made[line] for line in lines]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=PARAMETER_DIMENSIONS)


_NAMED: dict[str, dist.ProcessGroup] = {}


def name_of(group: dist.ProcessGroup) -> str:
    """The name of a group, for `group_named`: operations of PyTorch's take text, and no group."""
    _NAMED[group.group_name] = group
    return group.group_name


def group_named(name: str) -> dist.ProcessGroup:
    """The group that was last given to `name_of` under this name."""
    return _NAMED[name]


def group_along(dimension: str, layout: Layout, world: World) -> dist.ProcessGroup:
    """The group of processes that differ in one of MESH_DIMENSIONS, by the order of their places.
    It is a group of its own also where it has the members of another one. Collective over it."""
    here, size = layout.coordinates(world.rank), layout.sizes[dimension]
    line = [layout.rank_of(**{**here, dimension: place}) for place in range(size)]
    return _new_group(line, world)


def make_group(ranks: Iterable[int], world: World) -> dist.ProcessGroup:
    """The group of `ranks`, this one among them. Collective over them, and over no others."""
    members = sorted(ranks)
    if len(members) < world.size:
        return _new_group(members, world)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _new_group(members: Sequence[int], world: World) -> dist.ProcessGroup:
    group = dist.new_group(
        members,
        timeout=timedelta(seconds=world.timeout_seconds),
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)  # of whose members we are one
    return group
