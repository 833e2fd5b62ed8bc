"""Activations computed again: the same numbers, and what is computed twice."""

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.model.attention.cache import KVCache
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import GPT, build_model
from pentameter.model.loss import loss_sum
from pentameter.model.matmul import PLAIN
from pentameter.parallel.linear import install_forwards
from pentameter.parallel.memory import recomputation
from pentameter.parallel.memory.recomputation import recomputed

WAYS = ("selective", "full")


def config(**changes):
    return ModelConfig(
        **{
            "vocab_size": 11,
            "context_length": 8,
            "n_layers": 2,
            "n_heads": 2,
            "d_model": 16,
            "dropout": 0.2,
            "bias": True,
            **changes,
        }
    )


def model(how, settings):
    built = build_model(settings, 3, dtype=torch.float64).train()
    if how is not None:
        install_forwards(built, PLAIN, recomputed(built.blocks.values(), how))
    return built


def loss(built, settings, step=4):
    tokens = torch.arange(24).view(3, 8) % 11
    keys = dropout_keys(settings, 5, step, range(3))
    return loss_sum(built(tokens, dropout_keys=keys), tokens.roll(-1, 1), 11)


def pass_of(how, settings):
    built = model(how, settings)
    value = loss(built, settings)
    value.backward()
    return value.item(), {name: p.grad for name, p in built.named_parameters()}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("changes", [{}, {"attention_dropout": 0.1}, {"norm_position": "post"}])
def test_losses_and_gradients_are_the_same_bits(how, changes):
    settings = config(**changes)
    expected, theirs = pass_of(None, settings)
    value, ours = pass_of(how, settings)
    assert value == expected
    assert ours.keys() == theirs.keys() == dict(GPT(settings).named_parameters()).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def saved_bytes(built, settings):
    """What a forward pass leaves with autograd, apart from parameters."""
    own = {p.untyped_storage().data_ptr() for p in built.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(built, settings)
    assert value.requires_grad
    return sum(size for size, _ in storages.values())


def saved_bytes_per_layer(how):
    few, many = (config(n_layers=n) for n in (2, 6))
    return (saved_bytes(model(how, many), many) - saved_bytes(model(how, few), few)) / 4


def test_full_leaves_nothing_but_the_input_of_a_block():
    block_input = 3 * 8 * 16 * 8
    keys = 3 * 3 * 2 * 4  # three sites more for each of three rows
    assert saved_bytes_per_layer("full") == block_input + keys
    assert saved_bytes_per_layer(None) > 15 * block_input


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_selective_keeps_products_and_attention(monkeypatch, attention_dropout):
    decisions = {}
    policy = recomputation._keep_matmuls

    def spy(ctx, op, *arguments, **options):
        decisions[str(op)] = policy(ctx, op, *arguments, **options)
        return decisions[str(op)]

    monkeypatch.setattr(recomputation, "_keep_matmuls", spy)
    settings = config(attention_dropout=attention_dropout)
    loss(model("selective", settings), settings)
    kept = {name for name, decision in decisions.items() if decision.name == "MUST_SAVE"}
    products = {"aten.addmm.default", "aten.mm.default"} & decisions.keys()
    attention = {"aten._scaled_dot_product_flash_attention_for_cpu.default"}
    assert products
    assert kept == (products if attention_dropout else products | attention)
    assert {"aten.gelu.default", "aten.native_layer_norm.default"} <= decisions.keys() - kept
    assert ("aten.bmm.default" in decisions) == bool(attention_dropout)  # scores, largest of all


@pytest.mark.parametrize("how", WAYS)
def test_a_cache_works_as_before(how):
    settings = config()
    built, plain = model(how, settings).eval(), model(None, settings).eval()
    tokens = torch.arange(6).view(1, 6)
    cache = KVCache(settings, 1, dtype=torch.float64)
    with torch.inference_mode():
        parts = torch.cat([built(piece, cache=cache) for piece in tokens.split(4, 1)], dim=1)
        torch.testing.assert_close(parts, plain(tokens))
    assert built.state_dict().keys() == plain.state_dict().keys()
