"""The mesh of named dimensions on which everything that several processes share is laid out."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pentameter.errors import ConfigError
from pentameter.planning.layout import MESH_DIMENSIONS, Layout
from pentameter.processes.world import World


def build_mesh(layout: Layout, device_type: str, world: World) -> DeviceMesh:
    """The DeviceMesh of MESH_DIMENSIONS; the rank at each place is `layout.coordinates`'.

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
    here = layout.coordinates(world.rank)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    groups = []
    for name, size in zip(MESH_DIMENSIONS, layout.mesh_shape, strict=True):
        line = tuple(layout.rank_of(**{**here, name: index}) for index in range(size))
        if line not in made:
            made[line] = make_group(line, world)
        groups.append(made[line])
    ranks = torch.arange(layout.world_size).reshape(layout.mesh_shape)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=MESH_DIMENSIONS)


def make_group(ranks: Iterable[int], world: World) -> dist.ProcessGroup:
    """The group of `ranks`, this one among them. Collective over them, and over no others."""
    members = sorted(ranks)
    group = dist.group.WORLD
    if len(members) < world.size:
        group = dist.new_group(
            members,
            timeout=timedelta(seconds=world.timeout_seconds),
            use_local_synchronization=True,
        )
    assert isinstance(group, dist.ProcessGroup)  # of whose members we are one
    return group
