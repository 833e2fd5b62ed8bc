"""gpt-oss's folders: tensors in common, in 4 bits or not, both ways."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from their_models import BPE, GROUPED, both_logits, exact, open_there, their_model, transformers

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.format.lazy_tensors import LazyTensor, copy_region
from pentameter.checkpoint.hugging_face.config_json import choose_family, from_their_config
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.checkpoint.hugging_face.tensor_map import TensorMap
from pentameter.checkpoint.hugging_face.weights.packed_experts import (
    _dequantized,
    form_of,
    pack,
    unpack,
)
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.schema import Config, ModelConfig
from pentameter.errors import ConfigError, CorruptError
from pentameter.model.attention.cache import KVCache
from pentameter.model.gpt import build_model
from pentameter.planning.gpt import parameter_table
from pentameter.serve.passes import Slots

DOWN = "model.layers.0.mlp.experts.down_proj"
SIZES = {"hidden_size": 64, "intermediate_size": 32, **GROUPED, "sliding_window": 5}
OURS = {
    "vocab_size": BPE.vocab_size,
    "context_length": 24,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_size": 6,
    "d_model": 20,
    "d_expert": 10,
    "n_experts": 5,
    "activation": "swiglu_clamped",
    "swiglu_limit": 0.5,
    "attention_sinks": True,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "norm": "rmsnorm",
    "positions": "rotary",
    "rope_scaling": {"type": "yarn", "original_context_length": 12, "truncate": False},
    "router_top_k_first": True,
    "router_bias": True,
    "qkv_bias": True,
    "bias": True,
    "tied_head": False,
    "init_std": 0.3,
}


def model_of(**changes):
    """A model of ours like gpt-oss, in float64, every parameter random; stored, and built."""
    tree = {"model": {**OURS, **changes}, "data": {"corpus": "stdlib"}, "train": {"batch_size": 2}}
    config = Config.model_validate(tree)
    built = build_model(config.model, seed=5, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model_state(built).items():
        if "norm" in name or name.endswith("bias"):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return StoredModel(None, config, BPE, model_state(built), (), None), built


def quantized(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales for a matrix (E, inputs, outputs), as gpt-oss is published."""
    n_experts, n_in, n_out = tensor.shape
    shape = (n_experts, n_out, n_in // 32)
    generator = torch.Generator().manual_seed(n_in)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)


