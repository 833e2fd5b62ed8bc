"""Folders whose config.json, weights and tokenizer disagree about the embedding and the head."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from their_models import BPE, both_logits, exact, open_there, their_model, transformers

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.errors import ConfigError, CorruptError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WIDTH = {"hidden_size": 24}


def edit(folder, change=lambda tensors: None, **settings):
    """Change a folder's tensors in place, and its config.json (None: the key is left out)."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | settings
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def agrees_with_theirs(folder):
    ours, theirs = both_logits(exact(open_there(folder)), load_model(folder).model)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_head_that_differs_from_a_tied_embedding_is_taken_and_said(tmp_path):
    folder, warnings = tmp_path / "theirs", []
    their_model(folder, "llama", WIDTH)
    edit(folder, tie_word_embeddings=True)
    stored = read_hf(folder, warnings=warnings)
    assert not stored.config.model.tied_head
    (said,) = warnings
    assert f"{HEAD} differs from {EMBEDDING}" in said
    assert "tie_word_embeddings" in said
    agrees_with_theirs(folder)  # who say the same
    exported = export_hf(stored, tmp_path / "out").path
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_equals_a_tied_embedding_is_no_difference(tmp_path):
    warnings = []
    their_model(tmp_path, "llama", {**WIDTH, "tie_word_embeddings": True})
    edit(tmp_path, lambda held: held.update({HEAD: held[EMBEDDING].clone()}))
    assert read_hf(tmp_path, warnings=warnings).config.model.tied_head
    assert not warnings


def test_a_head_that_is_missing_is_the_embedding_where_nothing_says_otherwise(tmp_path):
    warnings = []
    theirs = their_model(tmp_path, "llama", {**WIDTH, "tie_word_embeddings": True})
    edit(tmp_path, tie_word_embeddings=None)
    assert read_hf(tmp_path, warnings=warnings).config.model.tied_head
    assert f"lacks {HEAD}" in warnings[0]
    theirs, ours = both_logits(exact(theirs), load_model(tmp_path).model)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-10)


def test_a_head_that_is_missing_where_it_is_said_to_be_untied_is_refused(tmp_path):
    their_model(tmp_path, "llama", WIDTH)
    edit(tmp_path, lambda held: held.pop(HEAD), tie_word_embeddings=False)
    with pytest.raises(CorruptError, match=rf"lacks {HEAD}.*tie_word_embeddings=false.*to true"):
        read_hf(tmp_path)


def with_added(folder, *texts):
    """Give a folder's tokenizer more special tokens than its model has rows for."""
    tokenizer = tokenizers.Tokenizer.from_str(BPE.to_tokenizer_json().decode())
    tokenizer.add_special_tokens(list(texts))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_an_embedding_that_is_too_small_by_added_tokens_is_grown(tmp_path, is_tied):
    folder, warnings = tmp_path / "theirs", []
    sizes = {**WIDTH, "vocab_size": BPE.vocab_size, "tie_word_embeddings": is_tied}
    theirs = their_model(folder, "llama", sizes)
    with_added(folder, "<pad>", "<|im_end|>")
    stored = read_hf(folder, warnings=warnings)
    n = BPE.vocab_size
    assert stored.config.model.vocab_size == stored.tokenizer.vocab_size == n + 2
    (said,) = [line for line in warnings if "grown" in line]
    assert f"the tokenizer has {n + 2} tokens, the embedding {n} rows" in said
    assert ("head" in said) is not is_tied

    model = load_model(folder).model
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits, known = model(tokens), exact(theirs)(tokens).logits
    torch.testing.assert_close(logits[..., :n], known, rtol=0, atol=1e-10)
    # A new token's logit is the mean of all others', and so never the highest.
    for added in (n, n + 1):
        torch.testing.assert_close(logits[..., added], known.mean(-1), rtol=0, atol=1e-10)
    embedding = theirs.get_input_embeddings().weight
    torch.testing.assert_close(
        stored.weights["token_embedding.weight"][n - 1 : n + 1, 3:9],
        torch.stack([embedding[-1], embedding.mean(0)])[:, 3:9].detach(),
        rtol=0,
        atol=1e-15,
    )

    again = export_hf(stored, tmp_path / "out").path
    assert transformers.AutoConfig.from_pretrained(again).vocab_size == n + 2
    with torch.no_grad():
        torch.testing.assert_close(
            exact(open_there(again))(tokens).logits, logits, rtol=0, atol=1e-10
        )
    assert not [line for line in said_of(again) if "grown" in line]


def said_of(folder):
    warnings = []
    read_hf(folder, warnings=warnings)
    return warnings


def test_another_models_tokenizer_is_refused(tmp_path):
    their_model(tmp_path, "llama", {**WIDTH, "vocab_size": BPE.vocab_size - 30})
    with_added(tmp_path, "<pad>")
    with pytest.raises(ConfigError, match=r"vocab_size=\d+ is smaller .* do not belong together"):
        read_hf(tmp_path)
