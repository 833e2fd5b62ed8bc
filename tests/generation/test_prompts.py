"""What a prompt becomes, and how a sample continues it, for every kind of tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from scripted import byte_tokenizer, model_that_says

from pentameter.config.schema import ModelConfig
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import CHATML_TEMPLATE
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError
from pentameter.generation.loop import Generation, generate, sample_text
from pentameter.generation.prompts import encode_prompt, question_prompt
from pentameter.model.gpt import GPT
from pentameter.model.initial import initialize

BPE = train_bpe(["né à Paris, né à Paris"], 270)
WORDS = WordTokenizer(["<unk>", "the", "cat"])


def model_for(tokenizer: Any) -> GPT:
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=8, n_layers=1, n_heads=1, d_model=8
    )
    model = GPT(config)
    initialize(model, config, seed=1)
    return model


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "ids"),
    [
        (BPE, "", [BPE.end_of_text]),
        (BPE, "\n", BPE.encode("\n").tolist()),
        (BpeTokenizer(BPE.tokens[:-1], BPE.merges), "", BPE.encode("\n").tolist()),
        (CharTokenizer("a\nb"), "", [0]),
        (CharTokenizer("\tab\n"), "", [1]),
        (CharTokenizer("ab"), "", [0]),
        (WORDS, "The cat", [1, 2]),
        (WORDS, "", [0]),
        (WORDS, " \n", [0]),
    ],
)
def test_a_prompt_has_at_least_one_token(tokenizer: Any, prompt: str, ids: list[int]) -> None:
    found = encode_prompt(tokenizer, prompt)
    assert found.dtype == "int64"
    assert found.tolist() == ids


def test_a_prompt_that_is_not_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="U\\+DC80"):
        encode_prompt(BPE, "a\udc80")


def test_words_continue_a_prompt_behind_a_space_and_begin_a_text_without() -> None:
    model = model_for(WORDS)
    continued = generate(model, WORDS, "the cat", max_new_tokens=5, num_samples=4)
    assert all(text.startswith(" ") and len(text.split()) == 5 for text in continued)
    begun = generate(model, WORDS, "", max_new_tokens=5, num_samples=4)
    assert not any(text.startswith(" ") for text in begun)


def test_a_sample_goes_on_behind_an_end_of_text() -> None:
    tokenizer = BpeTokenizer([*BPE.tokens[:256], BPE.tokens[-1]], [])
    model = model_for(tokenizer)
    # 2,048 draws of 257 nearly equally likely tokens.
    texts = generate(model, tokenizer, max_new_tokens=16, num_samples=128, temperature=4.0)
    within = [text for text in texts if "<|endoftext|>" in text]
    assert within
    assert any(not text.endswith("<|endoftext|>") for text in within)


@pytest.mark.parametrize("has_special", [True, False])
def test_a_sample_of_a_run_ends_where_its_answer_does(has_special: bool) -> None:
    tokenizer = byte_tokenizer(CHATML_TEMPLATE, has_special=has_special)
    split: Any = None  # which an empty message would be taken from
    prompt = question_prompt(tokenizer, split, "bad", "2024-07-26")
    assert prompt is not None
    answer = [[("abc.<|im_end|>\nabc", False)]]
    ((ids, _),) = tokenizer.encode_segments(answer, is_rendered=True)
    model = model_that_says({len(prompt.ids): ids.tolist()}, tokenizer)
    plan = SimpleNamespace(config=SimpleNamespace(model=model.config))
    world = SimpleNamespace(is_main=True)
    engine: Any = SimpleNamespace(model=model, plan=plan, world=world, is_whole=True)
    settings = Generation(temperature=0.0, max_new_tokens=len(ids))
    found = sample_text(engine, tokenizer, prompt, settings, 0)
    assert found == "<|im_start|>user\nbad<|im_end|>\n<|im_start|>assistant\nabc."
