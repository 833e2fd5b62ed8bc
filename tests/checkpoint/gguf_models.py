"""Small random models of each family that llama.cpp knows, and texts, for tests of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.schema import Config
from pentameter.config.tables import packaged_table
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.model.gpt import build_model

TEXTS = (
    "Once upon a time, there was a house with 1,234 windows; it's what they'd said.",
    "Über die Brücke gehen vierzig Männer, und keiner schaut zurück.",
    "L'été, à Noël : où est-ce qu'on va ?",
    "Жили-были старик со старухой у самого синего моря.",
    "很久很久以前，有一个王国。",
    "むかしむかし、あるところにおじいさんがいました。",
    "옛날 옛적에 한 마을에 나무꾼이 살았습니다.",
    "كان يا ما كان في قديم الزمان",
    "एक समय की बात है, एक राजा था।",
    "กาลครั้งหนึ่งนานมาแล้ว",
    "def f(x):\n\treturn {'a': x**2}  # 😀\n\n\n    end   \r\n",
)
"""Texts in ten languages, and a program."""
RULES = packaged_table("checkpoint/gguf/pre_tokenizers.toml")["rules"]
"""How byte-level tokenizers split text, as llama.cpp knows it."""
BPE = train_bpe([text * 3 for text in TEXTS], 420)

GATED = {"activation": "swiglu", "width": 96}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "bias": False,
    "feed_forward": GATED,
    "attention": {"n_heads": 4, "n_kv_heads": 2},
}
NEOX: dict[str, Any] = {
    "norm": "layernorm",
    "positions": "rotary",
    "bias": True,
    "rotary_fraction": 0.5,
    "attention": {"n_heads": 4, "qkv_bias": True},
    "feed_forward": {"activation": "gelu_tanh"},
}
EXPERTS = {"count": 4, "per_token": 2, "width": 32}
GEMMA3 = {
    **LLAMA,
    "n_layers": 7,
    "norm_position": "both",
    "embedding_scale": True,
    "window_rope_theta": 1000.0,
    "feed_forward": {"activation": "geglu_tanh", "width": 96},
    "attention": {
        **LLAMA["attention"],
        "qk_norm": "head",
        "sliding_window": 7,
        "sliding_window_pattern": 6,
    },
}
LATENT = {
    "type": "latent",
    "n_heads": 4,
    "head_size": 16,
    "rope_head_size": 8,
    "v_head_size": 12,
    "kv_rank": 20,
    "q_rank": 24,
}


def longer(**scaling: Any) -> dict[str, Any]:
    """A Llama with a longer context than it began with."""
    return {**LLAMA, "rope_scaling": {"factor": 4.0, **scaling}}


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "bias": True,
        "attention": {"n_heads": 4, "qkv_bias": True},
        "feed_forward": {"activation": "gelu_tanh"},
        "vocab_multiple": 64,
    },
    "llama": {**LLAMA, "tied_head": False},
    "llama, biases": {
        **LLAMA,
        "bias": True,
        "attention": {"n_heads": 4, "qkv_bias": True},
    },
    "llama, llama3": longer(type="llama3", original_context_length=16),
    "llama, linear": longer(type="linear"),
    "llama, yarn": longer(type="yarn", original_context_length=16),
    "llama, yarn's factor": longer(type="yarn", original_context_length=16, attention_factor=1.3),
    "mistral": {**LLAMA, "attention": {**LLAMA["attention"], "sliding_window": 64}},
    "qwen2": {**LLAMA, "attention": {**LLAMA["attention"], "qkv_bias": True}},
    "qwen3": {**LLAMA, "attention": {**LLAMA["attention"], "qk_norm": "head", "head_size": 32}},
    "gpt_neox": {**NEOX, "parallel_residual": True, "tied_head": False},
    "gpt_neox, tied": NEOX,
    "olmo2": {
        **LLAMA,
        "norm_position": "output",
        "attention": {**LLAMA["attention"], "qk_norm": "width"},
    },
    "mixtral": {**LLAMA, "experts": EXPERTS, "router": {"renormalize": True}},
    "qwen3_moe": {
        **LLAMA,
        "attention": {**LLAMA["attention"], "qk_norm": "head"},
        "experts": EXPERTS,
        "router": {"renormalize": True},
    },
    "qwen2_moe": {
        **LLAMA,
        "attention": {**LLAMA["attention"], "qkv_bias": True},
        "experts": {**EXPERTS, "n_shared": 2, "shared_gate": True},
    },
    "llama, longrope": longer(type="longrope", original_context_length=256),
    "llama, longrope's factor": longer(
        type="longrope",
        original_context_length=16,
        attention_factor=1.3,
        short_factors=[1.0 + 0.1 * n for n in range(8)],
        long_factors=[1.0 + 0.5 * n for n in range(8)],
    ),
    "phi3": {**LLAMA, "rotary_fraction": 0.75, "attention": {**LLAMA["attention"]}},
    "phi3, longrope": {
        **longer(type="longrope", original_context_length=16),
        "rotary_fraction": 0.75,
    },
    "smollm3": {**LLAMA, "n_layers": 5, "nope_layers": 4},
    "gemma3_text": GEMMA3,
    "gemma3_text, linear": {**GEMMA3, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma3_text, softcap": {**GEMMA3, "logit_softcap": 3.0, "tied_head": False},
    "gpt_oss": {
        **LLAMA,
        "tied_head": False,
        "bias": True,
        "norm_eps": 1e-5,
        "feed_forward": {"activation": "swiglu_clamped"},
        "attention": {
            **LLAMA["attention"],
            "head_size": 32,
            "qkv_bias": True,
            "sinks": True,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
        },
        "experts": EXPERTS,
        "router": {"bias": True, "top_k_first": True},
    },
    "deepseek_v2": {
        **LLAMA,
        "norm_eps": 1e-6,
        "attention": LATENT,
        "n_layers": 3,
        "experts": {**EXPERTS, "dense_layers": 1, "n_shared": 2},
        "router": {"scale": 1.5},
    },
    "deepseek_v2, yarn": {
        **LLAMA,
        "norm_eps": 1e-6,
        "attention": LATENT,
        "experts": {**EXPERTS, "n_shared": 2},
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_context_length": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3": {
        **LLAMA,
        "norm_eps": 1e-6,
        "attention": LATENT,
        "experts": {**EXPERTS, "n_shared": 1},
        "router": {"score_function": "sigmoid", "renormalize": True, "balance": "bias"},
    },
    "deepseek_v3, groups": {
        **LLAMA,
        "norm_eps": 1e-6,
        "attention": LATENT,
        "experts": {"count": 9, "per_token": 3, "width": 32, "n_shared": 2},
        "router": {
            "score_function": "sigmoid",
            "renormalize": True,
            "balance": "bias",
            "scale": 2.5,
            "groups": 3,
            "open_groups": 2,
        },
    },
    "deepseek_v2, queries without a latent": {
        **LLAMA,
        "norm_eps": 1e-6,
        "n_layers": 26,  # by which llama.cpp knows them
        "d_model": 32,
        "attention": {**LATENT, "q_rank": None},
        "experts": {**EXPERTS, "n_shared": 2},
    },
    "olmoe": {
        **LLAMA,
        "attention": {"n_heads": 4, "qk_norm": "width"},
        "experts": EXPERTS,
    },
}


def random_model(folder: Path, tokenizer: Tokenizer = BPE, **model: Any) -> StoredModel:
    """A model whose parameters are all random, norms and biases too."""
    section = {
        "vocab_size": tokenizer.vocab_size,
        "context_length": 64,
        "n_layers": 2,
        "d_model": 64,
        "init_std": 0.25,
        **model,
    }
    tree = {"name": "a-model", "model": section, "data": {"corpus": "stdlib"}}
    config = Config.model_validate({**tree, "train": {"batch_size": 2}})
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) * (tensor.ndim == 1)
        for name, tensor in model_state(build_model(config.model, seed=5)).items()
    }
    return StoredModel(folder, config, tokenizer, weights, (), None)


def sentencepiece_like(**changed: Any) -> LibraryTokenizer:
    """A tokenizer.json of SentencePiece's kind, trained on TEXTS: spaces are ▁, and tokens for
    bytes stand for unknown characters."""
    library: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    prepend = tokenizers.normalizers.Prepend("▁")
    replace = tokenizers.normalizers.Replace(" ", "▁")
    library.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False)
    library.train_from_iterator(TEXTS[:5] * 2, trainer)
    content = json.loads(library.to_str())
    extra = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: number for number, token in enumerate([*extra, *content["model"]["vocab"]])}
    pairs = [
        (token[:cut], token[cut:])
        for token in content["model"]["vocab"]
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    model = {
        "vocab": vocab,
        "merges": [list(pair) for pair in pairs],
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    added = [
        {"id": n, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for n, text in enumerate(extra[:3])
    ]  # fmt: skip
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    model |= changed.pop("model", {})
    parts = {"model": {**content["model"], **model}, "added_tokens": added, "decoder": decoder}
    return LibraryTokenizer({**content, **parts, **changed}, 2)


def byte_level(rule: dict[str, Any], **changed: Any) -> LibraryTokenizer:
    """A byte-level tokenizer.json that splits text by one of RULES, with GPT-2's kind of tokens."""
    steps: list[Any] = [
        {"type": "Digits", "individual_digits": True}
        if step == "digits"
        else {
            "type": "Split",
            "pattern": {"Regex": step},
            "behavior": "Isolated",
            "invert": False,
        }
        for step in rule["steps"]
    ]
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": rule.get("byte_level", False),
    }
    content = json.loads(BPE.to_tokenizer_json())
    content["model"]["ignore_merges"] = rule.get("ignore_merges", False)
    pre = {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last
    return LibraryTokenizer({**content, "pre_tokenizer": pre, **changed}, BPE.end_of_text)
