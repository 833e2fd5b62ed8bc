"""The loop through the cache, against running the model anew for every token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pentameter.config.schema import ModelConfig
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.generation.loop import (
    Generation,
    _Window,
    generate,
    sampled_tokens,
    stream,
    window_tokens,
)
from pentameter.generation.prompts import encode_prompt
from pentameter.generation.sampling import Sampling, choose, uniform_numbers
from pentameter.model.attention.cache import KVCache
from pentameter.model.gpt import GPT
from pentameter.model.initial import initialize

TOKENIZER = CharTokenizer("\n abcdefgh")


def make_model(context_length: int = 12, **settings: Any) -> GPT:
    """A model whose next token depends on all it sees: large weights, so that no two logits tie."""
    values: dict[str, Any] = {
        "vocab_size": TOKENIZER.vocab_size,
        "context_length": context_length,
        "n_layers": 2,
        "n_heads": 2,
        "d_model": 16,
        "init_std": 0.4,
    }
    config = ModelConfig(**(values | settings))
    model = GPT(config)
    initialize(model, config, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    return model


@torch.inference_mode()
def recomputed(
    model: GPT,
    prompt: np.ndarray,
    n_new: int,
    sampling: Sampling,
    *,
    sample: int = 0,
    seed: int = 0,
) -> list[int]:
    """Tokens by the documented rules, with no cache and one sample at a time."""
    model.eval()
    text = prompt.tolist()
    for position in range(len(text), len(text) + n_new):
        seen = text[-window_tokens(len(text), model.config.context_length) :]
        logits = model(torch.tensor([seen]))[0, -1:, : TOKENIZER.vocab_size].double().numpy()
        uniforms = uniform_numbers(seed, range(sample + 1), np.array([position], dtype=np.int32))
        text.append(int(choose(logits, sampling, uniforms[sample])[0]))
    return text[len(prompt) :]


def tokens_of(model: GPT, prompt: np.ndarray, n_new: int, sampling: Sampling, **more: Any) -> Any:
    samples = more.pop("samples", None)
    settings = Generation(**asdict(sampling), max_new_tokens=n_new, **more)
    steps = sampled_tokens(model, prompt, TOKENIZER.vocab_size, settings, samples)
    return np.stack(list(steps), axis=1).tolist()


def test_window_rule() -> None:
    sizes = [window_tokens(n, 6) for n in range(1, 17)]
    assert sizes == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    assert [window_tokens(n, 5) for n in range(5, 12)] == [5, 2, 3, 4, 5, 2, 3]
    assert [window_tokens(n, 1) for n in range(1, 5)] == [1, 1, 1, 1]


@given(st.integers(1, 40), st.integers(1, 400))
def test_window_grows_by_one_or_restarts_at_half(context_length: int, n: int) -> None:
    now, then = window_tokens(n, context_length), window_tokens(n + 1, context_length)
    assert 1 <= now <= context_length
    assert then == (now + 1 if now < context_length else max(1, context_length // 2))


@pytest.mark.parametrize("context_length", [1, 2, 3, 12])
@pytest.mark.parametrize("n_prompt", [1, 5, 12, 13, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_cached_text_is_the_recomputed_text(
    context_length: int, n_prompt: int, temperature: float
) -> None:
    model = make_model(context_length)
    prompt = np.random.default_rng(n_prompt).integers(0, TOKENIZER.vocab_size, n_prompt)
    sampling = Sampling(temperature)
    expected = recomputed(model, prompt, 40, sampling)
    assert tokens_of(model, prompt, 40, sampling) == [expected]
    if temperature and context_length > 1:
        assert len(set(expected)) > 2  # else it would prove nothing


@pytest.mark.parametrize("context_length", [1, 3, 12])
def test_logits_through_the_cache_are_those_of_the_window(context_length: int) -> None:
    model = make_model(context_length).double()
    text = np.random.default_rng(1).integers(0, TOKENIZER.vocab_size, (3, 50))
    window = _Window(model, 3, TOKENIZER.vocab_size)
    for n in range(4, 50):
        seen = text[:, n - window_tokens(n, context_length) : n]
        with torch.inference_mode():
            expected = model(torch.from_numpy(seen))[:, -1, : TOKENIZER.vocab_size].numpy()
        # float64: only the order of sums differs.
        np.testing.assert_allclose(window.next_logits(text[:, :n]), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [None, 3])
def test_nothing_is_read_of_the_cache_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """A host's memory is not set to zero first."""
    model, prompt, sampling = make_model(sliding_window=window), np.arange(3), Sampling()
    expected = tokens_of(model, prompt, 30, sampling, num_samples=2)
    make = KVCache.__init__

    def make_of_nan(cache: KVCache, *arguments: Any, **named: Any) -> None:
        make(cache, *arguments, **named)
        for each in (*cache.keys, *cache.values):
            each.fill_(float("nan"))

    monkeypatch.setattr(KVCache, "__init__", make_of_nan)
    assert tokens_of(model, prompt, 30, sampling, num_samples=2) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"positions": "sinusoidal", "norm_position": "post", "norm": "rmsnorm"},
        {"tied_head": False, "head_bias": True, "bias": True, "qkv_bias": True},
        {"dropout": 0.5, "attention_dropout": 0.5, "embedding_scale": True},
        {"n_experts": 4, "expert_capacity": 0.4, "dense_layers": (0,)},
    ],
)
def test_architecture_variants(settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    prompt = np.array([3, 1, 4])
    sampling = Sampling(1.2, top_k=6, top_p=0.95)
    expected = recomputed(model, prompt, 30, sampling)
    assert tokens_of(model, prompt, 30, sampling) == [expected]


def test_an_expert_has_as_much_room_with_a_cache_as_without() -> None:
    model = make_model(n_experts=4, expert_capacity=0.4).eval().double()
    tokens = torch.tensor(
        [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]]
    )
    with torch.inference_mode():
        whole = model(tokens)
        for sizes in ([1] * 12, [5, 3, 4], [11, 1]):
            cache = KVCache(model.config, 2, dtype=torch.float64)
            found = [model(piece, cache=cache) for piece in tokens.split(sizes, 1)]
            # float64: only the order of sums differs.
            torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-10)


