"""DeepSeek's folders as they are published: FP8 weights, layers that predict further tokens, tens
of thousands of tensors. What they compute is held in `test_hugging_face_families.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from counted_reads import counted_reads
from safetensors.torch import load_file, save_file
from their_models import BPE, both_logits, open_there, their_model

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.format.safetensors_format import plan_file
from pentameter.checkpoint.hugging_face.config_json import from_their_config
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.folder import INDEX, read_hf
from pentameter.checkpoint.hugging_face.tensor_map import TensorMap
from pentameter.config.files.load import load_config
from pentameter.config.schema import ModelConfig
from pentameter.disk.atomic import read_json
from pentameter.errors import CorruptError

V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3 = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
"""config.json of both as they are published."""


@pytest.mark.parametrize(
    ("published", "preset"), [(V2_LITE, "deepseek-v2-lite"), (V3, "deepseek-v3")]
)
def test_the_published_settings_are_the_preset_s(published, preset):
    read = ModelConfig.model_validate(from_their_config(published, "config.json"))
    expected = load_config(preset).model
    of_training = ("context_length", "rope_scaling", "router", "init_std")
    same = {key: getattr(expected, key) for key in of_training}
    same["router"] = read.router.updated(
        {key: getattr(expected.router, key) for key in ("balance", "balance_weight")}
    )
    assert read.resolved.updated(same) == expected.resolved
    scaling = read.rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_context_length) == ("yarn", 40, 4096)
    # Equal mscales cancel where channels rotate, and act on scores.
    assert scaling.rotation_factor == 1.0
    assert scaling.score_factor == pytest.approx(
        (0.1 * published["rope_scaling"]["mscale"] * math.log(40) + 1) ** 2
    )


BLOCK = (4, 8)


def in_fp8(folder, *, block=BLOCK, stacked=False):
    """Turns a folder's matrices, but for routers, embedding and head, into FP8 with scales, and
    returns all its tensors dequantized, in fp32."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(4)
    plain = {}
    for name, tensor in list(tensors.items()):
        if "proj" not in name:
            plain[name] = tensor.float()
            continue
        sizes = (*(1 for _ in tensor.shape[2:]), *block)
        grid = [math.ceil(n / size) for n, size in zip(tensor.shape, sizes, strict=True)]
        scales = torch.rand(grid, generator=generator) + 0.5
        tensors[name] = tensor.float().to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        plain[name] = tensors[name].float()
        for index in torch.cartesian_prod(*map(torch.arange, grid)).tolist():
            part = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, sizes, strict=True))
            plain[name][part] *= scales[tuple(index)]
    save_file(tensors, path)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {**V3["quantization_config"], "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps(content))
    return plain


@pytest.mark.parametrize(
    ("family", "form"), [("deepseek_v3", "apart"), ("deepseek_v3", "stacked"), ("qwen3", "apart")]
)
def test_fp8_weights_are_their_values_times_their_scales(family, form, tmp_path):
    """Sizes that are no multiples of a block, rows of rotated channels, single experts."""
    options, apart = {"num_key_value_heads": 4}, form == "apart"
    for name in ("fp8", "twin"):
        their_model(tmp_path / name, family, options, torch.float32, save_original_format=apart)
    plain = in_fp8(tmp_path / "fp8")
    save_file(plain, tmp_path / "twin" / "model.safetensors")
    found, expected = (read_hf(tmp_path / name, tokenizer=BPE) for name in ("fp8", "twin"))
    assert found.config == expected.config
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in found.weights.items():
        whole = expected.weights[name][...]
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor[...], whole), name
        region = tuple(slice(n // 3, n // 3 + max(1, n // 2)) for n in tensor.shape)
        assert torch.equal(tensor[region], whole[region]), name
    models = [load_model(tmp_path / name).model for name in ("fp8", "twin")]
    tokens = torch.arange(12)[None]
    assert torch.equal(*(model(tokens) for model in models))


def without(part):
    """A change of a folder's tensors: the first whose name ends with `part` is removed."""

    def change(tensors):
        del tensors[min(name for name in tensors if name.endswith(part))]

    return change


def cut(tensors):
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][1:].clone()


def of_no_weight(tensors):
    tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)


