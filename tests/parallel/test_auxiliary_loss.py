"""A loss that a sub-layer adds to the objective, on any layout and with recomputation."""

from __future__ import annotations

import functools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from measured import configuration, own_batch

from pentameter.model import gpt
from pentameter.model.feed_forward import MLP
from pentameter.model.loss import AuxiliaryLoss
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World

STILL = {"dropout": 0.0}
PENALTY = 0.01


class Penalized(MLP):
    """A feed-forward layer that also keeps its inner width small."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.auxiliary = AuxiliaryLoss()

    def forward(self, x, positions, dropout_keys=None, cache=None):
        y = super().forward(x, positions, dropout_keys, cache)
        return self.auxiliary(y, PENALTY * self.up(x).square().sum())


def train(world, config, compiled=False):
    """One step's gradients by name, in float64, and the auxiliary loss on this process."""
    with patch.dict(gpt.SUB_LAYERS, {"mlp": Penalized}):
        plan = make_plan(config, world_size=world.size)
        engine = assemble(plan, torch.device("cpu"), "fp64", compiled=compiled, world=world)
        for step in range(2):  # the second begins a new total
            engine.zero_gradients()
            engine.forward_backward(own_batch(engine, 0), step)
    modules = [module for model in engine.models for module in model.modules()]
    total = sum(float(each.total) for each in modules if isinstance(each, AuxiliaryLoss))
    gradients = {name: each.grad.numpy() for name, each in engine.named_parameters()}
    return gradients, total


@functools.cache
def in_one_expression():
    """The same from the sum of all losses, with autograd alone."""
    config = configured("data=1", micro_batch_size=8)
    found = []

    class Recorded(Penalized):
        def forward(self, x, positions, dropout_keys=None, cache=None):
            found.append(PENALTY * self.up(x).square().sum())
            return MLP.forward(self, x, positions, dropout_keys, cache)

    with patch.dict(gpt.SUB_LAYERS, {"mlp": Recorded}):
        plan = make_plan(config)
        engine = assemble(plan, torch.device("cpu"), "fp64", compiled=False)
        batch = own_batch(engine, 0)
        inputs, targets = map(torch.from_numpy, (batch.inputs, batch.targets))
        loss = engine.model(inputs, targets=targets)
        ((loss + sum(found)) / targets.numel()).backward()
    return {name: each.grad.numpy() for name, each in engine.named_parameters()}, float(
        sum(found).detach()
    )


def configured(layout, **train):
    return configuration(layout, STILL, {"precision": "fp64", **train})


@pytest.mark.parametrize(
    "train_options",
    [
        {"micro_batch_size": 8},
        {"micro_batch_size": 2},
        {"micro_batch_size": 4, "activation_checkpoint": "full"},
        {"micro_batch_size": 4, "activation_checkpoint": "selective"},
    ],
)
def test_it_joins_the_objective(train_options):
    config = configured("data=1", **train_options)
    equal(train(World(), config), in_one_expression())


@pytest.mark.slow
def test_it_joins_a_compiled_objective():
    config = configured("data=1", micro_batch_size=4, activation_checkpoint="full")
    equal(train(World(), config, compiled=True), in_one_expression())


@pytest.mark.parametrize("layout", ["pipeline=2", "data=2"])
def test_layouts_need_not_know(processes, layout):
    found = processes.run(2, train, configured(layout, micro_batch_size=4))
    gradients = {name: each for of_rank, _ in found for name, each in of_rank.items()}
    equal((gradients, sum(total for _, total in found)), in_one_expression())


def equal(found, expected):
    assert found[0].keys() == expected[0].keys()
    for name, gradient in expected[0].items():
        np.testing.assert_allclose(found[0][name], gradient, rtol=1e-10, atol=1e-12)
    assert found[1] == pytest.approx(expected[1], rel=1e-10)
