"""GGUF files, read by the package `gguf`: tensors, entries, and what is refused."""

from __future__ import annotations

import re
import sys
from typing import get_args, get_type_hints

import numpy as np
import pytest
from gguf_models import BPE, GEMMA3, LATENT, LLAMA, MODELS, NEOX, random_model
from safetensors.torch import load_file

from pentameter.checkpoint.exports import EXPORTS
from pentameter.checkpoint.folders.model_folder import save_model
from pentameter.checkpoint.gguf.architectures import architectures, choose_architecture
from pentameter.checkpoint.gguf.file import export_gguf
from pentameter.checkpoint.gguf.tensors import DTYPES
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.cli.export import ExportArguments
from pentameter.cli.main import main
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.errors import ConfigError

gguf = pytest.importorskip("gguf")

HALF_APART = {"llama": 16, "mistral": 16, "mixtral": 16, "smollm3": 16}
"""Family whose rotated channels llama.cpp wants beside each other → channels of a head."""


def read(path):
    reader = gguf.GGUFReader(path)
    entries = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = values.reshape(*reversed(tensor.shape.tolist()))
    return entries, tensors


def beside_each_other(rows, head_size):
    """Rows (H · K, …) with channel i beside i + K / 2."""
    halves = rows.reshape(-1, 2, head_size // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def apart(tensors):
    """gpt-oss's tensors, with gate and up each by itself, outputs before inputs."""
    found = {}
    for key, value in tensors.items():
        stem, _, matrix = key.rpartition(".experts.")
        kind = "bias" if matrix.endswith("_bias") else "weight"
        rows = value if kind == "bias" or not stem else value.swapaxes(1, 2)
        if matrix.startswith("gate_up"):
            found[f"{stem}.experts.gate_proj.{kind}"] = rows[:, ::2]
            found[f"{stem}.experts.up_proj.{kind}"] = rows[:, 1::2]
        elif stem:
            found[f"{stem}.experts.down_proj.{kind}"] = rows
        else:
            found[f"{key}.weight" if key.endswith("sinks") else key] = value
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_familys_tensors_are_those_of_its_hugging_face_folder(tmp_path, name):
    stored = random_model(tmp_path, **MODELS[name])
    export_gguf(stored, tmp_path / "model.gguf")
    export_hf(stored, tmp_path / "hf")
    theirs = {
        key: value.numpy() for key, value in load_file(tmp_path / "hf/model.safetensors").items()
    }
    entries, tensors = read(tmp_path / "model.gguf")
    family = choose_architecture(stored.config.model).family
    assert family == name.partition(",")[0]
    arch = entries["general.architecture"]
    names = gguf.get_tensor_name_map(
        next(each for each, known in gguf.MODEL_ARCH_NAMES.items() if known == arch),
        stored.config.model.n_layers,
    )
    left = dict(tensors)
    if family == "gpt_oss":
        theirs = apart(theirs)
    if family == "gemma3_text":  # norms begin at 0 there, at 1 in llama.cpp
        theirs = {key: value + ("norm" in key) for key, value in theirs.items()}
    experts: dict[str, list[np.ndarray]] = {}
    for key, value in theirs.items():
        stem, _, kind = key.rpartition(".")
        if re.search(r"\.experts\.\d", stem):
            before, _, after = stem.partition(".experts.")
            matrix = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
            which = after.partition(".")[2]
            layer = before.removesuffix("block_sparse_moe").removesuffix("mlp")
            experts.setdefault(f"{layer}mlp.experts.{matrix.get(which, which)}", []).append(value)
            continue
        expected = value
        if family == "gpt2" and kind == "weight" and stem.endswith(("c_attn", "c_proj", "c_fc")):
            expected = value.T
        if family == "gpt_neox" and stem.endswith("query_key_value"):
            each = value.reshape(4, 3, 16, *value.shape[1:])  # heads, then queries, keys, values
            expected = each.swapaxes(0, 1).reshape(value.shape)
        if family in HALF_APART and stem.endswith(("q_proj", "k_proj")):
            expected = beside_each_other(value, HALF_APART[family])
        if key.endswith("e_score_correction_bias"):
            stem, kind = key.removesuffix("_bias"), "bias"
        found = left.pop(f"{names.get_name(stem)}.{kind}")
        np.testing.assert_array_equal(found, expected, err_msg=key)
    for stem, matrices in experts.items():
        np.testing.assert_array_equal(
            left.pop(f"{names.get_name(stem)}.weight"), np.stack(matrices)
        )
    if "output.weight" in left:  # a tied head, where llama.cpp wants one
        np.testing.assert_array_equal(left.pop("output.weight"), tensors["token_embd.weight"])
    scaling = stored.config.model.rope_scaling.type
    assert {*left} == {
        "llama3": {"rope_freqs.weight"},
        "longrope": {"rope_factors_long.weight", "rope_factors_short.weight"},
    }.get(str(scaling), set())


def test_entries_are_the_models(tmp_path):
    scaled = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attention_factor": 1.3}
    export_gguf(
        random_model(tmp_path, **{**MODELS["qwen3"], "rope_scaling": scaled, "norm_eps": 2e-6}),
        tmp_path / "a.gguf",
    )
    entries, _ = read(tmp_path / "a.gguf")
    expected = {
        "vocab_size": BPE.vocab_size,
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": np.float32(2e-6),
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    for key, value in expected.items():
        assert entries[f"qwen3.{key}"] == value, key
    # llama.cpp multiplies by 1 + 0.1 · ln(4) itself.
    assert entries["qwen3.rope.scaling.attn_factor"] == pytest.approx(1.3 / (1 + 0.1 * np.log(4)))
    export_gguf(random_model(tmp_path, **NEOX), tmp_path / "b.gguf")
    entries, _ = read(tmp_path / "b.gguf")
    assert entries["gptneox.rope.dimension_count"] == 8
    assert entries["gptneox.use_parallel_residual"] is False
    assert entries["gptneox.attention.layer_norm_epsilon"] == np.float32(1e-5)
    export_gguf(random_model(tmp_path, **MODELS["qwen3_moe"]), tmp_path / "c.gguf")
    entries, _ = read(tmp_path / "c.gguf")
    found = [
        entries[f"qwen3moe.expert_{key}"] for key in ("count", "used_count", "feed_forward_length")
    ]
    assert found == [4, 2, 32]


def test_factors_of_llama_3s_frequencies(tmp_path):
    scaling = {"type": "llama3", "factor": 8.0, "original_context_length": 64}
    model = {**LLAMA, "rope_scaling": scaling, "rope_theta": 1000.0}
    export_gguf(random_model(tmp_path, **model), tmp_path / "a.gguf")
    factors = read(tmp_path / "a.gguf")[1]["rope_freqs.weight"]
    assert factors.shape == (8,)
    for pair, found in enumerate(factors):
        wave = (
            2 * np.pi * 1000.0 ** (2 * pair / 16)
        )  # tokens of a turn; 64 / 4 and 64 / 1 the limits
        kept = np.clip((64 / wave - 1) / 3, 0, 1)
        assert found == pytest.approx(1 / ((1 - kept) / 8 + kept), rel=1e-6)


def test_a_note_says_when_longrope_differs(tmp_path):
    def notes(name, original):
        scaling = {"type": "longrope", "factor": 4.0, "original_context_length": original}
        stored = random_model(tmp_path, **{**LLAMA, "rope_scaling": scaling})
        return export_gguf(stored, tmp_path / name).notes

    assert notes("a.gguf", 64) == ()
    (note,) = notes("b.gguf", 32)
    assert "over 32 tokens" in note
    factors = read(tmp_path / "b.gguf")[1]
    np.testing.assert_array_equal(factors["rope_factors_long.weight"], np.full(8, 4.0))
    np.testing.assert_array_equal(factors["rope_factors_short.weight"], np.ones(8))


def test_a_scores_size_of_the_heads_channels_changes_nothing(tmp_path):
    attention = {**GEMMA3["attention"], "score_size": 16}
    export_gguf(random_model(tmp_path, **{**GEMMA3, "attention": attention}), tmp_path / "a.gguf")


def test_a_head_size_of_the_whole_width_is_as_none(tmp_path):
    attention = {**MODELS["qwen2"]["attention"], "head_size": 16}
    export_gguf(random_model(tmp_path, **{**LLAMA, "attention": attention}), tmp_path / "a.gguf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_each_dtype(tmp_path, dtype):
    stored = random_model(
        tmp_path, **{**LLAMA, "feed_forward": {"activation": "swiglu", "width": 80}}
    )
    notes = export_gguf(stored, tmp_path / "whole.gguf").notes
    assert notes == ()
    notes = export_gguf(stored, tmp_path / "a.gguf", dtype=dtype).notes
    whole, (entries, rounded) = read(tmp_path / "whole.gguf")[1], read(tmp_path / "a.gguf")
    kinds = {
        each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "a.gguf").tensors
    }
    for name, kind in kinds.items():
        wanted = "F32" if "norm" in name else dtype
        if dtype == "Q8_0" and "ffn_down" in name:  # rows of 80 numbers
            wanted = "F16"
        assert kind == wanted, name
        # Half a unit of the last place; half of a block's 127 steps up to its largest number, whose
        # size is F16. Half of F16's smallest number is 2^-25.
        error = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.0}[wanted] * np.abs(
            whole[name]
        )
        if wanted == "Q8_0":
            blocks = np.abs(whole[name]).reshape(-1, 32).max(axis=1, keepdims=True)
            error = np.broadcast_to(blocks * (0.5 / 127 + 2**-11), (blocks.size, 32)).reshape(
                whole[name].shape
            )
        assert (np.abs(rounded[name] - whole[name]) <= error + 2**-25).all(), name
    assert entries["general.file_type"] == {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}[dtype]
    assert ("2 tensors are F16" in " ".join(notes)) == (dtype == "Q8_0")


def test_what_f16_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    stored = random_model(tmp_path, **LLAMA)
    stored.weights["blocks.1.mlp.up.weight"][3, 5] = 1e5
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_up\.weight has numbers up to 1e\+05.*BF16"):
        export_gguf(stored, tmp_path / "a.gguf", dtype="F16")
    assert not any(tmp_path.iterdir())
    export_gguf(stored, tmp_path / "a.gguf", dtype="BF16")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {**LLAMA, "feed_forward": {"activation": "geglu", "width": 96}},
            "activation='geglu'.*swiglu",
        ),
        ({**MODELS["gpt2"], "feed_forward": {"activation": "relu"}}, "'gpt2' computes no .*'relu'"),
        ({**LLAMA, "attention": {"n_heads": 4, "sliding_window": 16}}, "sliding_window=16"),
        (
            {**MODELS["qwen3_moe"], "router": {"renormalize": False}},
            r"'qwen3moe' computes no model\.router\.renormalize=false \(only true\)",
        ),
        (
            {**MODELS["qwen2"], "rope_scaling": {"type": "llama3"}},
            "'llama3' for this kind of model",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "dynamic"}},
            r"no rotary frequencies from a text's length.*'dynamic'",
        ),
        (
            {**MODELS["gpt_oss"], "rope_scaling": {"type": "longrope"}},
            "'longrope' for this kind of model",
        ),
        ({**MODELS["smollm3"], "nope_layers": 3}, r"nope_layers=3 \(only 4\)"),
        (
            {**MODELS["gemma3_text"], "n_layers": 62},
            "'gemma3' computes no model.n_layers=62; --to hf",
        ),
        (
            {**MODELS["gemma3_text"], "attention": {**GEMMA3["attention"], "score_size": 8}},
            "score_size=8",
        ),
        (
            {**MODELS["deepseek_v2"], "n_layers": 27},
            r"q_rank=24 with 27 layers \(only 'none'\)",
        ),
        (
            {**MODELS["deepseek_v2"], "attention": {**LATENT, "q_rank": None}},
            r"q_rank=none with 3 layers \(only a number\)",
        ),
        (
            {**MODELS["deepseek_v2"], "rope_scaling": {"type": "yarn"}},
            "mscale equal to mscale_all_dim.*and here it is 1.2079",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "truncate": False}},
            "truncate=false; --to hf",
        ),
        ({**LLAMA, "embedding_scale": True}, "embedding_scale"),
        *(
            (
                {**MODELS[name], "attention": {**MODELS[name]["attention"], "head_size": 32}},
                r"head_size=32 \(only 'none'\)",
            )
            for name in ("qwen2", "olmo2", "qwen2_moe")  # files that llama.cpp does not open
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, model, message):
    with pytest.raises(ConfigError, match=message):
        export_gguf(random_model(tmp_path, **model), tmp_path / "a.gguf")
    assert not any(tmp_path.iterdir())


