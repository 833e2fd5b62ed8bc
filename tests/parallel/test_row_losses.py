"""The loss of each batch row: the same under every layout, and the sum is `evaluate`'s."""

import numpy as np
import pytest
import torch
from measured import configuration, engine_of
from torch import nn

from pentameter.data.batches.step import Batch
from pentameter.parallel.assemble import assemble
from pentameter.parallel.sources.custom_model import OwnModel
from pentameter.planning.layouts.layout import parse_layout
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World

LAYOUTS = [
    "data=2",
    "data=2,zero=3",
    "tensor=2",
    "tensor=2,sequence=true",
    "context=2",
    "context=2,context_mode=all-to-all",
    "pipeline=2",
    "pipeline=2,schedule=interleaved,virtual_stages=2",
    "pipeline=2,schedule=zero-bubble-v,virtual_stages=2",
    "data=2,tensor=2",
    "tensor=2,pipeline=2",
    "tensor=4,tensor_mode=2d",
    "tensor=8,tensor_mode=3d",
]


def of(layout: str, **train):
    numbers = {"precision": "fp64", "micro_batch_size": 1, **train}
    return configuration(layout, {"d_ff": 16, "init_std": 0.5}, numbers)


def batch_of(n_rows=7, n_tokens=5) -> Batch:
    """Rows that fill no batch of a layout and have targets in the middle only."""
    draw = np.random.default_rng(7)
    tokens = np.zeros((n_rows, 9), dtype=np.int64)
    tokens[:, : n_tokens + 1] = draw.integers(0, 13, (n_rows, n_tokens + 1))
    targets = np.full((n_rows, 8), -1)
    for row, n_counted in enumerate(draw.integers(1, n_tokens, n_rows)):
        targets[row, n_tokens - n_counted : n_tokens] = tokens[
            row, n_tokens - n_counted + 1 : n_tokens + 1
        ]
    return Batch(tokens[:, :-1], targets, np.arange(n_rows))


def losses_of(world, config):
    engine = engine_of(world, config)[1]
    batch = batch_of()
    return engine.row_losses(batch), engine.evaluate(batch).total


@pytest.fixture(scope="module")
def alone():
    losses, total = losses_of(World(), of("data=1"))
    assert losses.sum() == pytest.approx(total, rel=1e-12)
    assert len(set(losses)) == 7
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_losses_to_every_rank(processes, alone, layout):
    for losses, total in processes.run(parse_layout(layout).world_size, losses_of, of(layout)):
        np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-10)  # of sums in another order
        assert losses.sum() == pytest.approx(total, rel=1e-12)


def test_rows_are_cut_to_what_counts_where_a_rank_has_all_layers():
    engine = engine_of(World(), of("data=1"))[1]
    seen = []
    engine.model.blocks["0"].register_forward_hook(
        lambda module, inputs, y: seen.append(tuple(y.shape))
    )
    engine.row_losses(batch_of(n_tokens=3))
    assert seen == [(7, 3, 8)]


def test_a_row_without_targets_has_no_loss():
    batch = batch_of()
    batch.targets[2] = -1
    assert engine_of(World(), of("data=1"))[1].row_losses(batch)[2] == 0


def test_a_custom_module_that_gives_logits_has_the_losses_of_its_rows():
    source = OwnModel(lambda _: nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13)))
    plan = make_plan(of("data=1"), outline_of=source.outline)
    engine = assemble(plan, torch.device("cpu"), "fp64", compiled=False, source=source)
    batch = batch_of()
    one_by_one = [
        engine.evaluate(Batch(batch.inputs[row, None], batch.targets[row, None], np.arange(1)))
        for row in range(7)
    ]
    np.testing.assert_array_equal(engine.row_losses(batch), [each.total for each in one_by_one])
