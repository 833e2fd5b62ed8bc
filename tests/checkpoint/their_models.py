"""Random models as `transformers` saves them, with our BPE's files, for tests that compare."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.data.tokenizers.byte_level.training import train_bpe

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
transformers = pytest.importorskip("transformers")
deepseek_v2 = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")

BPE = train_bpe(["the cat sat on the mat, and that was that.\n" * 4], 300)
SIZES = {
    "vocab_size": BPE.vocab_size + 5,
    "max_position_embeddings": 24,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "initializer_range": 0.3,
    "bos_token_id": BPE.end_of_text,
    "eos_token_id": BPE.end_of_text,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 6}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
LATENT = {
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 8,  # even, or theirs cannot rotate fp32
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 5},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 16,
    },
    "deepseek_v2": {**LATENT, "n_routed_experts": 5, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 6,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6},
}
"""Sizes of families with experts: an odd number of them, and widths that their products take."""


def their_model(folder, family, options, dtype=torch.float64, **save):
    """A random model as `transformers` saves it, with our BPE's files beside it."""
    torch.manual_seed(3)
    architecture = families()[family].architecture
    kind = getattr(transformers, architecture).config_class
    given = {**SIZES, **EXPERTS.get(family, {}), **options}
    config = kind(**copy.deepcopy(given))  # which it changes in place
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)  # fp32, as their routers are kept
    model.to(dtype).save_pretrained(folder, **save)
    transformers.GPT2Tokenizer(
        vocab=dict(BPE.vocabulary), merges=[tuple(merge) for merge in BPE.merges]
    ).save_pretrained(folder)
    return model


class NormFromZero(torch.nn.Module):
    """A norm of Gemma's, in the model's own dtype."""

    def __init__(self, theirs):
        super().__init__()
        self.weight, self.eps = theirs.weight, theirs.eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


class Router(torch.nn.Module):
    """A router of theirs, in the model's own dtype."""

    def __init__(self, theirs):
        super().__init__()
        self.weight, self.n_chosen = theirs.weight, theirs.top_k
        self.bias = getattr(theirs, "bias", None)  # gpt-oss's
        if (correction := getattr(theirs, "e_score_correction_bias", None)) is not None:
            self.register_buffer("e_score_correction_bias", correction)
        is_greedy = getattr(theirs, "topk_method", None) == "greedy"
        self.n_groups = None if is_greedy else getattr(theirs, "num_group", None)
        self.n_open = getattr(theirs, "topk_group", None)
        self.scale = getattr(theirs, "routed_scaling_factor", 1.0)
        # Mixtral's always, DeepSeek-V2's never
        self.sums_to_one = getattr(theirs, "norm_topk_prob", not hasattr(theirs, "topk_method"))

    def forward(self, x):
        x = x.flatten(0, -2)
        logits = torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias)
        correction = getattr(self, "e_score_correction_bias", None)
        scores = logits.softmax(-1) if correction is None else logits.sigmoid()
        ranked = scores if correction is None else scores + correction
        if self.n_groups is not None:
            groups = ranked.unflatten(-1, (self.n_groups, -1))
            best = groups.topk(1 if correction is None else 2).values.sum(-1)
            closed = best < best.topk(self.n_open).values[:, -1:]
            ranked = groups.masked_fill(closed[..., None], -1).flatten(-2)
        experts = ranked.topk(self.n_chosen).indices
        chosen = scores.gather(-1, experts)
        if self.sums_to_one:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen * self.scale, experts


class Angles(torch.nn.Module):
    """DeepSeek-V2's angles, whose cosines and sines are those of the other families."""

    def __init__(self, theirs):
        super().__init__()
        self.inv_freq, self.factor = theirs.inv_freq, theirs.attention_scaling

    def forward(self, _x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return torch.complex(angles.cos() * self.factor, angles.sin() * self.factor)


THEIR_ROTATION = deepseek_v2.apply_rotary_emb


def rotated(q, k, angles):
    """DeepSeek-V2's rotation, for fp64 in fp64."""
    if q.dtype != torch.float64:
        return THEIR_ROTATION(q, k, angles)
    pairs = (each.unflatten(-1, (-1, 2)) for each in (q, k))
    turned = (torch.view_as_complex(each.contiguous()) * angles[:, None] for each in pairs)
    return tuple(torch.view_as_real(each).flatten(-2) for each in turned)


def exact(model, *, routers=True):
    """The model with norms, routers and DeepSeek-V2's rotation that compute in its own dtype."""
    if model.config.model_type == "deepseek_v2":
        deepseek_v2.apply_rotary_emb = rotated
        model.model.rotary_emb = Angles(model.model.rotary_emb)
    if model.config.model_type == "gemma2":  # its own has a softmax in fp32
        model.config._attn_implementation = "sdpa"
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__.startswith("Gemma") and "RMSNorm" in type(child).__name__:
                setattr(module, name, NormFromZero(child))
            elif type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
            elif type(child).__name__.lower().endswith("topkrouter"):
                setattr(module, name, Router(child) if routers else child)
                model.set_experts_implementation("eager")  # their grouped product refuses fp64
    return model


def open_there(folder, dtype=torch.float64):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert {kind: list(names) for kind, names in report.items() if names} == {}
    return model.eval()


@torch.inference_mode()
def both_logits(theirs, ours):
    vocab_size = theirs.config.vocab_size
    tokens = torch.randint(vocab_size, (2, 24), generator=torch.Generator().manual_seed(2))
    expected = theirs(tokens).logits
    assert expected.std() > 0.3
    return ours(tokens), expected
