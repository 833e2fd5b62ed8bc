"""GGUF files held against llama.cpp itself, where llama-cpp-python is installed: logits, greedy
text, and the ids of the tokenizers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import (
    BPE,
    LLAMA,
    MODELS,
    RULES,
    TEXTS,
    byte_level,
    random_model,
    sentencepiece_like,
)

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.gguf.file import export_gguf
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.model.gpt import build_model

llama_cpp = pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

IDS = [5, 300, 17, 42, 42, 260, 9, 77, 130, 12, 301, 64, 33, 8, 290, 255, 1, 402, 6, 99]
F32 = 0  # the number of that dtype in llama.cpp, here for keys and values


def there(stored: StoredModel, path: Any, dtype: str = "F32", **options: Any) -> Any:
    export_gguf(stored, path, dtype=dtype)
    options = {"n_ctx": 64, "type_k": F32, "type_v": F32, "verbose": False, **options}
    return llama_cpp.Llama(str(path), **options)


def here(stored: StoredModel) -> Any:
    model = build_model(stored.config.model, seed=0).eval()
    model.load_state_dict(dict(stored.weights))
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_the_models(tmp_path, name):
    stored = random_model(tmp_path, **MODELS[name])
    theirs, ours = there(stored, tmp_path / "a.gguf", logits_all=True), here(stored)
    theirs.eval(IDS)
    n = stored.tokenizer.vocab_size
    logits = ours(torch.tensor([IDS]))[0, :, :n].numpy()
    size = np.abs(logits).max()
    # llama.cpp computes GELU by a table in fp16, and the rest in fp32.
    bound = 2e-3 if stored.config.model.feed_forward.activation.startswith("ge") else 2e-5
    np.testing.assert_allclose(theirs.scores[: len(IDS)], logits, rtol=0, atol=bound * size)
    settings = Generation(temperature=0.0, max_new_tokens=30)
    expected = [each.item() for each in sampled_tokens(ours, np.array(IDS), n, settings)]
    theirs.reset()
    found = theirs.generate(IDS, temp=0.0, repeat_penalty=1.0)
    assert list(islice(found, 30)) == expected


@pytest.mark.parametrize(("dtype", "bound"), [("F16", 5e-3), ("BF16", 5e-2), ("Q8_0", 0.15)])
@torch.no_grad()
def test_rounded_weights_compute_nearly_the_same(tmp_path, dtype, bound):
    stored = random_model(tmp_path, **LLAMA)
    theirs = there(stored, tmp_path / "a.gguf", dtype, logits_all=True)
    theirs.eval(IDS)
    logits = here(stored)(torch.tensor([IDS]))[0].numpy()
    # With Q8_0 activations are rounded to 8 bits as well.
    error = np.abs(theirs.scores[: len(IDS)] - logits).max() / np.abs(logits).max()
    assert 0 < error < bound


TOKENIZERS = {
    "bpe": BPE,
    "char": CharTokenizer("".join(TEXTS) + "\t"),
    "sentencepiece": sentencepiece_like(),
    **{rule["name"]: byte_level(rule) for rule in RULES},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_same_ids(tmp_path, name):
    tokenizer = TOKENIZERS[name]
    theirs = there(random_model(tmp_path, tokenizer, **LLAMA), tmp_path / "a.gguf", vocab_only=True)
    for text in (*TEXTS, "\n".join(TEXTS), "a", "  two  spaces ", "\n\n\nx\t\t"):
        ids = theirs.tokenize(text.encode(), add_bos=False, special=False)
        assert ids == tokenizer.encode(text).tolist(), text
        if name != "sentencepiece":  # whose first space is the tokenizer's own
            assert b"".join(theirs.detokenize([each]) for each in ids).decode() == text
