"""Memory of a pipeline's messages: as much for many micro-batches as for few."""

from __future__ import annotations

import pytest
from measured import configuration, first_step, held

from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.parallel.pipeline.bounded_stage import SCHEDULES_LET_GO
from pentameter.planning.layouts.layout import parse_layout
from pentameter.planning.plan import make_plan

T, D = 256, 64
STREAM = 4 * T * D  # bytes of a micro-batch's activations between two stages
# Little but the stream: small matrices, and of each layer its input alone.
MODEL = {
    "n_layers": 4,
    "n_heads": 2,
    "d_model": D,
    "d_ff": D,
    "vocab_size": 32,
    "context_length": T,
    "dropout": 0.0,
}
FEW, MANY = 8, 16
SCHEDULES = [
    "pipeline=2",
    "pipeline=2,schedule=interleaved,virtual_stages=2",
    "pipeline=2,schedule=zero-bubble",
    "pipeline=2,schedule=zero-bubble-v,virtual_stages=2",
]


def config_of(layout, n_micro_batches):
    train = {"batch_size": n_micro_batches, "micro_batch_size": 1}
    if "zero-bubble" not in layout:  # which recomputes nothing
        train["activation_checkpoint"] = "full"
    return configuration(layout, MODEL, train)


@pytest.mark.parametrize("layout", SCHEDULES)
def test_many_micro_batches_hold_as_much_as_few(processes, layout):
    size = parse_layout(layout).world_size
    few, many = (
        [each["most"] for each in processes.run(size, held, config_of(layout, n))]
        for n in (FEW, MANY)
    )
    batch = 2 * 8 * T * (MANY - FEW)  # tokens and targets, int64
    for one, other in zip(few, many, strict=True):
        assert other - one < batch + STREAM / 2  # one stream a micro-batch would be 8
    planned = [plan_memory(make_plan(config_of(layout, n), world_size=size)) for n in (FEW, MANY)]
    assert planned[0] == planned[1]
    assert max(few) == pytest.approx(planned[0].total_bytes, rel=0.1)


@pytest.mark.parametrize("layout", ["pipeline=2", "pipeline=2,schedule=gpipe"])
def test_pytorch_keeps_receives_without_memory(processes, layout):
    """The one place where a private detail of PyTorch counts: each of its receives has a `buffer`,
    and is kept by micro-batch in the stage's `args_recv_info` and `grad_recv_info`."""
    size = parse_layout(layout).world_size
    for most, stages in processes.run(size, first_step, config_of(layout, MANY)):
        assert stages == [(2 * MANY, set() if SCHEDULES_LET_GO else {"meta"})]
        planned = plan_memory(make_plan(config_of(layout, MANY), world_size=size))
        assert most < planned.total_bytes + STREAM  # when PyTorch makes the buffers, too
