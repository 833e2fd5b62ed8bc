"""The families of Hugging Face that are read and written: each described once, as a literal table.

Keys of config.json and their defaults are those of `transformers`' configuration classes. What a
table cannot say (one of their keys that several of ours decide) is a `Rule` of `rules.py`. How the
tables are used is said in `mapping.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pentameter.checkpoint.hugging_face.rules import (
    HEADS_DIVIDE_WIDTH,
    LAYERS_WITH_A_WINDOW,
    ONE_SWITCH_FOR_BIASES,
    PART_OF_A_HEAD_TURNS,
    WHOLE_HEADS_TURN,
    Rule,
)
from pentameter.config.schema import RopeScalingConfig

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Theirs → ours; of several that are one function the first is written."""
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
"""The same, where the feed-forward layer has a gate."""


@dataclass(frozen=True)
class Projections:
    """Where queries, keys and values come from: their tensors, and the order of the rows.

    `apart`: three tensors, head by head. `parts`: one tensor, all queries, then all keys, then all
    values, rows (3, H, K). `heads`: one tensor, head by head, rows (H, 3, K).
    """

    names: tuple[str, ...]
    order: Literal["apart", "parts", "heads"]


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face beside ours. Every key of `[model]` stands in one of
    `written`, `fixed`, `not_needed` and the keys of `rules`."""

    label: str
    """Its name in sentences."""
    architecture: str
    """Its class of language models."""
    written: Mapping[str, tuple[str, Any]]
    """Our key → theirs in config.json, and its default."""
    fixed: Mapping[str, tuple[Any, str]]
    """Our key → the only value that it can express, and why another is refused."""
    not_needed: Mapping[str, str]
    """Our key that the weights alone express, or that says nothing of them, and why."""
    not_ours: Mapping[str, tuple[Any, str]]
    """Their key → its default, the only value that is read, and why another is refused."""
    activations: Mapping[str, str]
    body: str
    """Before every name of a tensor but the head's; absent in the model without a head."""
    layers: str
    """Before a layer's number."""
    head: str
    """The output projection's weight."""
    names: Mapping[str, str]
    """Our module → theirs, in a layer and outside."""
    projections: Projections
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Their key → another name that is read for it."""
    rules: tuple[Rule, ...] = ()
    read: Mapping[str, bool] = field(default_factory=dict)
    """Our key of `not_needed` → what it is of weights that are read."""
    transposed: bool = False
    """Whether the matrices of a layer are (n_in, n_out), the other way round than ours."""
    passed_over: str = r"layers\.\d+\.(self_attn|attention)\.rotary_emb\.inv_freq"
    """A pattern of tensors, without the `body`, that old versions stored and nobody needs."""


_VOCABULARY = "rows that pad the vocabulary are not written"
_BEGINNING = "how weights began that are written"
_TRAINING = "acts in training only, and theirs has no such dropout"
_AS_ABOVE = "as above"

_GPT2 = Family(
    label="GPT-2",
    architecture="GPT2LMHeadModel",
    written={
        "vocab_size": ("vocab_size", 50257),
        "context_length": ("n_positions", 1024),
        "n_layers": ("n_layer", 12),
        "n_heads": ("n_head", 12),
        "d_model": ("n_embd", 768),
        "d_ff": ("n_inner", None),
        "activation": ("activation_function", "gelu_new"),
        "tied_head": ("tie_word_embeddings", True),
        "dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "embedding_dropout": ("embd_pdrop", 0.1),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    },
    fixed={
        "norm_position": ("pre", "GPT-2 normalises before each sub-layer"),
        "norm": ("layernorm", "GPT-2 has no RMSNorm"),
        "positions": ("learned", "GPT-2 learns its positions"),
        "embedding_scale": (False, "GPT-2 does not scale its embeddings"),
        "head_bias": (False, "GPT-2's output projection has no bias"),
        "n_kv_heads": (None, "GPT-2's heads share no keys and values"),
        "head_size": (None, "GPT-2's heads are d_model / n_heads wide"),
        "qk_norm": (None, "GPT-2 norms no queries and keys"),
        "sliding_window": (None, "GPT-2 attends to the whole context"),
        "sliding_window_pattern": (None, _AS_ABOVE),
        "parallel_residual": (False, "GPT-2 adds one layer after the other"),
        "rope_theta": (10000.0, "GPT-2 turns no queries and keys"),
        "rotary_fraction": (1.0, _AS_ABOVE),
        "rope_scaling": (RopeScalingConfig(), _AS_ABOVE),
        "logit_softcap": (None, "GPT-2's logits are unbounded"),
    },
    not_needed={
        "vocab_multiple": _VOCABULARY,
        "qkv_bias": "biases that are not here are written as zeros",
        "bias": _AS_ABOVE,
        "init": _BEGINNING,
        "residual_init_scale": _AS_ABOVE,
    },
    not_ours={
        "scale_attn_weights": (True, "attention here is always scaled by 1/√(head size)"),
        "scale_attn_by_inverse_layer_idx": (False, "attention here is scaled alike in every layer"),
        "reorder_and_upcast_attn": (
            False,
            "attention here is computed in the step's own precision",
        ),
        "add_cross_attention": (False, "there is no encoder to attend to"),
    },
    activations=ACTIVATIONS,
    body="transformer.",
    layers="h.",
    head="lm_head.weight",
    names={
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "final_norm": "ln_f",
        "attention_norm": "ln_1",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    projections=Projections(("attn.c_attn",), "parts"),
    other_names={
        "n_positions": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
    },
    read={"qkv_bias": True, "bias": True, "residual_init_scale": True},
    transposed=True,
    passed_over=r"h\.\d+\.attn\.(bias|masked_bias)",  # causal masks
)

_SIZES = {
    "vocab_size": ("vocab_size", 32000),
    "context_length": ("max_position_embeddings", 2048),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "d_model": ("hidden_size", 4096),
    "d_ff": ("intermediate_size", 11008),
    "activation": ("hidden_act", "silu"),
    "tied_head": ("tie_word_embeddings", False),
    "attention_dropout": ("attention_dropout", 0.0),
    "init_std": ("initializer_range", 0.02),
}
_OF_LLAMA = {
    **_SIZES,
    "n_kv_heads": ("num_key_value_heads", None),
    "head_size": ("head_dim", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
_OF_QWEN = {
    **_OF_LLAMA,
    "vocab_size": ("vocab_size", 151936),
    "context_length": ("max_position_embeddings", 32768),
    "d_ff": ("intermediate_size", 22016),
    "n_kv_heads": ("num_key_value_heads", 32),
}


def _fixed(label: str, *without: str, **other: tuple[Any, str]) -> dict[str, tuple[Any, str]]:
    """What all decoders after Llama have in common."""
    common: dict[str, tuple[Any, str]] = {
        "norm_position": ("pre", f"{label} normalises before each sub-layer"),
        "norm": ("rmsnorm", f"{label} has RMSNorm only"),
        "positions": ("rotary", f"{label} turns queries and keys by their position"),
        "rotary_fraction": (1.0, f"{label} turns all channels of a head"),
        "embedding_scale": (False, f"{label} does not scale its embeddings"),
        "head_bias": (False, f"{label}'s output projection has no bias"),
        "qkv_bias": (False, f"{label} is written without biases"),
        "bias": (False, _AS_ABOVE),
        "qk_norm": (None, f"{label} norms no queries and keys"),
        "sliding_window": (None, f"{label} attends to the whole context"),
        "sliding_window_pattern": (None, _AS_ABOVE),
        "parallel_residual": (False, f"{label} adds one layer after the other"),
        "logit_softcap": (None, f"{label}'s logits are unbounded"),
    }
    return {key: value for key, value in (common | other).items() if key not in without}


_NOT_NEEDED = {
    "vocab_multiple": _VOCABULARY,
    "dropout": _TRAINING,
    "embedding_dropout": _AS_ABOVE,
    "init": _BEGINNING,
    "residual_init_scale": _AS_ABOVE,
}
_BIASED = {
    "attention_bias": (
        False,
        "the projections of attention would have a bias and those of the feed-forward layer none; "
        "here they have one both or neither",
    )
}
_NAMES = {
    "token_embedding": "embed_tokens",
    "final_norm": "norm",
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_APART = Projections(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "apart")
_TENSORS: dict[str, Any] = {
    "activations": GATED_ACTIVATIONS,
    "body": "model.",
    "layers": "layers.",
    "head": "lm_head.weight",
    "names": _NAMES,
    "projections": _APART,
}

FAMILIES: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "llama": Family(
        label="Llama",
        architecture="LlamaForCausalLM",
        written=_OF_LLAMA,
        fixed=_fixed("Llama", "qkv_bias", "bias"),
        not_needed=_NOT_NEEDED,
        not_ours={},
        rules=(WHOLE_HEADS_TURN, ONE_SWITCH_FOR_BIASES, HEADS_DIVIDE_WIDTH),
        **_TENSORS,
    ),
    "mistral": Family(
        label="Mistral",
        architecture="MistralForCausalLM",
        written={
            **_OF_LLAMA,
            "context_length": ("max_position_embeddings", 131072),
            "d_ff": ("intermediate_size", 14336),
            "n_kv_heads": ("num_key_value_heads", 8),
            "sliding_window": ("sliding_window", 4096),
        },
        fixed=_fixed(
            "Mistral",
            "sliding_window",
            sliding_window_pattern=(None, "Mistral has its window in every layer"),
        ),
        not_needed=_NOT_NEEDED,
        not_ours={"layer_types": (None, "Mistral has its window in every layer")},
        rules=(WHOLE_HEADS_TURN,),
        **_TENSORS,
    ),
    "qwen2": Family(
        label="Qwen 2",
        architecture="Qwen2ForCausalLM",
        written=_OF_QWEN,
        fixed=_fixed(
            "Qwen 2",
            "sliding_window",
            "sliding_window_pattern",
            qkv_bias=(True, "Qwen 2's queries, keys and values have biases"),
            bias=(False, "Qwen 2 has no other biases"),
        ),
        not_needed=_NOT_NEEDED,
        not_ours={},
        rules=(WHOLE_HEADS_TURN, LAYERS_WITH_A_WINDOW),
        **_TENSORS,
    ),
    "qwen3": Family(
        label="Qwen 3",
        architecture="Qwen3ForCausalLM",
        written={**_OF_QWEN, "head_size": ("head_dim", 128)},
        fixed=_fixed(
            "Qwen 3",
            "sliding_window",
            "sliding_window_pattern",
            qk_norm=("head", "Qwen 3 norms queries and keys head by head"),
        ),
        not_needed=_NOT_NEEDED,
        not_ours=_BIASED,
        rules=(WHOLE_HEADS_TURN, LAYERS_WITH_A_WINDOW),
        **_TENSORS,
    ),
    "gpt_neox": Family(
        label="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        written={
            **_SIZES,
            "vocab_size": ("vocab_size", 50432),
            "n_layers": ("num_hidden_layers", 44),
            "n_heads": ("num_attention_heads", 64),
            "d_model": ("hidden_size", 6144),
            "d_ff": ("intermediate_size", 24576),
            "activation": ("hidden_act", "gelu"),
            "dropout": ("hidden_dropout", 0.0),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "parallel_residual": ("use_parallel_residual", True),
        },
        fixed=_fixed(
            "GPT-NeoX",
            "rotary_fraction",
            "parallel_residual",
            "qkv_bias",
            "bias",
            norm=("layernorm", "GPT-NeoX has no RMSNorm"),
            n_kv_heads=(None, "GPT-NeoX's heads share no keys and values"),
            head_size=(None, "GPT-NeoX's heads are d_model / n_heads wide"),
        ),
        not_needed={
            "vocab_multiple": _VOCABULARY,
            "qkv_bias": "biases that are not here are written as zeros",
            "bias": _AS_ABOVE,
            "embedding_dropout": "acts in training only; theirs is hidden_dropout",
            "init": _BEGINNING,
            "residual_init_scale": _AS_ABOVE,
        },
        not_ours={
            "attention_bias": (
                True,
                "the feed-forward layer would have biases and attention none; here they have them "
                "both or neither",
            )
        },
        activations=ACTIVATIONS,
        body="gpt_neox.",
        layers="layers.",
        head="embed_out.weight",
        names={
            "token_embedding": "embed_in",
            "final_norm": "final_layer_norm",
            "attention_norm": "input_layernorm",
            "attention.out": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        projections=Projections(("attention.query_key_value",), "heads"),
        rules=(PART_OF_A_HEAD_TURNS,),
        read={"qkv_bias": True, "bias": True},
        passed_over=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    "olmo2": Family(
        label="OLMo 2",
        architecture="Olmo2ForCausalLM",
        written={
            **_OF_LLAMA,
            "vocab_size": ("vocab_size", 50304),
            "norm_eps": ("rms_norm_eps", 1e-5),
        },
        fixed=_fixed(
            "OLMo 2",
            norm_position=("output", "OLMo 2 normalises what each sub-layer gives"),
            qk_norm=("width", "OLMo 2 norms the queries and the keys of all heads together"),
        ),
        not_needed=_NOT_NEEDED,
        not_ours=_BIASED,
        rules=(WHOLE_HEADS_TURN,),
        **{
            **_TENSORS,
            "names": {
                **_NAMES,
                "attention_norm": "post_attention_layernorm",
                "mlp_norm": "post_feedforward_layernorm",
            },
        },
    ),
}
"""By `model_type` in config.json; of several that express a model the first is written."""

NOT_OURS: Mapping[str, tuple[Any, str]] = {
    "pruned_heads": ({}, "every layer here has all of its heads"),
    "quantization_config": (None, "quantised weights are not read; save it dequantised"),
}
"""`Family.not_ours` of every family."""
