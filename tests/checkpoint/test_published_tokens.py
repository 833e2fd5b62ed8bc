"""What a Hugging Face folder says of its special tokens: kept by import and export, and obeyed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))

from tokenizer_forms import byte_level, sentencepiece

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.checkpoint.folders.model_folder import save_model
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.checkpoint.hugging_face.tokenizer_files import read_tokenizer, tokenizer_files
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import CorruptError
from pentameter.generation.loop import generate
from pentameter.generation.prompts import encode_prompt

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
transformers = pytest.importorskip("transformers")

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
BEGINS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
PROCESSORS = {
    "none": None,
    "template": BEGINS,
    "sequence": {"type": "Sequence", "processors": [BYTES, BEGINS]},
    "bytes": BYTES,
}
TEXT = "a b\n👋 ab"


def write_tokenizer(folder: Path, content: dict[str, Any], settings: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    known = {token["content"]: token["id"] for token in content["added_tokens"]}
    if content["post_processor"] is not None:
        text = json.dumps(content["post_processor"])
        content = content | {"post_processor": json.loads(text.replace("[1]", f"[{known['<s>']}]"))}
    whole = json.dumps(content, ensure_ascii=False, indent=2)
    (folder / "tokenizer.json").write_text(whole, encoding="utf-8")
    # Spaces and order as no program of ours would write them.
    said = {"model_max_length": 1e30, **NAMES, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=7) + "\n\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with the tokenizer of its second generation."""
    folder = tmp_path / "theirs"
    content = sentencepiece("prepend") | {"post_processor": BEGINS}
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=270,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=48,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=[2, 7],
        pad_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=[2, 7], pad_token_id=2, temperature=0.6, do_sample=True
    )
    model.save_pretrained(folder)
    write_tokenizer(folder, content, settings)
    (folder / "special_tokens_map.json").write_text(json.dumps(NAMES, indent=3))
    return folder


def imported(folder: Path, out: Path) -> Path:
    return save_model(read_hf(folder), out)


KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.mark.parametrize("is_imported", [True, False], ids=["imported", "at once"])
def test_what_a_folder_says_of_its_tokens_is_exported_as_it_was(
    folder: Path, tmp_path: Path, is_imported: bool
) -> None:
    stored = open_model(imported(folder, tmp_path / "ours")) if is_imported else read_hf(folder)
    out = export_hf(stored, tmp_path / "out").path
    for name in (*KEPT, "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert not (out / "chat_template.jinja").exists()
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, out))
    ids = {key: value for key, value in before.items() if key.endswith("_token_id")}
    assert ids == {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 2}
    assert ids == {key: value for key, value in after.items() if key.endswith("_token_id")}


def test_another_chat_template_takes_the_place_of_the_published_one(
    folder: Path, tmp_path: Path
) -> None:
    stored = read_hf(folder)
    stored.tokenizer.chat = ChatTemplate("{{ messages[0].content }}<unk>")
    out = export_hf(stored, tmp_path / "out").path
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
    assert settings.items() >= NAMES.items()
    assert (out / "chat_template.jinja").read_text() == stored.tokenizer.chat.source
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 1, 2]  # it ends no answer: any special token may
    assert (generation["pad_token_id"], generation["temperature"]) == (2, 0.6)


def test_greedy_text_of_a_folder_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for path in (folder, imported(folder, tmp_path / "ours")):
        loaded = load_model(path)
        for prompt in (TEXT, "", "é"):
            asked = tokenizer(prompt, return_tensors="pt")
            assert encode_prompt(loaded.tokenizer, prompt).tolist() == asked.input_ids[0].tolist()
            found = model.generate(**asked, max_new_tokens=24, do_sample=False, eos_token_id=None)[
                0
            ].tolist()
            (ours,) = generate(
                loaded.model, loaded.tokenizer, prompt, max_new_tokens=24, temperature=0.0
            )
            n_prompt = asked.input_ids.shape[1]
            shown = tokenizer.decode(found[:n_prompt]) if prompt else ""
            whole = tokenizer.decode(found if prompt else found[n_prompt:])
            assert shown + ours == whole


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("sentencepiece", "PreTrainedTokenizerFast"),
        ("sentencepiece", "LlamaTokenizerFast"),
        ("byte-level", "PreTrainedTokenizerFast"),
        ("gpt2", "PreTrainedTokenizerFast"),
        ("gpt2", "GPT2Tokenizer"),
    ],
)
@pytest.mark.parametrize("says", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_documents_begin_as_in_transformers(
    tmp_path: Path, kind: str, name: str, says: dict[str, Any], processor: str
) -> None:
    content = sentencepiece("prepend") if kind == "sentencepiece" else byte_level()
    content |= {"post_processor": PROCESSORS[processor]}
    if kind == "gpt2":
        content["pre_tokenizer"] |= {"use_regex": True}
    write_tokenizer(tmp_path, content, {"tokenizer_class": name, **says})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_tokenizer(tmp_path, [])
    assert ours is not None
    assert ours.kind == ("bpe" if kind == "gpt2" else "library")
    assert ours.encode_document(TEXT).tolist() == theirs(TEXT).input_ids
    if ours.kind == "bpe":  # whose tokenizer.json is made anew
        (tmp_path / "tokenizer.json").write_bytes(ours.to_tokenizer_json() or b"")
        again = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert again(TEXT).input_ids == theirs(TEXT).input_ids


@pytest.mark.parametrize("says", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_documents_begin_as_in_transformers_by_old_files(
    tmp_path: Path, says: dict[str, Any]
) -> None:
    tokenizer = train_bpe(["the cat sat on the mat"], 260)
    for name, data in tokenizer_files(tokenizer, 8).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "tokenizer.json").unlink()
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | says))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_tokenizer(tmp_path, [])
    assert ours is not None
    assert ours.encode_document("the cat").tolist() == theirs("the cat").input_ids


def test_a_prefix_is_part_of_what_decides_documents_and_of_nothing_else(tmp_path: Path) -> None:
    tokenizer = train_bpe(["the cat sat on the mat"], 260)
    plain = tokenizer.hash
    tokenizer = train_bpe(["the cat sat on the mat"], 260)
    tokenizer.prefix, tokenizer.published = (256,), {"config.json": "{}"}
    tokenizer.save(tmp_path / "t.json")
    again = load_tokenizer(tmp_path / "t.json")
    assert (again.prefix, again.published) == ((256,), {"config.json": "{}"})
    assert again.hash == tokenizer.hash != plain
    assert again.hash_of_ids == train_bpe(["the cat sat on the mat"], 260).hash_of_ids
    assert again.encode("cat").tolist() == again.encode_document("cat")[1:].tolist()
    assert np.array_equal(encode_prompt(again, ""), [256])
    content = json.loads((tmp_path / "t.json").read_text())
    for wrong in ({"prefix": [999]}, {"prefix": "x"}, {"published": {"a": 1}}):
        (tmp_path / "t.json").write_text(json.dumps(content | wrong))
        with pytest.raises(CorruptError, match=next(iter(wrong))):
            load_tokenizer(tmp_path / "t.json")
