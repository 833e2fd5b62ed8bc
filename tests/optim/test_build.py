"""Optimizer groups come from the parameter table."""

import pytest
import torch

from pentameter.config.schema import ModelConfig, OptimizerConfig
from pentameter.model.gpt import GPT, build_model
from pentameter.optim.build import build_optimizer, parameter_groups, set_learning_rate
from pentameter.planning.gpt import parameter_table

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


def stepped(config):
    """A model after one step on gradients of 2, and before it."""
    model = build_model(MODEL, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model.named_parameters(), parameter_table(MODEL), config)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    return before, dict(model.named_parameters())


def test_adams_decay_is_a_penalty_and_so_does_not_scale_the_step():
    config = OptimizerConfig(name="adam", learning_rate=0.01, weight_decay=0.5)
    before, after = stepped(config)
    # The gradient, 2 + 0.5 · weight, has one sign, and Adam's first step is the sign's.
    name = "blocks.0.mlp.up.weight"
    torch.testing.assert_close(after[name].detach(), before[name] - 0.01, rtol=1e-5, atol=1e-7)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = GPT(MODEL)
    config = OptimizerConfig(name="muon", weight_decay=0.1)
    optimizer = build_optimizer(model.named_parameters(), parameter_table(MODEL), config)
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    name_of = {id(p): name for name, p in model.named_parameters()}
    held = [
        {name_of[id(p)] for group in part.param_groups for p in group["params"]}
        for part in optimizer.parts
    ]
    matrices = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert held[0] == {f"blocks.{i}.{m}.weight" for i in range(2) for m in matrices}
    assert held[0] | held[1] == set(name_of.values())
    assert not held[0] & held[1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert muon.param_groups[0]["momentum"] == 0.95
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_muon_steps_as_far_as_adamw_does():
    """Of a matrix whose gradient is of full rank; what `match_rms_adamw` promises."""
    model = build_model(MODEL, 0)
    config = OptimizerConfig(name="muon", learning_rate=0.01, weight_decay=0.0, momentum=0.0)
    optimizer = build_optimizer(model.named_parameters(), parameter_table(MODEL), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).square().mean().sqrt().item()
        if name.endswith("mlp.up.weight"):
            # 0.2 of AdamW's first step, as AdamW's later ones are; singular values 0.7 … 1.2
            assert 0.7 * 0.2 * 0.01 < moved < 1.2 * 0.2 * 0.01
        if name.endswith("embedding.weight"):
            assert moved == pytest.approx(0.01, rel=1e-4)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


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
