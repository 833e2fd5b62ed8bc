"""Muon of experts that ranks shard: the same update as of the whole stack, and what it sends."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from pentameter.optim.expert_muon import ExpertMuon
from pentameter.processes.group.world import World

SHAPE = (3, 7, 5)  # divides by 2 in no dimension


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def moved(parameter: Parameter, gradients: list[torch.Tensor]) -> torch.Tensor:
    rule = ExpertMuon([{"params": [parameter], "weight_decay": 0.1}], lr=0.1, momentum=0.9)
    for gradient in gradients:
        parameter.grad = gradient
        rule.step()
    return parameter.detach()


def on_shards(world: World, dim: int) -> tuple[list, int]:
    """The whole stack after two steps on shards, and how many collectives they took."""
    mesh = init_device_mesh("cpu", (world.size,))

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(dim)])

    parameter, gradients = Parameter(placed(noise(0))), [placed(noise(1)), placed(noise(2))]
    with CommDebugMode() as sent:
        after = moved(parameter, gradients)
        n_sent = sent.get_total_counts()
    return after.full_tensor().tolist(), n_sent


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_get_the_update_of_the_whole(processes, dim):
    expected = moved(Parameter(noise(0)), [noise(1), noise(2)])
    for after, n_sent in processes.run(2, on_shards, dim):
        assert torch.equal(torch.tensor(after), expected)
        assert n_sent == (0 if dim == 0 else 2)  # by expert each rank has whole matrices