def of_another_kind(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("_scale_inv"), r"layers\.0\.mlp\.down_proj\.weight is of .* beside it"),
        (without("down_proj.weight"), r"lacks model\.layers\.0\.mlp\.down_proj\.weight$"),
        (cut, r"0\.mlp\.up_proj\.weight_scale_inv is \(6, 3\) of .* asks for \(7, 3\)"),
        (of_no_weight, r"not have: model\.norm\.weight_scale_inv$"),
        (of_another_kind, r"0\.mlp\.up_proj\.weight is of torch\.float8_e5m2"),
    ],
)
def test_scales_that_are_not_their_weights_are_refused(change, said, tmp_path):
    their_model(tmp_path, "deepseek_v3", {}, torch.float32)
    in_fp8(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CorruptError, match=said):
        read_hf(tmp_path, tokenizer=BPE)


def test_fp8_weights_need_the_setting(tmp_path):
    their_model(tmp_path, "deepseek_v3", {}, torch.float32)
    in_fp8(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["quantization_config"]
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptError, match="quantization_config with weight_block_size"):
        read_hf(tmp_path, tokenizer=BPE)


def test_layers_that_predict_further_tokens_are_passed_over_and_named(tmp_path):
    their_model(tmp_path, "deepseek_v3", {"num_nextn_predict_layers": 1})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    further = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.2.")
    }
    further |= {f"model.layers.3.{name}.weight": torch.ones(3) for name in ("enorm", "eh_proj")}
    save_file({**tensors, **further}, path)
    warnings = []
    stored = read_hf(tmp_path, tokenizer=BPE, warnings=warnings)
    assert warnings == [
        f"{path}: {len(further)} tensors of layer 3, for multi-token prediction, are passed over: "
        "the model here predicts the next token alone"
    ]
    assert stored.config.model.n_layers == 3
    content = json.loads((tmp_path / "config.json").read_text())
    content["num_nextn_predict_layers"] = 0
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CorruptError, match=r"not have: model\.layers\.3\.eh_proj\.weight"):
        read_hf(tmp_path, tokenizer=BPE)


@pytest.mark.parametrize("name", ["mlp.gate.e_score_correction_bias", "self_attn.q_b_proj.weight"])
def test_no_tensor_of_theirs_is_left_out(name, tmp_path):
    their_model(tmp_path, "deepseek_v3", {})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.1.{name}"]
    save_file(tensors, path)
    with pytest.raises(CorruptError, match=rf"lacks model\.layers\.1\.{name}$"):
        read_hf(tmp_path, tokenizer=BPE)


def nothing(_target, _region):
    """The content of a hole in a file."""


