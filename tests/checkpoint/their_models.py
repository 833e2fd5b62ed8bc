"""Random models as `transformers` saves them, with our BPE's files, for tests that compare."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from pentameter.checkpoint.hugging_face.families import FAMILIES
from pentameter.data.tokenizers.bpe import train_bpe

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
transformers = pytest.importorskip("transformers")

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
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6},
}
"""Sizes of families with experts: an odd number of them, and widths that their products take."""


def their_model(folder, family, options, dtype=torch.float64, **save):
    """A random model as `transformers` saves it, with our BPE's files beside it."""
    torch.manual_seed(3)
    architecture = FAMILIES[family].architecture
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    given = {**SIZES, **EXPERTS.get(family, {}), **options}
    config = kind(**copy.deepcopy(given))  # which it changes in place
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
    model.to(dtype).save_pretrained(folder, **save)
    transformers.GPT2Tokenizer(
        vocab=dict(BPE.vocabulary), merges=[tuple(merge) for merge in BPE.merges]
    ).save_pretrained(folder)
    return model


class Router(torch.nn.Module):
    """A router of theirs, in the model's own dtype."""

    def __init__(self, theirs):
        super().__init__()
        self.weight, self.n_chosen = theirs.weight, theirs.top_k
        self.bias = getattr(theirs, "bias", None)  # gpt-oss's
        self.sums_to_one = getattr(theirs, "norm_topk_prob", True)  # Mixtral's always

    def forward(self, x):
        logits = torch.nn.functional.linear(x.flatten(0, -2), self.weight, self.bias)
        scores, experts = logits.softmax(-1).topk(self.n_chosen)
        if self.sums_to_one:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores, experts


def exact(model, *, routers=True):
    """The model with norms, and routers, that compute in its own dtype."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
            elif type(child).__name__.endswith("TopKRouter"):
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