def test_the_table_names_keys_that_there_are():
    keys = {*architecture(ModelConfig())}
    for each in architectures().values():
        assert {*each.values} <= keys
        assert each.architecture in gguf.MODEL_ARCH_NAMES.values()
        assert each.as_family().label


def test_a_window_as_long_as_the_context_leaves_out_nothing(tmp_path):
    whole = {**LLAMA, "attention": {"n_heads": 4, "sliding_window": 64}}
    export_gguf(random_model(tmp_path, **whole), tmp_path / "a.gguf")


def test_tokenizer_and_template(tmp_path):
    tokenizer = BpeTokenizer(BPE.tokens, BPE.merges)
    template = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
    tokenizer.chat = ChatTemplate.from_json({"template": template, "tokens": {}}, "it")
    stored = random_model(tmp_path, tokenizer, **{**LLAMA, "vocab_size": BPE.vocab_size + 3})
    export_gguf(stored, tmp_path / "a.gguf")
    entries, tensors = read(tmp_path / "a.gguf")
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in entries.items()}
    assert (ggml["model"], ggml["pre"]) == ("gpt2", "gpt-2")
    assert len(ggml["tokens"]) == len(tensors["token_embd.weight"]) == BPE.vocab_size + 3
    assert tuple(ggml["tokens"][: BPE.vocab_size]) == BPE.tokens
    assert ggml["tokens"][-1] == f"[PAD{BPE.vocab_size + 2}]"
    assert ggml["token_type"] == [1] * (BPE.vocab_size - 1) + [3] + [5] * 3
    assert ggml["merges"] == [" ".join(each) for each in BPE.merges]
    assert ggml["eos_token_id"] == ggml["bos_token_id"] == BPE.end_of_text
    assert ggml["add_bos_token"] is False
    assert entries["tokenizer.chat_template"] == template


