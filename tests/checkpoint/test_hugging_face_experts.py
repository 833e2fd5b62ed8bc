"""Families with experts: both forms of their weights; no weight and no setting is passed over."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from their_models import BPE, EXPERTS, SIZES, both_logits, exact, open_there, their_model
from their_models import transformers as theirs_library

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.hugging_face import folder as folder_module
from pentameter.checkpoint.hugging_face.config_json import choose_family, from_their_config
from pentameter.checkpoint.hugging_face.expert_rules import (
    EXPERTS_IN_EVERY_LAYER,
    LAYERS_WITH_EXPERTS,
    SCORES_SUM_TO_ONE,
    SHARED_EXPERT_WITH_A_GATE,
)
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.checkpoint.hugging_face.tensor_map import TensorMap
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config, ModelConfig
from pentameter.errors import ConfigError, CorruptError
from pentameter.model.gpt import build_model
from pentameter.report.pages.model_card import CARD, card_files

WIDE = {"hidden_size": 24, "num_key_value_heads": 2}  # heads of an even size
LATENT = {
    "attention": "latent",
    "kv_rank": 10,
    "rope_head_size": 6,
    "v_head_size": 5,
    "norm_eps": 1e-6,
    "dense_layers": 1,
    "d_ff": 20,
    "n_shared_experts": 2,
    "router_scale": 1.5,
    "n_experts": 6,
}
OURS = {
    "qwen3_moe": {"qk_norm": "head", "router_renormalize": True, "dense_layers": (1,), "d_ff": 20},
    "mixtral": {"router_top_k_first": True, "balance": "batch", "n_kv_heads": 2},
    "olmoe": {"qk_norm": "width", "balance": "sequence", "router_z_loss": 0.1},
    "qwen2_moe": {"n_shared_experts": 2, "shared_expert_gate": True, "qkv_bias": True},
    "deepseek_v2": {
        **LATENT,
        "balance": "batch",
        "router_groups": 3,
        "router_open_groups": 2,
        "router_group_scores": 1,
    },
    "deepseek_v3": {
        **LATENT,
        "q_rank": 14,
        "router": "sigmoid",
        "router_renormalize": True,
        "balance": "bias",
        "router_groups": 3,
        "router_open_groups": 2,
    },
}
"""A model that each family is written for."""


def model_of(**model):
    """A model of ours with five experts in each layer, in float64, every parameter random."""
    values = {
        "vocab_size": BPE.vocab_size,
        "vocab_multiple": 64,
        "context_length": 24,
        "n_layers": 3,
        "n_heads": 4,
        "d_model": 24,
        "d_expert": 10,
        "n_experts": 5,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "positions": "rotary",
        "tied_head": False,
        "init_std": 0.3,
        **model,
    }
    tree = {"model": values, "data": {"corpus": "stdlib"}, "train": {"batch_size": 2}}
    config = Config.model_validate(tree)
    built = build_model(config.model, seed=5, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model_state(built).items():
        if "norm" in name or name.endswith(("bias", "balance")):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        if ".router." in name:
            tensor.copy_(tensor.float())  # as theirs are kept
    return StoredModel(None, config, BPE, model_state(built), (), None), built


def wide(family):
    """WIDE, but for latent attention, whose heads share no keys."""
    n_kv_heads = 4 if family.startswith("deepseek") else 2
    return {**WIDE, "num_key_value_heads": n_kv_heads}


@pytest.mark.parametrize("family", EXPERTS)
def test_stacked_experts_are_read_as_those_apart(family, tmp_path):
    theirs = their_model(tmp_path / "apart", family, wide(family))
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(
        tmp_path / "stacked" / "model.safetensors"
    )
    apart, stacked = (read_hf(tmp_path / form, tokenizer=BPE) for form in ("apart", "stacked"))
    assert stacked.config == apart.config
    assert stacked.weights.keys() == apart.weights.keys()
    for name, tensor in apart.weights.items():
        assert torch.equal(tensor[...], stacked.weights[name][...]), name


@pytest.mark.parametrize("family", EXPERTS)
def test_routers_in_float32_agree_to_1e_6(family, tmp_path):
    theirs = exact(their_model(tmp_path, family, wide(family)), routers=False)
    found, expected = both_logits(theirs, load_model(tmp_path).model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", OURS)
def test_a_model_of_ours_goes_out_and_comes_back_bit_for_bit(family, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SHARD_BYTES", 30_000)
    stored, built = model_of(**OURS[family])
    assert choose_family(stored.config.model) == family
    card = card_files(stored, "transformers")[CARD].decode()
    assert f"A language model: {families()[family].label}, " in card
    assert f"| experts | {stored.config.model.experts.count} in a layer, 2 for each token" in card
    folder = export_hf(stored, tmp_path / "hf").path
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert not any(name.endswith("experts.gate_up_proj") for name in held)  # as published
    is_bias = stored.config.model.router.balance == "bias"  # another balance is of training
    own = {
        name: tensor
        for name, tensor in stored.weights.items()
        if is_bias or not name.endswith("router.balance")
    }
    n_padding = 2 * (own["head.weight"].shape[0] - BPE.vocab_size) * 24
    assert sum(t.numel() for t in held.values()) == sum(t.numel() for t in own.values()) - n_padding
    theirs = exact(open_there(folder))
    ours = both_logits(theirs, built)[0][..., : BPE.vocab_size]
    torch.testing.assert_close(ours, both_logits(theirs, built)[1], rtol=0, atol=1e-10)
    again = read_hf(folder)
    assert again.weights.keys() == own.keys()
    for name, tensor in again.weights.items():
        assert torch.equal(tensor[...], own[name][: tensor.shape[0]]), name


@pytest.mark.parametrize("balance", ["none", "batch"])
def test_a_router_without_a_bias_is_written_with_zeros(balance, tmp_path):
    stored, built = model_of(**{**OURS["deepseek_v3"], "balance": balance})
    theirs = exact(open_there(export_hf(stored, tmp_path / "hf").path))
    assert not theirs.model.layers[1].mlp.gate.e_score_correction_bias.any()
    ours = both_logits(theirs, built)[0][..., : BPE.vocab_size]
    torch.testing.assert_close(ours, both_logits(theirs, built)[1], rtol=0, atol=1e-10)
    assert load_model(tmp_path / "hf").config.model.router.balance == "bias"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"router": "sigmoid"}, "model.router.score_function='sigmoid' .* no router of sigmoids"),
        ({"router_scale": 2.0}, "model.router.scale=2.0 .* does not scale"),
        ({"router_bias": True}, "model.router.bias=true"),
        ({"balance": "bias"}, "model.router.balance='bias' .* chosen by the scores alone"),
        ({"expert_capacity": 1.5}, "model.experts.capacity=1.5 .* leaves out no token"),
        ({"n_shared_experts": 1}, "model.experts.n_shared=1 .* no shared experts"),
        (
            {"qk_norm": "width", "n_experts": None, "d_expert": None},
            "model.attention.qk_norm='width'",
        ),
    ],
    ids=str,
)
def test_a_model_that_no_family_holds_is_refused_by_key(model, said):
    on = model.get("n_experts", 5) is not None
    stored, _ = model_of(**{**({"router_renormalize": True} if on else {}), **model})
    with pytest.raises(ConfigError, match=said):
        choose_family(stored.config.model)


@pytest.mark.parametrize(
    ("rule", "model", "said"),
    [
        (SCORES_SUM_TO_ONE, {}, "model.router.renormalize=false .* always sum to 1"),
        (
            EXPERTS_IN_EVERY_LAYER,
            {"dense_layers": (2,)},
            r"model.experts.dense_layers=\(2,\) .every layer",
        ),
        (EXPERTS_IN_EVERY_LAYER, {"n_experts": None, "d_expert": None}, "model.experts.count=none"),
        (LAYERS_WITH_EXPERTS, {"n_experts": None, "d_expert": None}, "model.experts.count=none"),
        (SHARED_EXPERT_WITH_A_GATE, {"n_shared_experts": 1}, "model.experts.shared_gate=false"),
        (SHARED_EXPERT_WITH_A_GATE, {}, "model.experts.n_shared=0 beside"),
    ],
)
def test_a_rule_refuses_by_key(rule, model, said):
    with pytest.raises(ValueError, match=said):
        rule.write(model_of(**model)[0].config.model)


def dropped(names):
    """A change of a folder's tensors: those are removed whose name contains one of `names`."""

    def change(tensors):
        for name in [name for name in tensors if any(part in name for part in names)]:
            del tensors[name]

    return change


