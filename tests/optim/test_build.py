"""Optimizer groups come from the parameter table."""

import torch

from pentameter.config.schema import ModelConfig, OptimizerConfig
from pentameter.model import GPT
from pentameter.optim.build import build_optimizer, parameter_groups, set_learning_rate
from pentameter.plan.table import parameter_table

MODEL = ModelConfig(vocab_size=11, context_length=8, n_layers=2, n_heads=2, d_model=8, bias=True)


def test_matrices_decay_and_vectors_do_not():
    model = GPT(MODEL)
    config = OptimizerConfig(weight_decay=0.1, decay="matrices")
    decayed, kept = parameter_groups(model.named_parameters(), parameter_table(MODEL), config)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_decay_all_leaves_one_group():
    model = GPT(MODEL)
    config = OptimizerConfig(weight_decay=0.01, decay="all")
    groups = parameter_groups(model.named_parameters(), parameter_table(MODEL), config)
    assert len(groups) == 1
    assert len(groups[0]["params"]) == len(list(model.parameters()))


def test_one_adamw_step_is_the_textbook_update():
    model = GPT(MODEL)
    config = OptimizerConfig(learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    optimizer = build_optimizer(model.named_parameters(), parameter_table(MODEL), config)
    set_learning_rate(optimizer, 0.01)
    weight = model.get_parameter("blocks.0.mlp.up.weight")
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    # At the first step both bias-corrected moments are exact, so the update is the gradient's sign.
    expected = before * (1 - 0.01 * 0.5) - 0.01 * torch.ones_like(before)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-7)


def test_sgd_is_plain():
    model = GPT(MODEL)
    config = OptimizerConfig(name="sgd", learning_rate=5.0, weight_decay=0.0)
    optimizer = build_optimizer(model.named_parameters(), parameter_table(MODEL), config)
    weight = model.get_parameter("blocks.1.mlp.down.weight")
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 5.0)
