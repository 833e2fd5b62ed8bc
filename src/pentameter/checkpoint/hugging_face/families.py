"""The Hugging Face architectures ("families") that can be read and written, each a `Family` (in
`family.py`): its differences from a decoder like Llama.

Keys in config.json and their defaults are those in `transformers`' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pentameter.checkpoint.hugging_face.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from pentameter.checkpoint.hugging_face.expert_rules import (
    CHOSEN_BY_SCORE,
    EXPERTS_IN_EVERY_LAYER,
    LAYERS_WITH_EXPERTS,
    SCORES_MAY_SUM_TO_ONE,
    SCORES_SUM_TO_ONE,
    SHARED_EXPERT_WITH_A_GATE,
    SOFTMAX_OF_THE_CHOSEN,
)
from pentameter.checkpoint.hugging_face.family import (
    ACTIVATIONS,
    AS_ABOVE,
    NAMES,
    STACKED,
    Family,
    Projections,
)
from pentameter.checkpoint.hugging_face.packed_experts import PACKED_EXPERTS
from pentameter.checkpoint.hugging_face.rotary_rules import (
    PART_OF_A_HEAD_TURNS,
    WHOLE_HEADS_TURN,
    WHOLE_HEADS_TURN_BY_YARN,
    WHOLE_HEADS_TURN_SLOWLY,
)
from pentameter.checkpoint.hugging_face.rules import (
    ALTERNATING_WINDOWS,
    CONTEXT_BY_ITS_OLD_NAME,
    EVERY_OTHER_WITH_A_WINDOW,
    HEADS_DIVIDE_WIDTH,
    LAYERS_WITH_A_WINDOW,
    ONE_SWITCH_FOR_BIASES,
    ONE_SWITCH_FOR_WINDOWS,
)


def _with_defaults(
    written: Mapping[str, tuple[str, Any]], **defaults: Any
) -> dict[str, tuple[str, Any]]:
    """Return a copy of a family's `written` table (pentameter key → key in config.json and its
    default there), with other config.json defaults for the pentameter keys given."""
    changed = {key: (written[key][0], default) for key, default in defaults.items()}
    return {**written, **changed}


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
_OF_QWEN = _with_defaults(
    _OF_LLAMA, vocab_size=151936, context_length=32768, d_ff=22016, n_kv_heads=32
)
_OF_EXPERTS = {
    **{key: entry for key, entry in _OF_LLAMA.items() if key != "d_ff"},
    "n_experts": ("num_experts", 64),
    "experts_per_token": ("num_experts_per_tok", 8),
    "d_expert": ("intermediate_size", 2048),
}
"""Entries for families with experts in every layer."""
_OF_QWEN_EXPERTS = {
    **_with_defaults(_OF_QWEN, n_layers=24, d_model=2048, d_ff=6144, n_kv_heads=4),
    "n_experts": ("num_experts", 128),
    "experts_per_token": ("num_experts_per_tok", 8),
    "d_expert": ("moe_intermediate_size", 768),
}
"""Entries for families with experts beside layers that have one feed-forward layer, of another
width."""
_OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
_ONE_WINDOW = (None, "it has its window in every layer")
_BIASED = {
    "attention_bias": (
        False,
        "the projections of attention would have a bias and those of the feed-forward layer none; "
        "here they have one both or neither",
    )
}
_ONE_FOR_BIASES = (
    True,
    "the experts would have biases and attention none; here they have them both or neither",
)

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
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
        differs={
            "norm": ("layernorm", "GPT-2 has no RMSNorm"),
            "positions": ("learned", "GPT-2 learns its positions"),
            "rotary_fraction": (1.0, AS_ABOVE),
        },
        read={"qkv_bias": True, "bias": True, "residual_init_scale": True},
        not_ours={
            "scale_attn_weights": (True, "attention here is always scaled by 1/√(head size)"),
            "scale_attn_by_inverse_layer_idx": (
                False,
                "attention here is scaled alike in every layer",
            ),
            "reorder_and_upcast_attn": (
                False,
                "attention here is computed in the step's own precision",
            ),
            "add_cross_attention": (False, "there is no encoder to attend to"),
        },
        activations=ACTIVATIONS,
        body="transformer.",
        layers="h.",
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
        rules=(CONTEXT_BY_ITS_OLD_NAME,),
        transposed=True,
        passed_over=r"h\.\d+\.attn\.(bias|masked_bias)",  # causal masks
    ),
    "llama": Family(
        label="Llama",
        architecture="LlamaForCausalLM",
        written=_OF_LLAMA,
        rules=(WHOLE_HEADS_TURN, ONE_SWITCH_FOR_BIASES, HEADS_DIVIDE_WIDTH),
    ),
    "mistral": Family(
        label="Mistral",
        architecture="MistralForCausalLM",
        written={
            **_with_defaults(_OF_LLAMA, context_length=131072, d_ff=14336, n_kv_heads=8),
            "sliding_window": ("sliding_window", 4096),
        },
        rules=(WHOLE_HEADS_TURN,),
        differs={"sliding_window_pattern": _ONE_WINDOW},
        not_ours={"layer_types": _ONE_WINDOW},
    ),
    "qwen2": Family(
        label="Qwen 2",
        architecture="Qwen2ForCausalLM",
        written=_OF_QWEN,
        rules=(WHOLE_HEADS_TURN, LAYERS_WITH_A_WINDOW),
        differs={
            "qkv_bias": (True, "Qwen 2's queries, keys and values have biases"),
            "bias": (False, "Qwen 2 has no other biases"),
        },
    ),
    "qwen3": Family(
        label="Qwen 3",
        architecture="Qwen3ForCausalLM",
        written=_with_defaults(_OF_QWEN, head_size=128),
        rules=(WHOLE_HEADS_TURN, LAYERS_WITH_A_WINDOW),
        differs={"qk_norm": ("head", "Qwen 3 norms queries and keys head by head")},
        not_ours=_BIASED,
    ),
    "gpt_neox": Family(
        label="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        written={
            **_with_defaults(
                _SIZES,
                vocab_size=50432,
                n_layers=44,
                n_heads=64,
                d_model=6144,
                d_ff=24576,
                activation="gelu",
            ),
            "dropout": ("hidden_dropout", 0.0),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "parallel_residual": ("use_parallel_residual", True),
        },
        rules=(PART_OF_A_HEAD_TURNS,),
        differs={"norm": ("layernorm", "GPT-NeoX has no RMSNorm")},
        read={"qkv_bias": True, "bias": True},
        not_ours={
            "attention_bias": (
                True,
                "the feed-forward layer would have biases and attention none; here they have them "
                "both or neither",
            )
        },
        activations=ACTIVATIONS,
        body="gpt_neox.",
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
        passed_over=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    "olmo2": Family(
        label="OLMo 2",
        architecture="Olmo2ForCausalLM",
        written=_with_defaults(_OF_LLAMA, vocab_size=50304, norm_eps=1e-5),
        rules=(WHOLE_HEADS_TURN,),
        differs={
            "norm_position": ("output", "OLMo 2 normalises what each sub-layer gives"),
            "qk_norm": ("width", "OLMo 2 norms the queries and the keys of all heads together"),
        },
        not_ours=_BIASED,
        names={
            **NAMES,
            "attention_norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
    ),
    "qwen3_moe": Family(
        label="Qwen 3 MoE",
        architecture="Qwen3MoeForCausalLM",
        written=_OF_QWEN_EXPERTS,
        rules=(
            WHOLE_HEADS_TURN,
            ONE_SWITCH_FOR_WINDOWS,
            LAYERS_WITH_EXPERTS,
            SCORES_MAY_SUM_TO_ONE,
            CHOSEN_BY_SCORE,
        ),
        differs={
            "qk_norm": ("head", "Qwen 3 MoE norms queries and keys head by head"),
            "sliding_window_pattern": _ONE_WINDOW,
        },
        not_ours={**_BIASED, "layer_types": _ONE_WINDOW},
        other_names=_OTHER_NAMES,
        stacked=STACKED,
    ),
    "mixtral": Family(
        label="Mixtral",
        architecture="MixtralForCausalLM",
        written={
            **_with_defaults(
                _OF_EXPERTS,
                context_length=131072,
                n_kv_heads=8,
                d_expert=14336,
                experts_per_token=2,
                norm_eps=1e-5,
            ),
            "n_experts": ("num_local_experts", 8),
            "sliding_window": ("sliding_window", None),
        },
        rules=(
            WHOLE_HEADS_TURN_SLOWLY,
            EXPERTS_IN_EVERY_LAYER,
            SCORES_SUM_TO_ONE,
            CHOSEN_BY_SCORE,
        ),
        differs={"sliding_window_pattern": _ONE_WINDOW},
        not_ours={
            "layer_types": _ONE_WINDOW,
            "router_jitter_noise": (0.0, "no noise is added to a router's input here"),
        },
        other_names=_OTHER_NAMES,
        names={
            **NAMES,
            "experts.router": "block_sparse_moe.gate",
            "experts.gate": "block_sparse_moe.experts.{expert}.w1",
            "experts.up": "block_sparse_moe.experts.{expert}.w3",
            "experts.down": "block_sparse_moe.experts.{expert}.w2",
        },
        stacked=STACKED,
    ),
    "olmoe": Family(
        label="OLMoE",
        architecture="OlmoeForCausalLM",
        written={
            key: entry
            for key, entry in _with_defaults(
                _OF_EXPERTS,
                vocab_size=50304,
                context_length=4096,
                n_layers=16,
                n_heads=16,
                d_model=2048,
                norm_eps=1e-5,
            ).items()
            if key != "head_size"
        },
        rules=(
            WHOLE_HEADS_TURN,
            EXPERTS_IN_EVERY_LAYER,
            SCORES_MAY_SUM_TO_ONE,
            CHOSEN_BY_SCORE,
        ),
        differs={"qk_norm": ("width", "OLMoE norms queries and keys of all heads together")},
        not_ours={
            **_BIASED,
            "clip_qkv": (None, "queries, keys and values are not clipped here"),
        },
        other_names=_OTHER_NAMES,
        stacked=STACKED,
    ),
    "qwen2_moe": Family(
        label="Qwen 2 MoE",
        architecture="Qwen2MoeForCausalLM",
        written={
            **_with_defaults(
                _OF_QWEN_EXPERTS,
                n_heads=16,
                n_kv_heads=16,
                d_ff=5632,
                d_expert=1408,
                n_experts=60,
                experts_per_token=4,
            ),
            "qkv_bias": ("qkv_bias", True),
        },
        rules=(
            WHOLE_HEADS_TURN,
            EVERY_OTHER_WITH_A_WINDOW,
            LAYERS_WITH_EXPERTS,
            SHARED_EXPERT_WITH_A_GATE,
            SCORES_MAY_SUM_TO_ONE,
            CHOSEN_BY_SCORE,
        ),
        other_names=_OTHER_NAMES,
        stacked=STACKED,
    ),
    "gpt_oss": Family(
        label="gpt-oss",
        architecture="GptOssForCausalLM",
        written={
            **_with_defaults(
                _OF_EXPERTS,
                vocab_size=201088,
                context_length=131072,
                n_layers=36,
                n_heads=64,
                n_kv_heads=8,
                d_model=2880,
                head_size=64,
                norm_eps=1e-5,
                experts_per_token=4,
                d_expert=2880,
            ),
            "n_experts": ("num_local_experts", 128),
            "swiglu_alpha": ("swiglu_alpha", 1.702),
            "swiglu_limit": ("swiglu_limit", 7.0),
        },
        rules=(
            WHOLE_HEADS_TURN_BY_YARN,
            ALTERNATING_WINDOWS,
            EXPERTS_IN_EVERY_LAYER,
            SOFTMAX_OF_THE_CHOSEN,
            CHOSEN_BY_SCORE,
        ),
        differs={"attention_sinks": (True, "gpt-oss has a sink in every head")},
        read={"qkv_bias": True, "bias": True, "router_bias": True},
        not_ours={"attention_bias": _ONE_FOR_BIASES},
        activations={"silu": "swiglu_clamped"},
        other_names=_OTHER_NAMES,
        names={
            **{key: name.replace(".{expert}", "") for key, name in NAMES.items()},
            "attention.sinks": "self_attn.sinks",
            "experts.router": "mlp.router",
        },
        packing=PACKED_EXPERTS,
        quantizations=("mxfp4",),
    ),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}
"""Keyed by `model_type` in config.json. If several can express a model, the first is written."""

NOT_OURS: Mapping[str, tuple[Any, str]] = {
    "pruned_heads": ({}, "every layer here has all of its heads"),
}
"""Entries that every family has in addition to its own `not_ours`."""