def one_more(tensors):
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    tensors[name.format(5)] = tensors[name.format(4)].clone()


def stacked_too(tensors):
    names = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(5)]
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.stack([tensors[n] for n in names])


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("apart", dropped([".experts."]), r"lacks .*layers\.0\.mlp\.experts\.0\..* and 40 more"),
        ("apart", dropped(["1.mlp.experts.4.up"]), r"lacks model\.layers\.1\.mlp\.experts\.4\.up_"),
        ("apart", dropped(["2.mlp.gate."]), r"lacks model\.layers\.2\.mlp\.gate\.weight$"),
        ("apart", one_more, r"not have: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight$"),
        ("apart", stacked_too, r"lacks model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ("stacked", dropped([".experts."]), r"lacks .*mlp\.experts\.0\..* and 40 more"),
        (
            "stacked",
            dropped(["1.mlp.experts.gate_up"]),
            r"lacks model\.layers\.1\.mlp\.experts\.ga",
        ),
    ],
)
def test_no_expert_of_theirs_is_left_out(form, change, said, tmp_path):
    their_model(tmp_path, "qwen3_moe", WIDE, save_original_format=form == "apart")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CorruptError, match=said) as caught:
        load_model(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", [".experts.", ".router.weight", "2.experts.up"])
def test_no_expert_of_ours_is_left_out(part, tmp_path):
    stored, _ = model_of(router_renormalize=True)
    weights = {name: tensor for name, tensor in stored.weights.items() if part not in name}
    less = StoredModel(tmp_path, stored.config, BPE, weights, (), None)
    with pytest.raises(CorruptError, match=rf"missing: blocks\.\d\..*{part.lstrip('.2')}"):
        export_hf(less, tmp_path / "hf")
    more = {**stored.weights, "blocks.0.experts.more.weight": stored.weights["head.weight"]}
    with pytest.raises(CorruptError, match=r"unexpected: blocks\.0\.experts\.more\.weight"):
        export_hf(StoredModel(tmp_path, stored.config, BPE, more, (), None), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("preset", "family", "n_tensors", "n_elements", "last"),
    [
        ("mixtral-8x7b", "mixtral", 995, 46_702_792_704, "31.block_sparse_moe.experts.7.w2"),
        ("qwen3-30b-a3b", "qwen3_moe", 18_867, 30_532_122_624, "47.mlp.experts.127.down_proj"),
        ("olmoe-1b-7b", "olmoe", 3_219, 6_919_161_856, "15.mlp.experts.63.down_proj"),
        ("deepseek-v2-lite", "deepseek_v2", 5_291, 15_706_484_224, "26.mlp.experts.63.down_proj"),
        ("deepseek-v3", "deepseek_v3", 45_395, 671_026_419_200, "60.mlp.experts.255.down_proj"),
    ],
)
def test_presets_have_the_tensors_that_are_published(preset, family, n_tensors, n_elements, last):
    model = load_config(preset).model
    assert choose_family(model) == family
    found = TensorMap.of(families()[family], model)
    shapes = found.their_shapes
    assert len(shapes) == n_tensors
    assert sum(map(math.prod, shapes.values())) == n_elements
    assert shapes[f"model.layers.{last}.weight"] == (model.d_model, model.expert_width)
    assert sum(len(strip.rows) for strip in found.strips) == sum(s[0] for s in shapes.values())


def test_qwen_1_5_has_the_tensors_that_are_published():
    """Qwen1.5-MoE-A2.7B, from its published config.json."""
    published = {
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    model = ModelConfig.model_validate(from_their_config(published, "config.json"))
    assert (model.experts.n_shared, model.experts.shared_gate, model.experts.dense_layers) == (
        4,
        True,
        0,
    )
    shapes = TensorMap.of(families()["qwen2_moe"], model).their_shapes
    assert sum(map(math.prod, shapes.values())) == 14_315_784_192
    assert len(shapes) == 3 + 24 * (2 + 4 + 3 + 1 + 3 * 60 + 3 + 1)


class Recorded(dict):
    """A config.json that knows which of its keys were asked for."""

    def __init__(self, *values):
        super().__init__(*values)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


NOT_OF_THE_MODEL = {
    "bos_token_id": "of text, not of the model",
    "eos_token_id": "read with the tokenizer",
    "pad_token_id": "padding is masked",
    "use_cache": "of `generate`",
    "output_router_logits": "what is given back beside the logits; of training",
    "router_aux_loss_coef": "of training; the configuration here says how it balances",
    "pretraining_tp": "how products are cut, which leaves their results",
    "head_dim": "theirs is qk_rope_head_dim, whatever config.json says",
    "num_mtp_layers": "asked for where layers are passed over",
}
"""Their keys that nothing reads, and why not."""
ASKED = {
    "num_experts_per_tok": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 2,
    "topk_group": 1,
}
"""Settings of DeepSeek-V2 without which others are not asked for, or have no default."""


@pytest.mark.parametrize("family", EXPERTS)
def test_every_setting_of_theirs_is_read_or_for_a_reason_not(family):
    kind = getattr(theirs_library, families()[family].architecture.replace("ForCausalLM", "Config"))
    content = Recorded({"model_type": family, "use_sliding_window": True, "max_window_layers": 0})
    if family == "deepseek_v2":
        content.update(ASKED)
    from_their_config(content, "config.json")
    assert kind.__annotations__.keys() - content.asked <= NOT_OF_THE_MODEL.keys()


@pytest.mark.parametrize("family", EXPERTS)
def test_a_setting_that_is_left_out_has_their_default(family):
    kind = getattr(theirs_library, families()[family].architecture.replace("ForCausalLM", "Config"))
    given = ASKED if family == "deepseek_v2" else {}
    alone, whole = (
        ModelConfig.model_validate(from_their_config(content, "config.json"))
        for content in ({"model_type": family, **given}, kind(**given).to_dict())
    )
    assert alone.resolved == whole.resolved


def test_windows_without_a_list_are_theirs(tmp_path):
    """Qwen 2 MoE has a window in every other layer, up to a number of layers."""
    options = {**WIDE, "use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 4}
    content = {**SIZES, **EXPERTS["qwen2_moe"], **options, "model_type": "qwen2_moe"}
    kinds = theirs_library.Qwen2MoeConfig(**{**content, "max_window_layers": 4}).layer_types
    assert kinds == ["sliding_attention", "full_attention"] * 2
    read = from_their_config({**content, "max_window_layers": 4}, "config.json")
    attention = read["attention"]
    assert (attention["sliding_window"], attention["sliding_window_pattern"]) == (5, 2)
    read = from_their_config({**content, "max_window_layers": 2}, "config.json")
    assert read["attention"]["sliding_window_pattern"] == (1, 2, 3)


def test_sample_evaluate_and_tune_a_folder_and_export_the_run(said, tmp_path):
    options = {**WIDE, "norm_topk_prob": True, "vocab_size": BPE.vocab_size}
    their_model("hf", "qwen3_moe", options, torch.bfloat16)
    sampled = said("sample", "hf", "--prompt", "the", "--max-new-tokens", "5", "--temperature", "0")
    assert sampled.startswith("the")
    data = ("--data.path", "text.txt", "--data.validation-fraction", "0.2")
    assert '"loss"' in said("eval", "hf", *data, "--json")
    assert "5 experts, 2 for each token" in said("import", "hf", "--out", "in")
    steps = ("--train.steps", "2", "--train.batch-size", "4", "--train.eval-interval", "2")
    balance = ("--model.router.balance", "batch", "--model.router.balance-weight", "0.01")
    said(
        "train", "in/config.toml", "--init-from", "hf", "--run-dir", "run", *data, *steps, *balance
    )
    said("export", "run", "--to", "hf", "--out", "out")
    assert "Qwen 3 MoE" in (tmp_path / "out" / CARD).read_text()
    tuned, before = open_there("out", torch.float32), open_there("hf", torch.float32)
    torch.testing.assert_close(*both_logits(tuned, load_model("run").model), rtol=0, atol=1e-4)
    assert not torch.equal(*(m.model.layers[0].mlp.gate.weight for m in (tuned, before)))
