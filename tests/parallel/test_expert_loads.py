"""How many tokens chose each expert: the same numbers on every layout, whatever the balance."""

from __future__ import annotations

import functools

import pytest
import torch
from measured import configuration, own_batch

from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.processes.world import World

MIXTURE = {"n_experts": 5, "d_expert": 6, "dense_layers": (0, 1), "dropout": 0.0}


def loads(world: World, layout: str, balance: str = "none", **train: object) -> tuple:
    """The layers with experts, and their loads in the second of two steps."""
    config = configuration(layout, {**MIXTURE, "balance": balance}, {"precision": "fp64", **train})
    plan = make_plan(config, world_size=world.size)
    engine = assemble(plan, torch.device("cpu"), "fp64", compiled=False, world=world)
    for step in range(2):
        engine.zero_gradients()
        engine.forward_backward(own_batch(engine, 0), step)
    total = engine.expert_loads.total()
    assert total is not None
    return engine.expert_loads.layers, total.tolist()


@functools.cache
def in_one_process() -> tuple:
    return loads(World(), "data=1")


@pytest.mark.parametrize("balance", ["none", "bias", "sequence", "batch"])
def test_every_token_is_counted_whatever_the_balance(balance):
    """The balance acts on later steps, and the first two have the same weights."""
    layers, rows = loads(
        World(), "data=1", balance, micro_batch_size=2, activation_checkpoint="full"
    )
    assert (layers, rows) == in_one_process()
    assert layers == (2, 3)  # those that are not dense
    assert [sum(row) for row in rows] == [8 * 8 * 2] * 2


@pytest.mark.parametrize("layout", ["data=2,zero=2", "tensor=2", "context=2", "pipeline=2"])
def test_the_sums_are_those_of_one_process(processes, layout):
    """The first of the pipeline's stages has no experts."""
    for found in processes.run(2, loads, layout):
        assert found == in_one_process()


def test_a_model_without_experts_has_none():
    config = configuration("data=1", {}, {})
    engine = assemble(make_plan(config), torch.device("cpu"), "fp32", compiled=False)
    assert engine.expert_loads.total() is None


def test_a_dense_layer_stops_no_router():
    """Layers 0 and 2 have nothing to balance; 1 and 3 move by the rate."""
    keys = {**MIXTURE, "dense_layers": (0, 2), "balance": "bias", "balance_rate": 0.25}
    config = configuration("data=1", keys, {"precision": "fp64"})
    engine = assemble(make_plan(config), torch.device("cpu"), "fp64", compiled=False)
    engine.forward_backward(own_batch(engine, 0), 0)
    engine.router_balance.move()
    parameters = dict(engine.named_parameters())
    assert engine.expert_loads.layers == (1, 3)
    for layer, counts in zip((1, 3), engine.expert_loads.total(), strict=True):
        moved = parameters[f"blocks.{layer}.experts.router.balance"].float()
        torch.testing.assert_close(moved, 0.25 * (counts.mean() - counts).sign())
