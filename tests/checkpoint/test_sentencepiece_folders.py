"""Folders whose only tokenizer is a tokenizer.model of SentencePiece: in, out and in again."""

from __future__ import annotations

import json

import pytest
import torch
from sentencepiece_models import FORMS, LANGUAGES, sentencepiece, trained
from their_models import BPE, both_logits, exact, open_there, their_model, transformers

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.checkpoint.hugging_face.hub import MODEL_FILES
from pentameter.errors import CorruptError
from pentameter.generation.loop import generate

LLAMA, NO_SPACE, T5, GEMMA, _ = FORMS


def folder_of(path, form, **settings):
    """A random Llama beside nothing but a tokenizer.model, and tokenizer_config.json if there are
    settings."""
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained(form))
    ids = {"bos_token_id": theirs.bos_id(), "eos_token_id": theirs.eos_id(), "pad_token_id": None}
    model = their_model(
        path, "llama", {"hidden_size": 24, "vocab_size": theirs.vocab_size(), **ids}
    )
    for file in path.glob("*"):
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    (path / "tokenizer.model").write_bytes(trained(form))
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return model, theirs


@pytest.mark.parametrize("form", [LLAMA, NO_SPACE, T5, GEMMA])
def test_a_folder_with_a_tokenizer_model_alone_goes_in_and_out(form, tmp_path):
    model, theirs = folder_of(tmp_path / "in", form)
    stored = read_hf(tmp_path / "in")
    ours = stored.tokenizer
    assert (ours.kind, stored.config.data.tokenizer) == ("sentencepiece", "sentencepiece")
    texts = list(LANGUAGES.values())
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == theirs.encode(texts)
    assert list(ours.prefix) == ([theirs.bos_id()] if theirs.bos_id() >= 0 else [])
    assert ours.end_of_text == theirs.eos_id()
    torch.testing.assert_close(
        *both_logits(exact(model), load_model(tmp_path / "in").model), rtol=0, atol=1e-10
    )
    exported = export_hf(stored, tmp_path / "out").path
    assert (exported / "tokenizer.model").read_bytes() == trained(form)
    assert not (exported / "tokenizer.json").exists()
    again = read_hf(exported).tokenizer
    assert again.hash == ours.hash
    exact(open_there(exported))


@pytest.mark.parametrize("form", [LLAMA, NO_SPACE])
def test_transformers_reads_an_export_with_the_same_ids(form, tmp_path):
    folder_of(tmp_path / "in", form)
    exported = export_hf(read_hf(tmp_path / "in"), tmp_path / "out").path
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = read_hf(exported).tokenizer
    for text in LANGUAGES.values():
        assert theirs.encode(text) == ours.encode_document(text).tolist()
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


def test_greedy_text_is_transformers_own(tmp_path):
    folder_of(tmp_path / "in", LLAMA)
    loaded = load_model(tmp_path / "in")
    text = generate(loaded.model, loaded.tokenizer, "The cat", temperature=0, max_new_tokens=8)
    model = open_there(tmp_path / "in")
    ids = torch.tensor([[1, *loaded.tokenizer.encode("The cat").tolist()]])
    found = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert text == [loaded.tokenizer.decode(found[1:].numpy()).removeprefix("The cat")]


def test_added_tokens_and_the_template_come_from_the_settings(tmp_path):
    n = sentencepiece.SentencePieceProcessor(model_proto=trained(LLAMA)).vocab_size()
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            str(n): {"content": "<|im_start|>", "special": True},
            str(n + 1): {"content": "<|im_end|>", "special": True, "rstrip": True},
            str(n + 2): {"content": "<more>", "special": False},
        },
    }
    folder_of(tmp_path, LLAMA, **settings)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": n}))
    warnings = []
    stored = read_hf(tmp_path, warnings=warnings)
    ours = stored.tokenizer
    assert ours.prefix == ()
    assert ours.end_of_text == n + 1
    assert set(ours.added) == {"<|im_start|>", "<|im_end|>", "<more>"}
    assert ours.chat is not None
    assert any("no text becomes the added tokens '<more>'" in line for line in warnings)
    assert any("is grown" in line for line in warnings)  # the model has rows for the pieces alone
    assert stored.config.model.vocab_size == n + 3
    exported = export_hf(stored, tmp_path / "out").path
    assert json.loads((exported / "tokenizer_config.json").read_text()) == settings
    again = read_hf(exported).tokenizer
    assert again.hash == ours.hash


def test_a_tokenizer_json_comes_first(tmp_path):
    their_model(tmp_path, "llama", {"hidden_size": 24})
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    assert read_hf(tmp_path).tokenizer.hash == BPE.hash


def test_a_tokenizer_model_of_tiktoken_is_refused(tmp_path):
    folder_of(tmp_path, LLAMA)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(CorruptError, match=r"tokenizer\.model: it is not .* tiktoken"):
        read_hf(tmp_path)


def test_the_hub_gives_it():
    assert "tokenizer.model" in MODEL_FILES