def test_the_command_writes_a_file_or_a_folder_with_a_card(tmp_path, capsys):
    model = save_model(random_model(tmp_path, **LLAMA), tmp_path / "model")
    command = ["export", str(model), "--to", "gguf", "--out"]
    assert main([*command, str(tmp_path / "a.gguf")]) == 0
    size = (tmp_path / "a.gguf").stat().st_size
    assert capsys.readouterr() == (f"{tmp_path / 'a.gguf'}: step 0, {size:,} bytes\n", "")
    assert main([*command, str(tmp_path / "a.gguf")]) == 2
    assert "exists" in capsys.readouterr().err
    folder = tmp_path / "folder"
    assert main([*command, str(folder), "--dtype", "Q8_0", "--license", "mit"]) == 0
    assert {each.name for each in folder.iterdir()} == {"a-model-Q8_0.gguf", "README.md"}
    card = (folder / "README.md").read_text()
    assert "library_name: gguf" in card
    assert "a-model-Q8_0.gguf" in card
    capsys.readouterr()
    assert main([*command, str(tmp_path / "b.gguf"), "--license", "mit"]) == 2
    assert "--license goes with a folder" in capsys.readouterr().err
    other = ["export", str(model), "--to", "hf", "--out", str(tmp_path / "c"), "--dtype", "F16"]
    assert main(other) == 2
    assert "--dtype F16 goes with --to gguf" in capsys.readouterr().err
    assert not (tmp_path / "b.gguf").exists()


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[gguf\]'"):
        export_gguf(random_model(tmp_path, **LLAMA), tmp_path / "a.gguf")


def test_the_command_knows_every_format():
    options = get_type_hints(ExportArguments)
    assert get_args(options["to"]) == tuple(EXPORTS)
    dtypes, _ = get_args(options["dtype"])
    assert get_args(dtypes) == DTYPES == EXPORTS["gguf"].dtypes