def test_a_sample_is_the_same_in_any_batch() -> None:
    model = make_model()
    prompt = np.array([2, 7, 1])
    together = tokens_of(model, prompt, 30, Sampling(1.5), num_samples=4, seed=9)
    for sample in range(4):
        alone = recomputed(model, prompt, 30, Sampling(1.5), sample=sample, seed=9)
        assert together[sample] == alone
    assert tokens_of(model, prompt, 30, Sampling(1.5), num_samples=2, seed=9) == together[:2]
    assert len({tuple(row) for row in together}) == 4
    assert tokens_of(model, prompt, 30, Sampling(1.5), seed=10) != together[:1]


def test_continuing_a_text_gives_what_one_run_gives() -> None:
    model = make_model()
    whole = generate(model, TOKENIZER, "abc", max_new_tokens=40, seed=3)[0]
    first = whole[:17]
    rest = generate(model, TOKENIZER, "abc" + first, max_new_tokens=23, seed=3)[0]
    assert first + rest == whole


def test_padded_vocabulary_is_never_sampled() -> None:
    model = make_model(vocab_multiple=64)
    with torch.no_grad():  # the padding rows would win every draw
        for weight in model.parameters():
            if weight.shape == (64, 16):
                weight[TOKENIZER.vocab_size :] = 0.0
                weight[: TOKENIZER.vocab_size] *= 0.01
    tokens = tokens_of(model, np.array([1]), 200, Sampling(50.0), num_samples=2)
    assert np.max(tokens) < TOKENIZER.vocab_size
    assert len(np.unique(tokens)) == TOKENIZER.vocab_size


def test_a_long_prompt_is_read_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    prompt = np.arange(11) % TOKENIZER.vocab_size
    whole = tokens_of(model, prompt, 12, Sampling(0))
    monkeypatch.setattr("pentameter.generation.loop._PREFILL_LOGITS", 3 * TOKENIZER.vocab_size)
    assert tokens_of(model, prompt, 12, Sampling(0)) == whole


def test_more_draws_than_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    whole = tokens_of(model, np.array([1]), 20, Sampling(), num_samples=2)
    monkeypatch.setattr("pentameter.generation.loop._DRAWS_AT_ONCE", 7)
    assert tokens_of(model, np.array([1]), 20, Sampling(), num_samples=2) == whole


def test_pieces_make_up_the_generated_texts() -> None:
    model = make_model()
    texts = ["", "", ""]
    for sample, piece in stream(model, TOKENIZER, "ab", max_new_tokens=20, num_samples=3):
        assert piece
        texts[sample] += piece
    assert texts == generate(model, TOKENIZER, "ab", max_new_tokens=20, num_samples=3)
    assert [len(text) for text in texts] == [20, 20, 20]


def test_an_empty_prompt_starts_from_a_newline_or_token_0() -> None:
    model = make_model()
    texts = [generate(model, TOKENIZER, prompt, max_new_tokens=9) for prompt in ("", "\n")]
    assert texts[0] == texts[1]
    assert encode_prompt(CharTokenizer("xyz"), "").tolist() == [0]


def test_the_training_flag_comes_back_and_no_other_state_changes() -> None:
    model = make_model(dropout=0.5)
    onednn = torch.backends.mkldnn.enabled
    for training in (True, False):
        model.train(training)
        steps = stream(model, TOKENIZER, "a", max_new_tokens=5)
        assert model.training is training  # nothing happens before the first piece
        next(steps)
        assert not model.training
        assert not torch.is_inference_mode_enabled()
        assert torch.backends.mkldnn.enabled == onednn
        steps.close()  # type: ignore[attr-defined]
        assert model.training is training
        generate(model, TOKENIZER, "a", max_new_tokens=2)
        assert model.training is training


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": -1}, "num_samples=-1"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 2.0}, "top_p=2.0"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stream(make_model(), TOKENIZER, "a", **arguments)
    with pytest.raises(ConfigError, match=said):
        generate(make_model(), TOKENIZER, "a", **arguments)


def test_a_prompt_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="U\\+007A"):
        stream(make_model(), TOKENIZER, "abz")


def test_a_model_of_nan_is_named() -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(CorruptError, match="not finite"):
        generate(model, TOKENIZER, "a", max_new_tokens=3)


def test_a_module_that_is_kept_from_training_stays_so():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 7))
    found = sampled_tokens(model, np.array([1]), 7, Generation(max_new_tokens=2, context_length=4))
    next(found)
    assert not any(each.training for each in model.modules())
    list(found)
    assert [each.training for each in model] == [True, False, True]
    assert model.training