def quantize(folder) -> dict[str, torch.Tensor]:
    """Replace the matrices of experts in a folder by random ones in 4 bits; return all tensors as
    `transformers` dequantises them."""
    path = folder / "model.safetensors"
    published, plain = {}, {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            published[name] = plain[name] = tensor
            continue
        blocks, scales = quantized(tensor)
        published |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
        plain[name] = convert(blocks, scales, dtype=torch.float32)
    save_file(published, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def test_numbers_in_4_bits_are_those_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).repeat(3, 2, 8, 1).view(3, 2, -1, 16)
    scales = torch.arange(blocks[..., 0].numel(), dtype=torch.int64) % 200 + 27
    scales = scales.to(torch.uint8).view(3, 2, -1)
    lazy = _dequantized(*(lazy_of(each) for each in (blocks, scales)))
    for dtype in (torch.float32, torch.bfloat16):
        convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
        expected = convert(blocks, scales, dtype=dtype).float().transpose(1, 2)
        assert torch.equal(lazy[...], expected)
    part = lazy[1:3, 0:1, 40:101]
    assert torch.equal(part, expected[1:3, 0:1, 40:101])


def lazy_of(tensor: torch.Tensor) -> LazyTensor:
    def fill(target, region):
        copy_region(target, tensor, region)

    return LazyTensor(tuple(tensor.shape), tensor.dtype, fill)


def test_a_region_of_a_packed_tensor_is_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    sizes = {"gate": (6, 5), "up": (6, 5), "down": (5, 6)}
    shapes = {f"x.mlp.experts.{each}_proj.weight": (3, *sizes[each]) for each in sizes}
    shapes |= {f"x.mlp.experts.{each}_proj.bias": (3, sizes[each][0]) for each in sizes}
    plain = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    packed = pack({name: lazy_of(tensor) for name, tensor in plain.items()})
    assert {name: each.shape for name, each in packed.items()} == form_of(shapes, ()).shapes
    whole = packed["x.mlp.experts.gate_up_proj"][...]
    assert torch.equal(whole[:, :, 1::2], plain["x.mlp.experts.up_proj.weight"].mT)
    for start, stop in ((0, 12), (3, 8), (2, 7), (5, 6)):
        part = packed["x.mlp.experts.gate_up_proj"][1:3, 2:5, start:stop]
        assert torch.equal(part, whole[1:3, 2:5, start:stop])
    again = unpack(packed, shapes)
    for name, tensor in plain.items():
        assert torch.equal(again[name][...], tensor)
        region = slice(0, 2), slice(1, 4), *(slice(0, size) for size in tensor.shape[2:])
        assert torch.equal(again[name][region], tensor[region])


def test_published_weights_in_4_bits_are_read_as_transformers_reads_them(tmp_path):
    their_model(tmp_path / "hf", "gpt_oss", SIZES, torch.float32)
    plain = quantize(tmp_path / "hf")
    theirs = transformers.GptOssForCausalLM(
        transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    ).double()
    theirs.load_state_dict(plain)
    loaded = load_model(tmp_path / "hf")
    loaded.model.double()
    torch.testing.assert_close(*both_logits(exact(theirs.eval()), loaded.model), rtol=0, atol=1e-10)
    # What is exported has no blocks, and is the same model.
    folder = export_hf(read_hf(tmp_path / "hf"), tmp_path / "again").path
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    held = load_file(folder / "model.safetensors")
    assert held.keys() == plain.keys()
    assert all(torch.equal(held[name], plain[name]) for name in plain)


def test_a_model_of_ours_goes_out_and_comes_back_bit_for_bit(tmp_path):
    stored, built = model_of()
    assert choose_family(stored.config.model) == "gpt_oss"
    folder = export_hf(stored, tmp_path / "hf").path
    theirs = exact(open_there(folder))
    torch.testing.assert_close(*both_logits(theirs, built), rtol=0, atol=1e-10)
    again = read_hf(folder)
    assert again.config.model.resolved == stored.config.model.resolved
    assert again.weights.keys() == stored.weights.keys()
    for name, tensor in again.weights.items():
        assert torch.equal(tensor[...], stored.weights[name]), name


def test_biases_that_a_model_lacks_are_written_as_zeros(tmp_path):
    lacks = {"router_bias": False, "qkv_bias": False, "bias": False, "sliding_window": None}
    stored, built = model_of(**lacks, sliding_window_pattern=None)
    folder = export_hf(stored, tmp_path / "hf").path
    theirs = exact(open_there(folder))
    torch.testing.assert_close(*both_logits(theirs, built), rtol=0, atol=1e-10)
    assert read_hf(folder).config.model.attention.sliding_window is None


def test_an_empty_config_json_is_gpt_oss_120b_as_transformers_has_it(tmp_path):
    model = ModelConfig.model_validate(from_their_config({"model_type": "gpt_oss"}, tmp_path))
    config = transformers.GptOssConfig()
    assert model.rope_theta == config.rope_parameters["rope_theta"] == 150000.0
    scaling = model.rope_scaling
    assert (scaling.type, scaling.factor, scaling.truncate) == ("yarn", 32.0, False)
    assert (model.attention.sliding_window, model.attention.sliding_window_pattern) == (128, 2)
    assert [model.window(layer) is None for layer in range(36)] == [
        kind == "full_attention" for kind in config.layer_types
    ]
    assert (model.experts.count, model.experts.n_chosen, model.expert_width) == (128, 4, 2880)


@pytest.mark.parametrize(
    ("n_layers", "n_experts", "counts"),
    [(24, 32, (20_914_757_184, 4_187_440_704)), (36, 128, (116_829_156_672, 5_711_982_912))],
)
def test_published_models_have_exactly_their_parameters(n_layers, n_experts, counts, tmp_path):
    """gpt-oss-20b and gpt-oss-120b, and the tensors of their folders, in 4 bits and plain."""
    published = {
        "model_type": "gpt_oss",
        "num_hidden_layers": n_layers,
        "num_local_experts": n_experts,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    model = ModelConfig.model_validate(from_their_config(published, tmp_path))
    table = parameter_table(model)
    n_active = sum(spec.n_active for spec in table)
    assert (sum(spec.n_elements for spec in table), n_active) == counts
    shapes = TensorMap.of(families()["gpt_oss"], model).their_shapes
    plain, in_bits = form_of(shapes, ()), form_of(shapes, ["x_blocks"])
    assert sum(map(math.prod, plain.shapes.values())) == counts[0]
    assert len(plain.shapes) == 3 + 17 * n_layers
    assert len(in_bits.shapes) == 3 + 19 * n_layers
    last = f"model.layers.{n_layers - 1}.mlp.experts"
    assert in_bits.shapes[f"{last}.gate_up_proj_blocks"] == (n_experts, 5760, 90, 16)
    assert in_bits.shapes[f"{last}.down_proj_scales"] == (n_experts, 2880, 90)
    assert in_bits.in_bytes == in_bits.shapes.keys() - plain.shapes.keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("model.layers.1.self_attn.sinks"), "lacks .*layers.1.self_attn.sin"),
        (lambda held: held.pop("model.layers.0.mlp.experts.down_proj_bias"), "lacks .*down_proj_b"),
        (
            lambda held: held.update({"model.layers.0.mlp.experts.up_proj": torch.ones(2)}),
            "does not have: model.layers.0.mlp.experts.up_proj",
        ),
        (
            lambda held: held.pop("model.layers.2.mlp.experts.down_proj_scales"),
            "lacks model.layers.2.mlp.experts.down_proj_scales",
        ),
        (
            lambda held: held.update({f"{DOWN}_scales": torch.ones(2)}),
            r"down_proj_scales is \(2,\) of torch.float32.* of bytes",
        ),
    ],
    ids=["sinks", "bias", "surplus", "scales", "dtype"],
)
def test_a_tensor_that_is_missing_or_not_the_familys_is_refused_by_name(change, said, tmp_path):
    their_model(tmp_path, "gpt_oss", SIZES, torch.float32)
    if "scales" in said:
        quantize(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CorruptError, match=said):
        read_hf(tmp_path)


def test_a_model_without_sinks_is_not_written_as_gpt_oss():
    with pytest.raises(ConfigError, match=r"model.attention.sinks=false .* a sink in every head"):
        choose_family(model_of(attention_sinks=False)[0].config.model)


@torch.no_grad()
def test_caches_give_the_logits_of_a_whole_pass():
    """Windows and sinks: the cache of `sample`, and the slots of `serve`."""
    _, model = model_of(context_length=40)
    tokens = torch.arange(40)[None] * 7 % 19
    whole = model(tokens)
    cache = KVCache(model.config, 1, dtype=torch.float64)
    parts = [model(part, cache=cache) for part in tokens.split([9, 1, 1, 20, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    slots = Slots(model, BPE.vocab_size, 2)
    first = torch.from_numpy(slots.read(1, tokens[0, :20].tolist(), 0, 20))
    torch.testing.assert_close(first, whole[0, 19], rtol=0, atol=1e-12)
    for number in range(20, 40):
        (found,) = slots.write({1: (int(tokens[0, number]), number, number + 1)}).values()
        torch.testing.assert_close(torch.from_numpy(found), whole[0, number], rtol=0, atol=1e-12)
