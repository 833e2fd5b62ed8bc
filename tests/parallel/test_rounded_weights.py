"""Weights rounded once a step: the same gradients, bit by bit, as where every pass rounds."""

from unittest.mock import patch

import pytest
import torch
from measured import configuration, engine_of, own_batch

from pentameter.parallel.gradients import local
from pentameter.planning.rules import LayoutRules

MODEL = {"d_ff": 16, "n_heads": 4, "d_model": 16}
SHARED = {**MODEL, "n_kv_heads": 1, "qk_norm": "head", "activation": "swiglu"}
LORA = {"rank": 2}


@pytest.mark.parametrize(
    ("layout", "model", "train", "lora"),
    [
        ("tensor=2", MODEL, {}, None),
        ("tensor=2,sequence=true", SHARED, {"activation_checkpoint": "selective"}, None),
        ("tensor=2", MODEL, {}, LORA),
        ("pipeline=2", MODEL, {"activation_checkpoint": "full"}, None),
        ("pipeline=2,tensor=2,schedule=interleaved,virtual_stages=2", SHARED, {}, None),
        ("pipeline=2,schedule=zero-bubble", SHARED, {}, None),
        ("pipeline=2,schedule=zero-bubble-v,virtual_stages=2", MODEL, {}, None),
    ],
)
def test_gradients_are_the_same_bits(processes, layout, model, train, lora):
    train = {"micro_batch_size": 2, "precision": "bf16", **train}
    config = configuration(layout, model, train, lora)
    size = 4 if "interleaved" in layout else 2
    for rounded_once, rounded_often, n_leaves in processes.run(size, of_two_steps, config):
        assert n_leaves > 0
        assert rounded_once.keys() == rounded_often.keys()
        for name, gradient in rounded_once.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, rounded_often[name]), name


def of_two_steps(world, config):
    """The gradients of a second step, whose weights others would not be, in both ways."""
    ways = []
    for rounds_once in (True, False):
        with patch.object(LayoutRules, "rounds_once", lambda *_, once=rounds_once: once):
            _, engine = engine_of(world, config)
        for step in range(2):
            engine.zero_gradients()
            engine.forward_backward(own_batch(engine, step), step)
            for _, parameter in engine.named_parameters():
                if parameter.grad is not None and step == 0:
                    local(parameter.detach()).sub_(local(parameter.grad))
        ways.append(
            {
                name: local(parameter.grad).clone()
                for name, parameter in engine.named_parameters()
                if parameter.grad is not None
            }
        )
        if rounds_once:
            n_leaves = len(engine._rounded._leaves)
    return *ways, n_leaves


def test_a_step_that_fails_leaves_the_weights_in_place(processes):
    train = {"micro_batch_size": 2, "precision": "bf16"}
    config = configuration("pipeline=2", MODEL, train)
    assert processes.run(2, after_a_failure, config) == [True, True]


def after_a_failure(world, config):
    _, engine = engine_of(world, config)
    with (
        patch.object(engine._stages, "train", side_effect=RuntimeError),
        pytest.raises(RuntimeError),
    ):
        engine.forward_backward(own_batch(engine, 0), 0)
    kept = {id(parameter) for parameter in engine.parameters()}
    there = {id(each) for model in engine.models for each in model.parameters()}
    return there == kept


def test_what_is_frozen_between_steps_gets_no_gradient(processes):
    config = configuration("tensor=2", MODEL, {"micro_batch_size": 2, "precision": "bf16"})
    for frozen, thawed in processes.run(2, freeze_and_thaw, config):
        assert frozen == [False, False]
        assert thawed == [True, True]


def freeze_and_thaw(world, config):
    _, engine = engine_of(world, config)
    ups = [each for name, each in engine.named_parameters() if "mlp.up" in name][:2]
    found = []
    for step, trained in enumerate((True, False, True)):
        for parameter in ups:
            parameter.requires_grad_(trained)
        engine.zero_gradients()
        engine.forward_backward(own_batch(engine, step), step)
        found.append([parameter.grad is not None for parameter in ups])
    return found[1:]