def sparse_folder(folder, published):
    """Writes a folder with the tensors of a published one, in a file for each layer, all of them
    holes; returns the number of tensors and of their bytes."""
    family = families()[published["model_type"]]
    model = ModelConfig.model_validate(from_their_config(published, "config.json"))
    files, n_tensors, n_bytes = {}, 0, 0
    for name, shape in TensorMap.of(family, model).their_shapes.items():
        parts = name.split(".")
        layer = parts[2] if name.startswith("model.layers.") else "rest"
        held = files.setdefault(layer, {})
        is_fp8 = "quantization_config" in published and "_proj" in name
        dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        held[name] = LazyTensor(shape, dtype, nothing)
        if is_fp8:
            blocks = tuple(-(-n // 128) for n in shape)
            held[f"{name}_scale_inv"] = LazyTensor(blocks, torch.float32, nothing)
    folder.mkdir()
    file_of = {}
    for layer, tensors in files.items():
        plan = plan_file(tensors)
        path = folder / f"model-{layer}.safetensors"
        with path.open("wb") as file:
            file.write(plan.header)
            file.truncate(plan.n_bytes)
        file_of |= dict.fromkeys(tensors, path.name)
        n_tensors, n_bytes = n_tensors + len(tensors), n_bytes + plan.n_data_bytes
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    (folder / "config.json").write_text(json.dumps(published))
    return n_tensors, n_bytes


@pytest.mark.parametrize(
    ("published", "n_tensors", "n_parameters"),
    [
        (V2_LITE, 5_291, 15_706_484_224),
        pytest.param(V3, 45_395 + 45_032, 671_026_419_200, marks=pytest.mark.slow),
    ],
    ids=["V2-Lite", "V3"],
)
def test_a_published_folder_opens_and_one_rank_s_part_is_read(
    published, n_tensors, n_parameters, tmp_path, monkeypatch
):
    assert sparse_folder(tmp_path / "hf", published)[0] == n_tensors
    stored = read_hf(tmp_path / "hf", tokenizer=BPE)
    assert sum(math.prod(tensor.shape) for tensor in stored.weights.values()) == n_parameters
    n_read = counted_reads(monkeypatch)
    model = stored.config.model
    layer, D = model.n_layers - 1, model.d_model
    one = stored.weights[f"blocks.{layer}.experts.up.weight"]
    assert one[3:4, 0:128, 0:D].shape == (1, 128, D)
    n_scales = D // 128 if "quantization_config" in published else 0
    assert sum(n_read) == 128 * D + n_scales
    n_read.clear()
    head = model.query_channels
    queries = stored.weights[f"blocks.{layer}.latent_attention.q.weight"]
    n_inputs = queries.shape[1]
    assert not queries[head : 2 * head, 0:n_inputs].any()
    # Of plain rows a scale for two blocks, and one for each of 64 rows of rotated channels.
    n_scales = n_inputs // 128 * (2 + 64) if n_scales else 0
    assert sum(n_read) == head * n_inputs + n_scales


LAST = "checkpoints/step-00000001"  # the best may be what a run began with
STEP = ("--train.steps", "1", "--train.batch-size", "4", "--train.compile", "false")
TEXT = ("--data.path", "text.txt", "--data.validation-fraction", "0.2", *STEP)


@pytest.fixture
def said(said):
    """The same beside a DeepSeek-V3 in `hf`."""
    options = {"vocab_size": BPE.vocab_size, "num_nextn_predict_layers": 1}
    their_model("hf", "deepseek_v3", options, torch.bfloat16)
    return said


def test_import_sample_and_tune_a_folder_and_export_the_run(said):
    greedy = ("--prompt", "the", "--max-new-tokens", "5", "--temperature", "0")
    assert said("import", "hf", "--out", "in").startswith("in: 3 layers")
    assert said("sample", "in", *greedy) == said("sample", "hf", *greedy)
    said("train", "in/config.toml", "--init-from", "hf", "--run-dir", "run", *TEXT)
    said("export", f"run/{LAST}", "--to", "hf", "--out", "out")
    tuned, before = open_there("out", torch.float32), open_there("hf", torch.float32)
    ours = load_model(f"run/{LAST}").model
    torch.testing.assert_close(*both_logits(tuned, ours), rtol=0, atol=1e-4)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved = tuned.state_dict()[name] - before.state_dict()[name]
    torch.testing.assert_close(moved.abs().max(), torch.tensor(0.001), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_adapters_have_their_rows(said):
    said("import", "hf", "--out", "in")
    adapted = ("--lora.rank", "2", "--lora.targets", "q,kv_down,kv", "--run-dir", "run")
    said("train", "in/config.toml", "--init-from", "hf", *TEXT, *adapted)
    said("export", f"run/{LAST}", "--to", "peft", "--out", "peft")
    said("export", f"run/{LAST}", "--to", "hf", "--out", "merged")
    adapters = load_file("peft/adapter_model.safetensors")
    weights, merged = (load_file(f"{name}/model.safetensors") for name in ("hf", "merged"))
    settings = read_json(Path("peft/adapter_config.json"))
    assert settings["target_modules"] == [
        f"self_attn.{name}" for name in ("kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj")
    ]
    for name in settings["target_modules"]:
        module = f"model.layers.2.{name}"
        a, b = (adapters[f"base_model.model.{module}.lora_{each}.weight"] for each in "AB")
        sum_ = weights[f"{module}.weight"].float() + settings["lora_alpha"] / 2 * (b @ a)
        torch.testing.assert_close(merged[f"{module}.weight"], sum_, rtol=0, atol=1e-6)
        assert b.any()
