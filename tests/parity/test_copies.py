"""A bit flips in one of several copies of a tensor: no checkpoint mixes the two models."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pentameter.parallel.local_shards import local_shard
from trials.layout_runs import TINY, changed

NORM, MATRIX, TIED = (
    "blocks.0.attention_norm.weight",
    "blocks.1.mlp.up.weight",
    "token_embedding.weight",
)
LAYOUTS = {
    "data": (2, {"parallel.data": 2}, MATRIX, 3),
    "copies of shards": (
        4,
        {"parallel.data": 4, "parallel.zero": 3, "parallel.replicate": 2},
        MATRIX,
        22,
    ),
    "tensor": (2, {"parallel.tensor": 2}, NORM, 22),
    "grid": (4, {"parallel.tensor": 4, "parallel.tensor_mode": "2d"}, NORM, 3),
    "context": (2, {"parallel.context": 2}, MATRIX, 22),
    "tied": (2, {"parallel.pipeline": 2}, TIED, 3),
}


class FlipBit:
    """A hook that flips a bit of a weight after a step, in one process."""

    def __init__(self, name, bit, rank, step, world):
        self.name, self.bit, self.step, self.is_faulty = name, bit, step, world.rank == rank

    def on_step(self, run, step):
        if step.step == self.step and self.is_faulty:
            local, _ = local_shard(dict(run.engine.named_parameters())[self.name])
            element = local.reshape(-1)[:1]  # a view, as each shard here is contiguous
            element.copy_((element.view(torch.int32) ^ (1 << self.bit)).view(torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_of_different_copies_is_refused(runs, layout):
    size, parallel, name, bit = LAYOUTS[layout]
    rank = size - 1  # which is a copy only, not the one that writes
    run = runs.train(changed(TINY, parallel), size, hook=partial(FlipBit, name, bit, rank, 6))
    assert run.end.reason.startswith("TrainingFailedError: step 6 is not saved: ")
    assert f"model tensor {name} of rank" in run.end.reason
    assert f"rank {rank} " in run.end.reason
    # Equal ones were no fault at step 3.
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000003"]


def test_copies_are_compared_between_checkpoints(runs):
    size, parallel, name, _ = LAYOUTS["data"]
    config = changed(TINY, parallel, {"train.check_copies": 1, "checkpoint.interval": 8})
    flip = partial(FlipBit, name, 3, 1, 4)
    run = runs.train(config, size, hook=flip)
    assert run.end.reason.startswith("TrainingFailedError: step 4 goes no further: model tensor")
    assert f"{name} of rank 1 is not that of rank 0 (either may be wrong)" in run.end.reason
    assert not list((run.folder / "checkpoints").iterdir())


def test_one_of_three_is_the_odd_one(runs):
    config = changed(TINY, {"parallel.data": 3, "train.batch_size": 6, "train.check_copies": 2})
    run = runs.train(config, 3, hook=partial(FlipBit, NORM, 22, 1, 2))
    assert f"model tensor {NORM} of rank 1 is not that of ranks 0 and 2, and" in run.end.reason
