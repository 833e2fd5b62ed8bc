"""Groups along the dimensions of the mesh, in processes."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pentameter.errors import ConfigError
from pentameter.parallel.mesh import build_mesh
from pentameter.planning.layouts.layout import PARAMETER_DIMENSIONS, Layout
from pentameter.processes.group.world import World

LAYOUTS = [
    Layout(pipeline=2, data=2, zero=3, replicate=1, tensor=2),
    Layout(data=2, zero=1, context=2, tensor=2),
    Layout(data=2, context=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_of_the_groups_lie_along_their_dimension(processes, layout):
    for rank, (places, groups) in enumerate(processes.run(8, places_and_groups, layout)):
        assert places == layout.parameter_coordinates(rank)
        for name, ranks in groups.items():
            others = {other: layout.parameter_coordinates(other) for other in range(8)}
            along = [r for r, other in others.items() if {**other, name: places[name]} == places]
            assert ranks == along


def places_and_groups(world, layout):
    mesh = build_mesh(layout, "cpu", world).parameters
    return (
        {name: mesh.get_local_rank(name) for name in PARAMETER_DIMENSIONS},
        {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in PARAMETER_DIMENSIONS},
    )


def test_what_cannot_be_shared_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"train.device=mps .*--train.device cpu"):
        build_mesh(Layout(zero=1), "mps", World())
    with pytest.raises(ConfigError, match=r"no group .*always_group=True"):
        build_mesh(Layout(zero=1), "cpu", World())


def test_no_dimension_waits_longer_than_the_world(processes):
    seconds = processes.run(4, wait_for_a_late_one)
    # The world's timeout is 1 s, PyTorch's own half an hour; a busy machine adds seconds.
    assert 0.5 < seconds[0] < 60
    assert seconds[2] < 60


def wait_for_a_late_one(world):
    layout = Layout(data=2, tensor=2)
    mesh = build_mesh(layout, "cpu", replace(world, timeout_seconds=1)).parameters
    start = time.perf_counter()
    if world.rank == 1:
        world.broadcast(None)  # until the others have given up
    elif world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group("tensor"))
        world.broadcast(None)
    else:
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tensor"))
        world.broadcast(None)
    return time.perf_counter() - start
