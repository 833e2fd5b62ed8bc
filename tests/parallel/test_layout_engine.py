"""Stages of several processes: what a Engine promises beyond a training step."""

import numpy as np
import pytest
import torch
from measured import configuration, engine_of, own_batch
from torch.distributed.tensor import DTensor

from pentameter.data.batches.step import Batch
from pentameter.errors import ConfigError
from pentameter.planning.layouts.layout import parse_layout
from pentameter.processes.group.world import World

TEXT = np.array([[3, 1, 4, 1, 5]])
TRAIN = {"micro_batch_size": 2, "precision": "bf16"}


def of(layout: str):
    """The configuration of a layout, whose `[parallel]` takes part in no number."""
    rows = {"micro_batch_size": 1} if "3d" in layout else {}
    return configuration(layout, {"dropout": 0.0, "d_ff": 16}, {**TRAIN, **rows})


GRIDS = ["tensor=4,tensor_mode=2d", "tensor=8,tensor_mode=3d"]


@pytest.mark.parametrize(
    "layout", ["tensor=2", "pipeline=2", "pipeline=2,schedule=interleaved,virtual_stages=2", *GRIDS]
)
def test_sampling_does_not_round_as_training_does(processes, layout):
    _, alone = engine_of(World(), of("data=1"))
    with torch.no_grad():
        expected = alone.model.eval()(torch.from_numpy(TEXT))[:, -1, :13].double().numpy()
    size = parse_layout(layout).world_size
    for logits in processes.run(size, logits_of, of(layout)):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-6)


def logits_of(world, config):
    return engine_of(world, config)[1].next_logits(TEXT)


@pytest.mark.parametrize("layout", ["data=2,zero=1", "data=2,zero=3", "data=2,zero=2,pipeline=2"])
def test_parameters_are_shards_again_after_passes_without_gradients(processes, layout):
    n_processes = 4 if "pipeline" in layout else 2
    assert processes.run(n_processes, sharded_after, of(layout)) == [True] * n_processes


def sharded_after(world, config):
    engine = engine_of(world, config)[1]
    sharded = []
    for look in (lambda: engine.evaluate(whole_batch()), lambda: engine.next_logits(TEXT)):
        look()
        sharded += [isinstance(parameter, DTensor) for parameter in engine.parameters()]
    return all(sharded)


def whole_batch() -> Batch:
    tokens = np.random.default_rng(7).integers(0, 13, (4, 9))
    return Batch(tokens[:, :-1], tokens[:, 1:], np.arange(4))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_training_after_an_evaluation_of_as_many_micro_batches(processes, schedule):
    """Which evaluates by a schedule of the same name and shapes, whose stages receive without
    gradients."""
    trained, evaluated = zip(
        *processes.run(2, evaluate_then_train, of(f"pipeline=2,schedule={schedule}")), strict=True
    )
    only = processes.run(1, evaluate_then_train, of("data=1"))[0]
    assert trained == pytest.approx([only[0]] * 2, rel=1e-2)
    assert evaluated == pytest.approx([only[1]] * 2, rel=1e-2)


def evaluate_then_train(world, config):
    engine = engine_of(world, config)[1]
    evaluated = engine.evaluate(whole_batch()).mean
    batch = own_batch(engine, 0)
    four = Batch(batch.inputs[:4], batch.targets[:4], batch.rows[:4])
    return engine.forward_backward(four, 0).mean, evaluated


def test_no_process_of_a_pipeline_has_the_whole_model(processes):
    for message in processes.run(2, ask_for_the_model, of("pipeline=2")):
        assert "parallel.pipeline=2" in message
        assert "engine.models" in message


def ask_for_the_model(world, config):
    engine = engine_of(world, config)[1]
    assert len(engine.models) == 1
    with pytest.raises(ConfigError) as caught:
        _ = engine.model
    return str(caught.value)


EXPERTS = {"dropout": 0.0, "n_experts": 4, "experts_per_token": 2, "d_expert": 8}


@pytest.mark.parametrize("how", ["full", "selective"])
def test_experts_whose_weights_zero_gathers_in_16_bits_are_recomputed(processes, how):
    """Their units are gathered in another order in the second pass, in which PyTorch refuses
    operations that the first had not."""
    layout = "data=2,zero=3,expert=2"
    kept, recomputed = (
        configuration(layout, EXPERTS, {**TRAIN, "activation_checkpoint": choice})
        for choice in (None, how)
    )
    assert processes.run(2, losses_and_norms, recomputed) == processes.run(
        2, losses_and_norms, kept
    )


STREAM = {**TRAIN, "stream": "bf16"}


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline=2",
        "pipeline=2,schedule=zero-bubble",
        "tensor=2",
        "tensor=2,sequence=1",
        "context=2",
        "data=2,zero=3",
        "tensor=4,tensor_mode=2d",
    ],
)
def test_a_stream_in_bf16_is_the_same_on_every_layout(processes, layout):
    alone = losses_and_norms(World(), configuration("data=1", {}, STREAM))
    for found in processes.run(
        parse_layout(layout).world_size, losses_and_norms, configuration(layout, {}, STREAM)
    ):
        assert found == pytest.approx(alone, rel=5e-3)


@pytest.mark.parametrize(
    "model", [{"norm": "rmsnorm"}, {"norm_position": "post"}, {"norm_position": "output"}, EXPERTS]
)
@pytest.mark.parametrize("how", [None, "full"])
def test_a_stream_in_bf16_is_off_by_its_rounding(model, how):
    narrow, wide = (
        configuration("data=1", model, {**train, "activation_checkpoint": how})
        for train in (STREAM, TRAIN)
    )
    found, expected = (losses_and_norms(World(), each) for each in (narrow, wide))
    assert found != expected
    assert found == pytest.approx(expected, rel=2e-2)
    assert streams_of(engine_of(World(), narrow)[1]) == {torch.bfloat16}
    once, again = (engine_of(World(), each)[1].evaluate(whole_batch()) for each in (narrow, wide))
    assert once == again  # as sampling, in the weights' dtype


def streams_of(engine):
    """The dtypes of what enters and leaves the blocks in a step, and of its gradients."""
    found = set()

    def see(module, inputs, output):
        for each in (inputs[0], output):
            found.add(each.dtype)
            each.register_hook(lambda gradient: found.add(gradient.dtype))

    for block in engine.model.blocks.values():
        block.register_forward_hook(see)
    engine.forward_backward(own_batch(engine, 0), 0)
    return found


def losses_and_norms(world, config):
    engine = engine_of(world, config)[1]
    found = []
    for step in range(2):
        found.append(engine.forward_backward(own_batch(engine, step), step).mean)
        found.append(engine.gradient_norm().item())
        engine.zero_gradients()
    return found
