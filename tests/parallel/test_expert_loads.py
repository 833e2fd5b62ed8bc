"""How many tokens chose each expert: the same numbers on every layout, whatever the balance."""

from __future__ import annotations

import functools

import pytest
import torch
from measured import configuration, own_batch

from pentameter.model.experts import Router
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World

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
    assert layers == (2, 3)  # those that are not dense
    assert [sum(row[:5]) for row in rows] == [8 * 8 * 2] * 2
    compare((layers, rows), in_one_process())


@pytest.mark.parametrize("layout", ["data=2,zero=2", "tensor=2", "context=2", "pipeline=2"])
def test_the_sums_are_those_of_one_process(processes, layout):
    """The first of the pipeline's stages has no experts."""
    for found in processes.run(2, loads, layout):
        compare(found, in_one_process())


def compare(found: tuple, expected: tuple) -> None:
    """Counts are equal, the logits' sums up to rounding."""
    assert found[0] == expected[0]
    for row, other in zip(found[1], expected[1], strict=True):
        assert row[:5] == other[:5]
        assert row[5:] == pytest.approx(other[5:], rel=1e-6)


def test_the_sums_are_those_of_the_logits():
    """The last of two steps, whose micro-batches are recomputed."""
    config = configuration(
        "data=1",
        {**MIXTURE, "router": "sigmoid"},
        {"precision": "fp64", "micro_batch_size": 4, "activation_checkpoint": "full"},
    )
    engine = assemble(make_plan(config), torch.device("cpu"), "fp64", compiled=False)
    seen: dict[Router, list[torch.Tensor]] = {}
    for module in engine.models[0].modules():
        if isinstance(module, Router):
            seen[module] = []
            route, kept = module.route, seen[module]
            module.route = lambda logits, numbers, route=route, kept=kept: (
                kept.append(logits.detach()) or route(logits, numbers)
            )
    for step in range(2):
        for kept in seen.values():
            kept.clear()
        engine.forward_backward(own_batch(engine, 0), step)
    for kept, row in zip(seen.values(), engine.expert_loads.total(), strict=True):
        once = torch.cat(kept[:1] + kept[2:3])  # two micro-batches, each routed twice
        assert len(kept) == 4
        z = once.logsumexp(-1).square().sum()
        torch.testing.assert_close(row[5:].double(), torch.stack((z, once.square().sum(), z * 0)))


def exchanged(world: World, layout: str, **train: object) -> tuple:
    """For each layer, this rank's counts and all ranks' totals."""
    config = configuration(layout, {**MIXTURE, "n_experts": 4}, {"precision": "fp64", **train})
    engine = assemble(
        make_plan(config, world_size=world.size),
        torch.device("cpu"),
        "fp64",
        compiled=False,
        world=world,
    )
    for step in range(2):
        engine.forward_backward(own_batch(engine, 0), step)
    routers = (module for module in engine.models[0].modules() if isinstance(module, Router))
    return [router.counts.tolist() for router in routers], engine.expert_loads.total().tolist()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_exchanged_are_those_of_rows_that_leave_a_rank(processes, recompute):
    """Each rank has two of four experts. A row, its output, and the gradients of both travel, in
    float64, once also where the layer is recomputed."""
    layout = "data=2,expert=2"
    found = processes.run(2, functools.partial(exchanged, activation_checkpoint=recompute), layout)
    (first, total), (second, _) = found
    for own, other, row in zip(first, second, total, strict=True):
        n_rows = sum(own[2:]) + sum(other[:2])
        assert row[-1] == n_rows * 8 * 8 * 4  # d_model 8, 8 bytes, sent four times


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
    for layer, totals in zip((1, 3), engine.expert_loads.total(), strict=True):
        counts = totals[:5]
        moved = parameters[f"blocks.{layer}.experts.router.balance"].float()
        torch.testing.assert_close(moved, 0.25 * (counts.mean() - counts).sign())
