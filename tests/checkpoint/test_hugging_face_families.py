"""Every family of Hugging Face both ways, held against `transformers` itself.

Its RMSNorm and its routers round to fp32 whatever the model's dtype, so models of fp64 agree to
1e-10 only where that rounding is taken out, which `exact` does. Angles are fp32 on both sides. One
test compares in fp32 with nothing replaced.
"""

from __future__ import annotations

import json

import pytest
import torch
from counted_reads import counted_reads
from safetensors import safe_open
from their_models import (
    BPE,
    EXPERTS,
    GROUPED,
    SIZES,
    WINDOW,
    both_logits,
    exact,
    open_there,
    their_model,
    transformers,
)

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.hugging_face import folder as folder_module
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.errors import ConfigError
from pentameter.generation.loop import generate

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
GROUPS = {
    "n_routed_experts": 6,
    "topk_method": "group_limited_greedy",
    "n_group": 3,
    "topk_group": 2,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}

QWEN3 = {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
NEOX = {"hidden_size": 32, "rope_parameters": {"partial_rotary_factor": 0.5}}
PART = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100.0}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
GEMMA = {**GROUPED, "hidden_size": 16, "query_pre_attn_scalar": 9}
"""Sizes of Gemma, whose embeddings are multiplied by 4, which fp32 has exactly."""
BOUNDLESS = {"attn_logit_softcapping": None}
MIXTRAL = {"num_key_value_heads": 2, "hidden_size": 24, "num_experts_per_tok": 3}

