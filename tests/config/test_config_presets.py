"""Presets: the numbers their sources fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentameter.config.load import load_config, preset_names

EXAMPLES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def test_the_presets_of_the_package():
    assert {"quickstart", "shakespeare-char", "shakespeare-tutorial"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_named_after_itself(name):
    assert load_config(name).name == name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load(path):
    assert load_config(path).name == path.stem


def test_shakespeare_tutorial_is_the_sources_recipe():
    config = load_config("shakespeare-tutorial")
    model, optimizer, train = config.model, config.optimizer, config.train
    assert (model.n_layers, model.n_heads, model.d_model, model.d_ff) == (6, 6, 384, 1536)
    assert (model.context_length, model.activation, model.norm_position) == (256, "relu", "pre")
    assert (model.bias, model.qkv_bias, model.tied_head, model.head_bias) == (
        True, False, False, True,
    )  # fmt: skip
    assert (model.dropout, model.attention_dropout, model.init_std) == (0.2, 0.2, 0.02)
    assert (optimizer.betas, optimizer.weight_decay, optimizer.decay) == ((0.9, 0.999), 0.01, "all")
    assert (optimizer.learning_rate, optimizer.clip_norm) == (3e-4, 0.0)
    assert (config.schedule.name, train.steps, train.batch_size) == ("constant", 5000, 64)
    assert train.eval_interval == 100


def test_shakespeare_char_is_the_recipe_to_use():
    config = load_config("shakespeare-char")
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (model.tied_head, model.bias, model.attention_dropout) == (True, False, 0.2)
    assert (model.activation, model.residual_init_scale, model.dropout) == ("gelu", True, 0.2)
    assert (optimizer.learning_rate, optimizer.betas, optimizer.clip_norm) == (1e-3, (0.9, 0.99), 1)
    assert (schedule.name, schedule.warmup_steps, schedule.min_learning_rate) == (
        "cosine", 100, 1e-4,
    )  # fmt: skip
    assert config.checkpoint.keep_best
    assert config.train.patience
