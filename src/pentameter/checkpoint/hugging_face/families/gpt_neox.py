"""GPT-NeoX."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.families.entries import SIZES, with_defaults
from pentameter.checkpoint.hugging_face.family import ACTIVATIONS, Family, Projections
from pentameter.checkpoint.hugging_face.rotary_rules import PART_OF_A_HEAD_TURNS

GPT_NEOX = Family(
    label="GPT-NeoX",
    architecture="GPTNeoXForCausalLM",
    written={
        **with_defaults(
            SIZES,
            {
                "vocab_size": 50432,
                "n_layers": 44,
                "attention.n_heads": 64,
                "d_model": 6144,
                "feed_forward.width": 24576,
                "feed_forward.activation": "gelu",
            },
        ),
        "dropout": ("hidden_dropout", 0.0),
        "norm_eps": ("layer_norm_eps", 1e-5),
        "parallel_residual": ("use_parallel_residual", True),
    },
    rules=(PART_OF_A_HEAD_TURNS,),
    differs={"norm": ("layernorm", "GPT-NeoX has no RMSNorm")},
    read={"attention.qkv_bias": True, "bias": True},
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
)