FORMS = [
    (
        "llama",
        {
            "hidden_size": 24,
            "num_key_value_heads": 1,
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    ("llama", {"head_dim": 6, "rope_parameters": LINEAR, "hidden_act": "gelu"}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 24, "rms_norm_eps": 1e-3}),
    ("mistral", {**GROUPED, "sliding_window": 5}),
    (
        "mistral",
        {"num_key_value_heads": 4, "hidden_size": 18, "head_dim": 8, "sliding_window": None},
    ),
    ("qwen2", {"num_key_value_heads": 2, "hidden_size": 24, "tie_word_embeddings": True}),
    ("qwen2", {**WINDOW, "hidden_size": 24, "num_key_value_heads": 4, "max_window_layers": 0}),
    ("qwen2", {**WINDOW, "hidden_size": 24, "num_key_value_heads": 2, "max_window_layers": 1}),
    ("llama", {"attention_bias": True, "hidden_size": 24, "num_key_value_heads": 2}),
    ("llama", {"mlp_bias": True, "hidden_size": 24}),
    ("qwen3", {**GROUPED, "attention_bias": True}),
    ("qwen3", QWEN3),
    (
        "qwen3",
        {
            **WINDOW,
            "head_dim": 10,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    (
        "qwen3",
        {
            **WINDOW,
            **GROUPED,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    ("smollm3", {"hidden_size": 24, "num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    (
        "smollm3",
        {
            **GROUPED,
            **WINDOW,
            "no_rope_layers": [0, 0, 1],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    ("gemma3_text", {**GEMMA, "sliding_window": 5, "sliding_window_pattern": 2}),
    ("gemma2", {**GEMMA, **BOUNDLESS, "sliding_window": 5}),
    (
        "gemma3_text",
        {
            **GEMMA,
            "head_dim": 10,
            "num_key_value_heads": 4,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
        },
    ),
    ("phi3", {"hidden_size": 32, "num_key_value_heads": 2, "rope_parameters": PART}),
    (
        "phi3",
        {
            "hidden_size": 32,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "rope_parameters": PART,
        },
    ),
    ("gpt_neox", NEOX),
    (
        "gpt_neox",
        {"hidden_size": 32, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
    ("olmo2", {"num_key_value_heads": 2, "hidden_size": 24, "attention_bias": True}),
    ("olmo2", {"tie_word_embeddings": True, "hidden_size": 24, "rope_parameters": LINEAR}),
    ("qwen3_moe", {**GROUPED, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**GROUPED, **WINDOW, "mlp_only_layers": [0], "norm_topk_prob": True}),
    ("mixtral", MIXTRAL),
    ("mixtral", {**GROUPED, "sliding_window": 5, "tie_word_embeddings": True}),
    ("olmoe", {"hidden_size": 24, "num_key_value_heads": 2, "attention_bias": True}),
    ("olmoe", {"hidden_size": 24, "norm_topk_prob": True, "hidden_act": "gelu"}),
    ("deepseek_v2", {"rope_parameters": YARN}),
    (
        "deepseek_v2",
        {**GROUPS, "q_lora_rank": None, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    ("deepseek_v3", {"rope_parameters": YARN, "hidden_size": 18, "attention_bias": True}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False}),
    ("qwen2_moe", {"hidden_size": 24, "num_key_value_heads": 2, "mlp_only_layers": [2, 0]}),
    (
        "qwen2_moe",
        {**WINDOW, "hidden_size": 24, "num_key_value_heads": 4, "qkv_bias": False},
    ),
    ("gpt_oss", {**GROUPED, "sliding_window": 5, "swiglu_limit": 0.7, "rope_parameters": YARN}),
    (
        "gpt_oss",
        {
            "num_key_value_heads": 4,
            "layer_types": ["full_attention"] * 3,
            "swiglu_alpha": 1.2,
            "tie_word_embeddings": True,
        },
    ),
    ("qwen3", {**GROUPED, "rope_parameters": {**YARN, "truncate": False}}),
    ("llama", {"head_dim": 6, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.5}}),
]


@pytest.mark.parametrize(("family", "options"), FORMS, ids=str)
def test_a_model_computes_the_same_here_and_back_there(family, options, tmp_path):
    theirs = exact(their_model(tmp_path / "hf", family, options))
    loaded = load_model(tmp_path / "hf")
    torch.testing.assert_close(*both_logits(theirs, loaded.model), rtol=0, atol=1e-10)
    export_hf(read_hf(tmp_path / "hf"), tmp_path / "again")
    again = open_there(tmp_path / "again")
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    torch.testing.assert_close(*both_logits(exact(again), loaded.model), rtol=0, atol=1e-10)
    # Exported by hand again, it is the same model, whatever family is written.
    assert read_hf(tmp_path / "again").config == loaded.config


@pytest.mark.parametrize("family", [name for name in families() if name != "gpt2"])
def test_greedy_text_is_the_same_there_and_here(family, tmp_path):
    options = {"vocab_size": BPE.vocab_size, "max_position_embeddings": 64, "hidden_size": 32}
    if family not in ("gpt_neox", "deepseek_v2", "deepseek_v3"):
        options["num_key_value_heads"] = 2
    if family.startswith("gemma"):
        options["tie_word_embeddings"] = False  # or each token would be followed by itself
        options |= BOUNDLESS
    theirs = their_model(tmp_path / "hf", family, options, torch.float32)
    loaded = load_model(tmp_path / "hf")
    torch.testing.assert_close(*both_logits(theirs, loaded.model), rtol=0, atol=1e-4)
    theirs.generation_config.eos_token_id = None  # neither stops
    prompt = torch.tensor([BPE.encode("the cat").tolist()])
    found = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=0,
    )[0].tolist()
    (text,) = generate(loaded.model, BPE, "the cat", max_new_tokens=40, temperature=0)
    assert BPE.decode(found) == "the cat" + text
    assert len(set(found)) > 3


TRAINED = {
    "phi3": {"hidden_size": 32, "num_key_value_heads": 2, "rope_parameters": PART},
    "smollm3": {"hidden_size": 24, "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "gemma3_text": {**GEMMA, "sliding_window": 5, "sliding_window_pattern": 2},
    "gemma2": {**GEMMA, **BOUNDLESS, "sliding_window": 5},
}


@pytest.mark.parametrize("family", TRAINED)
def test_some_steps_of_training_have_the_losses_that_they_have_there(family, tmp_path):
    theirs = exact(their_model(tmp_path / "hf", family, TRAINED[family]))
    ours = load_model(tmp_path / "hf").model.train().requires_grad_()
    tokens = torch.randint(SIZES["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(1))
    targets = torch.cat((tokens[:, 1:], torch.full((2, 1), -1)), dim=1)
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-3) for model in (theirs, ours)
    ]
    for _ in range(4):
        found = ours(tokens, targets=targets) / (targets >= 0).sum()
        expected = theirs(tokens, labels=tokens).loss
        # Their loss is computed in fp32.
        torch.testing.assert_close(found, expected.double(), rtol=3e-7, atol=0)
        for optimizer, loss in zip(optimizers, (expected, found), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_the_old_form_of_config_json_is_read(tmp_path):
    """As versions before 5 wrote it: rope_theta and rope_scaling beside each other, torch_dtype."""
    theirs = exact(their_model(tmp_path / "hf", "llama", FORMS[0][1]))
    path = tmp_path / "hf" / "config.json"
    content = json.loads(path.read_text())
    rope = content.pop("rope_parameters")
    content["rope_theta"] = rope.pop("rope_theta")
    content["rope_scaling"] = rope
    path.write_text(json.dumps(content))
    loaded = load_model(tmp_path / "hf")
    assert loaded.config.model.rope_scaling.type == "llama3"
    torch.testing.assert_close(*both_logits(theirs, loaded.model), rtol=0, atol=1e-10)
    theirs = exact(their_model(tmp_path / "neox", "gpt_neox", NEOX))
    path = tmp_path / "neox" / "config.json"
    content = json.loads(path.read_text())
    del content["rope_parameters"]
    path.write_text(json.dumps({**content, "rotary_pct": 0.5, "rotary_emb_base": 10000}))
    loaded = load_model(tmp_path / "neox")
    torch.testing.assert_close(*both_logits(theirs, loaded.model), rtol=0, atol=1e-10)


def test_both_forms_of_rotary_settings_are_written(tmp_path):
    their_model(tmp_path / "hf", "llama", FORMS[0][1])
    export_hf(read_hf(tmp_path / "hf"), tmp_path / "again")
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 500.0
    for key in LLAMA3.keys() - {"rope_theta"}:
        assert content["rope_scaling"][key] == content["rope_parameters"][key] == LLAMA3[key]


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("llama", {"attention_bias": 2}, "model.attention.qkv_bias=2 must be"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' .* possible: silu, swish, gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope"}},
            "has no short_factor, which",
        ),
        ("llama", {"rope_parameters": {"rope_type": "other"}}, "rope_type='other' .* possib"),
        ("llama", {"rope_parameters": {**YARN, "mscale": "1"}}, "mscale='1' is not a number"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic"}},
            "no factor, which .*='dynamic'",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        ("llama", {"rope_scaling": [1]}, r"rope_scaling=\[1\] is not an object"),
        ("llama", {"rope_parameters": {"mrope_section": [1]}}, "mrope_section=.* not supported"),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, "model.rope_theta='x' must be"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads=.* all of its heads"),
        ("llama", {"num_key_value_heads": 3}, "model.attention.n_kv_heads=3 must divide"),
        ("llama", {"num_hidden_layers": "3"}, "model.n_layers='3' must be"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types=.* window in every layer"),
        ("qwen2", {**WINDOW, "layer_types": ["full_attention"]}, "layer_types=.* each of 3 layers"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types=.* with sliding_window=none is not supported",
        ),
        (
            "qwen3",
            {**WINDOW, "layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "chunked_attention.* is not supported: each of 3 layers has a window",
        ),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=false is not supported"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 .* whole number from 1"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1 is not a list of layers"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "model.experts.dense_layers=3 leaves none"),
        ("qwen3_moe", {"num_experts": 0}, "model.experts.count=0 must be"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, "model.experts.per_token=6 must be at most"),
        ("qwen3_moe", {"norm_topk_prob": 2}, "model.router.renormalize=2 must be"),
        ("qwen3_moe", {"layer_types": ["full_attention"]}, "layer_types=.* window in every layer"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 .* no noise"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported: .* not clipped"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 12}, "=12 beside moe_.*=8 .* a multiple"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "rotary_fraction=0.3"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads=2 beside .*=4"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' .* possible: greedy"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "needs n_group"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=true .* own program divides"),
        ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 .* norms of latents have 1e-6"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=true is not supported"),
        ("deepseek_v2", {"first_k_dense_replace": 3}, "model.experts.dense_layers=3 leaves none"),
        ("deepseek_v3", {"topk_group": 4}, "model.router.open_groups=4 of 3 groups"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "=-1 must be a whole number from 0"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "quantization_config=.* dequantised",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not .*; possible: default"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is not a number"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] does not have 0 or 1 for each"),
        ("gemma2", {}, "attn_logit_softcapping=50.0 is not supported: attention scores are not"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "a token sees no later one"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not a number"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "sliding_attention=.* is not supported: .* a base, and no scaling",
        ),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=false .* all the biases"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu' .* possible: silu"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights are not"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused_by_key(family, values, said, tmp_path):
    (tmp_path / "hf").mkdir()
    sizes = {**SIZES, **EXPERTS.get(family, {}), "hidden_size": 24}
    content = {**sizes, "model_type": family, **values}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    (tmp_path / "hf" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=said) as caught:
        read_hf(tmp_path / "hf", tokenizer=BPE)
    assert str(tmp_path / "hf" / "config.json") in str(caught.value)


def test_large_weights_are_written_in_parts_with_an_index(tmp_path, monkeypatch):
    theirs = their_model(tmp_path / "hf", "qwen3", QWEN3, max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    monkeypatch.setattr(folder_module, "SHARD_BYTES", 40_000)
    export_hf(read_hf(tmp_path / "hf"), tmp_path / "again")
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    for file in files:
        with safe_open(file, "pt") as held:
            n_bytes = sum(held.get_tensor(name).nbytes for name in held.keys())  # noqa: SIM118
            assert n_bytes <= 40_000 or len(list(held.keys())) == 1
    again = open_there(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        FORMS[0],
        FORMS[4],
        ("gpt_neox", NEOX),
        ("phi3", {"hidden_size": 24, "num_key_value_heads": 2}),
        ("gpt2", {}),
        ("qwen3_moe", {**GROUPED, **WINDOW, "mlp_only_layers": [0], "norm_topk_prob": True}),
        ("mixtral stacked", MIXTRAL),
        ("deepseek_v2", {}),
        ("deepseek_v3 stacked", {"q_lora_rank": None}),
    ],
    ids=str,
)
def test_a_region_reads_its_own_rows_and_no_more(family, options, tmp_path, monkeypatch):
    """Each region is what the whole has there, and touches only these elements of the files."""
    if family == "gpt2":
        torch.manual_seed(3)
        config = transformers.GPT2Config(
            vocab_size=SIZES["vocab_size"], n_positions=24, n_embd=24, n_layer=2, n_head=4
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    else:
        name, _, stacked = family.partition(" ")
        their_model(tmp_path / "hf", name, options, save_original_format=not stacked)
    stored = read_hf(tmp_path / "hf", tokenizer=BPE)
    n_read = counted_reads(monkeypatch)
    for tensor in stored.weights.values():
        whole = tensor[...]
        for part in range(3):
            bounds = [(n * part // 3, n * (part + 1) // 3) for n in tensor.shape[:1]]
            region = tuple(slice(*each) for each in bounds)
            region += tuple(slice(1, n) for n in tensor.shape[1:])
            expected = whole[region]
            n_read.clear()
            assert torch.equal(tensor[region], expected)
            assert sum(n_read) == expected.numel()
