"""Parameters that are offloaded to the host, beside what stays on the device: META in its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pentameter.config.schema import Config
from pentameter.model.experts import Router
from pentameter.parallel.data_parallel import parallelize_data
from pentameter.parallel.experts.balance import RouterBalance
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.sources.custom_model import OwnModel
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World

META = torch.device("meta")
EXPERTS = {"n_experts": 4, "experts_per_token": 2}


def config(*, zero: int = 1, **model: object) -> Config:
    sizes = {"vocab_size": 16, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 8}
    tree = {
        "model": sizes | model,
        "data": {"corpus": "grammar"},
        "train": {"steps": 3, "batch_size": 4, "offload": zero > 0},
        "parallel": {"zero": zero},
    }
    return Config.model_validate(tree)


class WithBuffers(nn.Module):
    """A module with a buffer under two names, one that is not saved, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("turn", torch.ones(8), persistent=False)
        self.register_buffer("again", self.turn)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens) * self.turn)


@pytest.mark.parametrize(
    ("source", "model"),
    [(GPTSource(), EXPERTS), (OwnModel(lambda config: WithBuffers()), {})],
    ids=["experts", "a custom module"],
)
def test_buffers_are_where_the_passes_compute(source, model):
    plan = make_plan(config(**model), outline_of=source.outline)
    mesh = Mesh(plan.layout, World())  # FSDP itself moves nothing that is on `meta`
    how = arithmetic("fp32")
    stage = StageModule(source.stage(plan, 0, mesh, how), META, how)
    parallelize_data(stage, source, mesh, plan)
    buffers = dict(stage.named_buffers(remove_duplicate=False))
    assert len(buffers) >= 5
    assert {each.device.type for each in buffers.values()} == {"meta"}
    assert {each.device.type for each in stage.parameters()} == {"cpu"}
    assert len([*stage.parameters()]) == len(plan.table)


@pytest.mark.parametrize("mode", ["bias", "batch"])
@pytest.mark.parametrize("not_made", [None, torch.zeros(())])
def test_an_offloaded_balance_is_moved_by_counts_of_the_device(mode, not_made):
    plan = make_plan(config(zero=0, **EXPERTS, balance=mode))
    how, mesh = arithmetic("fp32"), Mesh(plan.layout, World())
    model = GPTSource().stage(plan, 0, mesh, how).model  # all on `meta`, here in the host's place
    for router in (each for each in model.modules() if isinstance(each, Router)):
        router.counts = torch.tensor([3.0, 1.0, 2.0, 2.0])  # the CPU is the device
    RouterBalance([model], plan, None).move(not_made)
