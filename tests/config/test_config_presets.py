"""Presets: the numbers their sources fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentameter.config.files.load import load_config, preset_names
from pentameter.config.model.architecture import architecture

EXAMPLES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def test_the_presets_of_the_package():
    assert set(preset_names()) >= {
        "gpt2-124m",
        "gpt2-124m-budget",
        "gpt2-1558m",
        "gpt2-350m",
        "gpt2-774m",
        "gpt2-xl-hybrid",
        "gpt3-175b",
        "grammar",
        "llama3-70b",
        "llama3-8b",
        "modern-124m",
        "quickstart",
        "qwen3-0.6b",
        "shakespeare-char",
        "shakespeare-fast",
        "shakespeare-tutorial",
        "smollm2-135m",
        "wikitext2-small",
        "wikitext2-tutorial",
    }


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_named_after_itself(name):
    assert load_config(name).name == name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load(path):
    assert load_config(path).name == path.stem


def test_shakespeare_tutorial_is_the_sources_recipe():
    config = load_config("shakespeare-tutorial")
    model, optimizer, train = config.model, config.optimizer, config.train
    assert (model.n_layers, model.attention.n_heads, model.d_model, model.feed_forward.width) == (
        6,
        6,
        384,
        1536,
    )
    assert (model.context_length, model.feed_forward.activation, model.norm_position) == (
        256,
        "relu",
        "pre",
    )
    assert (model.bias, model.attention.qkv_bias, model.tied_head, model.head_bias) == (
        True, False, False, True,
    )  # fmt: skip
    assert (model.dropout, model.attention.dropout, model.init_std) == (0.2, 0.2, 0.02)
    assert (optimizer.betas, optimizer.weight_decay, optimizer.decay) == ((0.9, 0.999), 0.01, "all")
    assert (optimizer.learning_rate, optimizer.clip_norm) == (3e-4, 0.0)
    assert (config.schedule.name, train.steps, train.batch_size) == ("constant", 5000, 64)
    assert (train.eval_interval, train.eval_train_tokens) == (100, 32_768)
    assert (train.sample_interval, train.sample_tokens, train.sample_prompt) == (5000, 2000, "")


def test_shakespeare_char_is_the_recipe_to_use():
    config = load_config("shakespeare-char")
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (model.tied_head, model.bias, model.attention.dropout) == (True, False, 0.2)
    assert (model.feed_forward.activation, model.residual_init_scale, model.dropout) == (
        "gelu",
        True,
        0.2,
    )
    assert (optimizer.learning_rate, optimizer.betas, optimizer.clip_norm) == (1e-3, (0.9, 0.99), 1)
    assert (schedule.name, schedule.warmup_steps, schedule.min_learning_rate) == (
        "cosine", 100, 1e-4,
    )  # fmt: skip
    assert config.checkpoint.keep_best
    assert config.train.patience
    assert config.train.eval_train_tokens == 111_540


GPT2_SIZES = {
    "gpt2-124m": (12, 12, 768, 6e-4),
    "gpt2-350m": (24, 16, 1024, 3e-4),
    "gpt2-774m": (36, 20, 1280, 2.5e-4),
    "gpt2-1558m": (48, 25, 1600, 2e-4),
}


@pytest.mark.parametrize("name", GPT2_SIZES)
def test_the_gpt2_presets_are_gpt2(name):
    config = load_config(name)
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (
        model.n_layers,
        model.attention.n_heads,
        model.d_model,
        optimizer.learning_rate,
    ) == GPT2_SIZES[name]
    assert (model.vocab_size, model.vocab_multiple, model.context_length) == (50257, 128, 1024)
    assert (model.feed_forward.activation, model.norm, model.norm_position) == (
        "gelu_tanh",
        "layernorm",
        "pre",
    )
    assert (model.positions, model.tied_head, model.head_bias) == ("learned", True, False)
    assert (model.bias, model.attention.qkv_bias, model.feed_forward.width) == (True, True, None)
    assert (model.init, model.init_std, model.residual_init_scale) == ("normal", 0.02, True)
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.95), 1e-8)
    assert (optimizer.weight_decay, optimizer.decay, optimizer.clip_norm) == (0.1, "matrices", 1)
    assert (schedule.name, schedule.warmup_steps) == ("cosine", 715)
    assert schedule.min_learning_rate == pytest.approx(optimizer.learning_rate / 10)
    assert (config.train.tokens_per_step, config.data.tokenizer) == (2**19, "gpt2")


def test_gpt2_124m_budget_is_the_sources_recipe():
    config = load_config("gpt2-124m-budget")
    small, model = load_config("gpt2-124m").model, config.model
    assert model == small
    assert (config.train.tokens_per_step, config.train.micro_batch_size) == (524_288, 4)
    assert (config.train.steps, config.schedule.warmup_steps) == (50, 10)
    assert (config.optimizer.learning_rate, config.schedule.min_learning_rate) == (6e-4, 6e-5)
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.95), 1e-8)
    assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (0.1, 1.0)
    assert (config.data.order, config.log.interval) == ("sequential", 1)


def test_wikitext2_tutorial_is_the_sources_recipe():
    config = load_config("wikitext2-tutorial")
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (model.n_layers, model.attention.n_heads, model.d_model, model.feed_forward.width) == (
        8,
        16,
        4096,
        4096,
    )
    assert (model.vocab_size, model.context_length, model.dropout) == (28_782, 35, 0.2)
    assert (model.norm_position, model.positions, model.feed_forward.activation) == (
        "post", "sinusoidal", "relu",
    )  # fmt: skip
    assert (model.embedding_scale, model.init, model.tied_head) == (True, "uniform", False)
    assert (model.head_bias, model.attention.qkv_bias, model.bias) == (True, True, True)
    assert (optimizer.name, optimizer.learning_rate, optimizer.clip_norm) == ("sgd", 5.0, 0.5)
    assert (optimizer.momentum, optimizer.weight_decay) == (None, 0.0)
    assert (schedule.name, schedule.gamma, schedule.decay_interval) == ("step", 0.95, 50)
    assert (config.train.steps, config.train.batch_size) == (3 * 50, 20)
    assert (config.data.corpus, config.data.tokenizer, config.data.order) == (
        "wikitext-2", "word", "columns",
    )  # fmt: skip


def test_wikitext2_small_is_the_same_task_in_the_same_architecture():
    small, large = load_config("wikitext2-small"), load_config("wikitext2-tutorial")
    assert small.data == large.data
    sizes = {
        *("vocab_size", "n_layers", "attention.n_heads", "d_model", "feed_forward.width"),
        *("dropout", "attention.dropout"),
    }
    small_model, large_model = architecture(small.model), architecture(large.model)
    assert {key for key in small_model if small_model[key] != large_model[key]} <= sizes
    assert small.train.batch_size == large.train.batch_size


def test_gpt2_xl_hybrid_is_the_sources_recipe():
    config = load_config("gpt2-xl-hybrid")
    model, optimizer, train = config.model, config.optimizer, config.train
    assert (model.n_layers, model.attention.n_heads, model.d_model) == (48, 32, 1600)
    assert (model.vocab_size, model.context_length, model.tied_head) == (50304, 1024, True)
    assert (train.batch_size, train.micro_batch_size, train.epochs) == (192, 1, 60)
    assert (train.precision, train.activation_checkpoint) == ("fp16", "full")
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == (
        "adamw", 1.5e-4, 1e-2,
    )  # fmt: skip
    assert (config.data.order, config.data.tokenizer, config.seed) == ("documents", "gpt2", 42)
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.data) == (2, 2, None)


def test_gpt3_175b_is_the_papers():
    config = load_config("gpt3-175b")
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (model.n_layers, model.attention.n_heads, model.d_model) == (96, 96, 12_288)
    assert (model.vocab_size, model.context_length) == (50304, 2048)
    assert (optimizer.learning_rate, optimizer.betas) == (0.6e-4, (0.9, 0.95))
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)
    tokens = config.train.tokens_per_step
    assert tokens == 1536 * 2048
    assert schedule.warmup_steps == round(375e6 / tokens)
    assert schedule.decay_steps == round(260e9 / tokens)
    assert config.train.steps == round(300e9 / tokens)
    assert schedule.min_learning_rate == pytest.approx(0.1 * optimizer.learning_rate)
    parallel = config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.sequence) == (8, 16, True)


TODAYS_DECODERS = {
    "smollm2-135m": (30, 9, 3, None, 576, 1536, 49_152, 1e5, 1e-5, None, True),
    "qwen3-0.6b": (28, 16, 8, 128, 1024, 3072, 151_936, 1e6, 1e-6, "head", True),
    "llama3-8b": (32, 32, 8, None, 4096, 14_336, 128_256, 5e5, 1e-5, None, False),
    "llama3-70b": (80, 64, 8, None, 8192, 28_672, 128_256, 5e5, 1e-5, None, False),
}


@pytest.mark.parametrize("name", TODAYS_DECODERS)
def test_the_presets_of_todays_decoders_are_the_published_architectures(name):
    model = load_config(name).model
    attention = model.attention
    assert (
        model.n_layers, attention.n_heads, attention.n_kv_heads, attention.head_size,
        model.d_model, model.feed_forward.width, model.vocab_size, model.rope_theta,
        model.norm_eps, attention.qk_norm, model.tied_head,
    ) == TODAYS_DECODERS[name]  # fmt: skip
    assert model.init_std == (24**-1 if name == "smollm2-135m" else 0.02)
    assert model.residual_init_scale == (name == "smollm2-135m")
    assert (model.feed_forward.activation, model.norm, model.norm_position) == (
        "swiglu",
        "rmsnorm",
        "pre",
    )
    assert (model.positions, model.bias, model.attention.qkv_bias) == ("rotary", False, False)
