"""GPT-2 folders that are damaged, incomplete, or of another kind: one line that says so."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.hugging_face.folder import _shards, export_hf, read_hf
from pentameter.checkpoint.hugging_face.tokenizer_files import (
    read_tokenizer,
    tokenizer_files,
)
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.schema import Config
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.model.gpt import build_model

BPE = train_bpe(["the cat sat on the mat"], 260)


def stored_model(tokenizer=BPE, **model):
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": tokenizer.vocab_size,
                "context_length": 8,
                "n_layers": 2,
                "n_heads": 2,
                "d_model": 8,
                **model,
            },
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2},
        }
    )
    weights = model_state(build_model(config.model, seed=5))
    return StoredModel(None, config, tokenizer, weights, (), None)


@pytest.fixture
def folder(tmp_path):
    return export_hf(stored_model(), tmp_path / "hf").path


def set_config(folder, **values):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **values}))


def set_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not supported; these are read: gpt2, llama"),
        ({"model_type": None}, "model_type=none"),
        ({"activation_function": "silu"}, "activation_function='silu' .* possible: gelu_new"),
        ({"activation_function": ["gelu"]}, r"activation_function=\['gelu'\]"),
        ({"layer_norm_epsilon": 0}, "model.norm_eps=0 must be"),
        ({"scale_attn_weights": False}, "scale_attn_weights=false .* always scaled"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=true"),
        ({"add_cross_attention": True}, "add_cross_attention=true .* no encoder"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* dequantised"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads=.* all of its heads"),
        ({"n_head": 3}, "model.attention.n_heads=3 must divide model.d_model=8"),
        ({"n_layer": 0}, "model.n_layers=0 must be"),
        ({"n_embd": "8"}, "model.d_model='8' must be"),
        ({"n_positions": 8.5}, "model.context_length=8.5 must be"),
        ({"resid_pdrop": 1.0}, "model.dropout=1.0 must be"),
        ({"vocab_size": 100}, "vocab_size=100 is smaller than the tokenizer's"),
        ({"vocab_size": None}, "vocab_size=none is smaller"),
    ],
    ids=str,
)
def test_settings_that_are_not_gpt2s_are_refused(folder, values, said):
    set_config(folder, **values)
    with pytest.raises(ConfigError, match=said) as caught:
        read_hf(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_mapped_is_named(folder, monkeypatch):
    def without_address_space(path, **_options):
        raise RuntimeError(f"unable to mmap 5 bytes from file <{path}>: Cannot allocate memory")

    monkeypatch.setattr("safetensors.safe_open", without_address_space)
    with pytest.raises(StorageError, match=r"cannot read .*model\.safetensors: unable to mmap"):
        read_hf(folder)


def missing(tensors):
    del tensors["transformer.h.1.mlp.c_fc.bias"]


def extra(tensors):
    tensors["score.weight"] = torch.zeros(2, 8)


def misshapen(tensors):
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].t().contiguous()


def of_integers(tensors):
    tensors["transformer.ln_f.bias"] = torch.zeros(8, dtype=torch.int64)


def twice(tensors):
    tensors["wte.weight"] = tensors["transformer.wte.weight"].clone()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (missing, r"lacks transformer\.h\.1\.mlp\.c_fc\.bias$"),
        (extra, r"does not have: transformer\.score\.weight"),
        (misshapen, r"c_attn\.weight is \(24, 8\) of torch\.float32, its .* \(8, 24\)"),
        (of_integers, r"ln_f\.bias is \(8,\) of torch\.int64"),
        (twice, r"holds 'wte\.weight' a second time|holds 'transformer\.wte\.weight' a second"),
    ],
)
def test_wrong_tensors_are_refused(folder, change, said):
    set_tensors(folder, change)
    with pytest.raises(CorruptError, match=said) as caught:
        load_model(folder)
    assert str(folder / "model.safetensors") in str(caught.value)


def test_what_old_versions_saved_beside_the_weights_is_passed_over(folder):
    expected = load_model(folder).model.state_dict()

    def as_of_old(tensors):
        for layer in range(2):
            attention = f"transformer.h.{layer}.attn"
            tensors[f"{attention}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
            tensors[f"{attention}.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    set_tensors(folder, as_of_old)
    found = load_model(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("n_bytes", [0, 4, 100, -8])
def test_a_truncated_file_is_corrupt(folder, n_bytes):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[1]", "not a JSON object"),
        ("config.json", b"\xff", "not UTF-8 at byte 0"),
        ("tokenizer.json", "{}", "no model.vocab"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}}}', "the tokenizers library cannot open"),
    ],
)
def test_damaged_small_files_are_refused(folder, name, content, said):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((CorruptError, ConfigError), match=said):
        read_hf(folder)


@pytest.mark.parametrize(
    ("vocabulary", "merges", "said"),
    [
        ('{"a": 0}', "", "lacks 255 of the 256 single bytes"),
        ('{"a": 1}', "", "the id 1"),
        ("{}", "", "lacks 256"),
        (None, "#version: 0.2\nq", "is not two tokens"),
        (None, "#version: 0.2\nzz zz", "is not in the vocabulary"),
    ],
)
def test_a_damaged_vocabulary_is_refused(folder, vocabulary, merges, said):
    (folder / "tokenizer.json").unlink()
    if vocabulary is not None:
        (folder / "vocab.json").write_text(vocabulary)
    (folder / "merges.txt").write_text(merges)
    with pytest.raises(CorruptError, match=said) as caught:
        read_hf(folder)
    assert str(folder) in str(caught.value)


WRONG = (None, True, 0, -1, 1.5, "x", "\ud800", [], [5], [["a"]], {}, {"a": []}, 10**400)
"""Values of every JSON type, for places where another one is expected."""


def places(content):
    """Each place in a JSON value as its keys; of a vocabulary and of merges, the first twelve."""
    yield ()
    entries = list(content) if isinstance(content, dict) else range(len(content))
    for key in entries[:12]:
        inner = content[key]
        below = places(inner) if isinstance(inner, dict | list) else [()]
        yield from ((key, *rest) for rest in below)


def replaced(content, keys, value):
    """`content` with another value at a place."""
    if not keys:
        return value
    first, *rest = keys
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[first] = replaced(content[first], rest, value)
    return copy


@pytest.mark.parametrize("tokenizer", [BPE, CharTokenizer("ab\n")], ids=["bpe", "char"])
def test_no_wrong_type_in_a_tokenizer_file_is_a_traceback(tmp_path, tokenizer):
    content = json.loads(tokenizer_files(tokenizer, 8)["tokenizer.json"])
    path = tmp_path / "tokenizer.json"
    n_refused = 0
    for keys in places(content):
        for value in WRONG:
            path.write_text(json.dumps(replaced(content, keys, value)))
            said = []
            try:
                read_tokenizer(tmp_path, said)
            except (ConfigError, CorruptError) as error:
                said.append(str(error))
                n_refused += 1
            assert all(str(path) in line for line in said)
            "".join(said).encode()  # no half of a surrogate pair reaches a log
    assert n_refused > 100


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
def test_no_wrong_type_in_the_old_tokenizer_files_is_a_traceback(tmp_path, value):
    files = tokenizer_files(BPE, 8)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes(files[name])
    wrong = {"added_tokens.json": [value, {"x": value}], "tokenizer_config.json": [value]}
    wrong["vocab.json"] = [value, {**json.loads(files["vocab.json"]), "a": value}]
    for name, contents in wrong.items():
        before = files.get(name, b"{}") if name != "tokenizer_config.json" else b"{}"
        for content in contents:
            (tmp_path / name).write_text(json.dumps(content))
            warnings = []
            with contextlib.suppress(ConfigError, CorruptError):
                read_tokenizer(tmp_path, warnings)
            "".join(warnings).encode()
        (tmp_path / name).write_bytes(before)
    assert read_tokenizer(tmp_path, []).hash == BPE.hash


@pytest.mark.parametrize("merge", [5, None, ["a"], ["a", 5], ["a", "b", "c"], {"a": "b"}])
def test_a_merge_that_is_none_is_named_with_its_place(folder, merge):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"].append(merge)
    path.write_text(json.dumps(content))
    with pytest.raises(
        CorruptError, match=rf"merge {len(BPE.merges)} is .*not two tokens"
    ) as error:
        read_hf(folder)
    assert str(path) in str(error.value)


def test_a_folder_without_a_tokenizer_says_how_to_give_it_one(folder):
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer .*import .* --tokenizer gpt2"):
        load_model(folder)
    assert read_hf(folder, tokenizer=BPE).tokenizer is BPE


def test_weights_that_are_not_there(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has a config\.json but no weights"):
        load_model(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "part-1.safetensors"}}))
    with pytest.raises(CorruptError, match=r"part-1\.safetensors is missing; .*index\.json names"):
        load_model(folder)
    for weight_map in ({"wte.weight": "../x"}, {"wte.weight": 3}, [], {}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CorruptError, match=r"index\.json is malformed"):
            load_model(folder)


def test_a_pickle_is_refused_with_a_command_that_converts_it(tmp_path):
    folder = export_hf(stored_model(), tmp_path / "a 'folder' of $HOME").path
    expected = load_model(folder).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2  # in two parts, as large models were saved
    for part, names in enumerate((list(tensors)[:half], list(tensors)[half:]), start=1):
        weights = {name: tensors[name] for name in names}
        torch.save(weights, folder / f"pytorch_model-0000{part}-of-00002.bin")
    with pytest.raises(ConfigError, match=r"as a pickle .* can run code") as caught:
        load_model(folder)
    command = str(caught.value).partition("convert it once: ")[2].replace("python", sys.executable)
    subprocess.run(command, shell=True, check=True, timeout=60)
    found = load_model(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"norm_position": "post"}, r"model\.norm_position='post' \(GPT-2 normalises before"),
        ({"norm": "rmsnorm"}, r"model\.norm='rmsnorm'"),
        ({"positions": "sinusoidal"}, r"model\.positions='sinusoidal'"),
        ({"embedding_scale": True}, r"model\.embedding_scale="),
        ({"head_bias": True, "norm": "rmsnorm"}, r"norm='rmsnorm'.*; model\.head_bias="),
    ],
    ids=str,
)
def test_what_gpt2_cannot_express_is_refused(model, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        export_hf(stored_model(**model), tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_whole_or_absent(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_hf(stored_model(), tmp_path / "taken")

    def fails(*_):
        raise StorageError("disk full")

    monkeypatch.setattr("pentameter.checkpoint.hugging_face.folder.write_hashed", fails)
    with pytest.raises(StorageError, match="disk full"):
        export_hf(stored_model(), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_word_tokenizer_is_left_out_and_named(tmp_path):
    tokenizer = WordTokenizer.from_documents(["the cat sat"])
    exported = export_hf(stored_model(tokenizer), tmp_path / "hf")
    assert len(exported.notes) == 1
    assert "(word) is left out" in exported.notes[0]
    assert not list((tmp_path / "hf").glob("*token*"))
    again = read_hf(tmp_path / "hf", tokenizer=tokenizer)
    assert again.config.model.vocab_size == tokenizer.vocab_size


def test_biases_that_are_not_there_are_zero(folder):
    tensors = load_file(folder / "model.safetensors")
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    assert len(biases) == 2 * 6 + 1
    assert all(not tensor.any() for tensor in biases)


def test_links_are_followed_as_in_hugging_faces_cache(folder, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert open_model(tmp_path / "snapshot").tokenizer.hash == BPE.hash


def test_tensors_are_assigned_to_files_in_one_pass(monkeypatch):
    """Thousands of experts' matrices have a name each."""
    n_asked = 0

    def n_bytes(size):
        nonlocal n_asked
        n_asked += 1
        return size

    monkeypatch.setattr("pentameter.checkpoint.hugging_face.folder.SHARD_BYTES", 1000)
    monkeypatch.setattr("pentameter.checkpoint.hugging_face.folder._n_bytes", n_bytes)
    sizes = {f"{number}": 300 for number in range(299)} | {"large": 2000, "last": 1}
    files = _shards(sizes)
    assert [sum(each.values()) for each in files.values()] == [900] * 99 + [600, 2000, 1]
    assert next(iter(files)) == "model-00001-of-00102.safetensors"
    assert [name for each in files.values() for name in each] == [*sizes]
    assert n_asked <= 2 * len(sizes)
