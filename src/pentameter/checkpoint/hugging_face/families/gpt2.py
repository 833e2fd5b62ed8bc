"""GPT-2."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.family import ACTIVATIONS, AS_ABOVE, Family, Projections
from pentameter.checkpoint.hugging_face.rules import CONTEXT_BY_ITS_OLD_NAME

GPT2 = Family(
    label="GPT-2",
    architecture="GPT2LMHeadModel",
    written={
        "vocab_size": ("vocab_size", 50257),
        "context_length": ("n_positions", 1024),
        "n_layers": ("n_layer", 12),
        "attention.n_heads": ("n_head", 12),
        "d_model": ("n_embd", 768),
        "feed_forward.width": ("n_inner", None),
        "feed_forward.activation": ("activation_function", "gelu_new"),
        "tied_head": ("tie_word_embeddings", True),
        "dropout": ("resid_pdrop", 0.1),
        "attention.dropout": ("attn_pdrop", 0.1),
        "embedding_dropout": ("embd_pdrop", 0.1),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    },
    differs={
        "norm": ("layernorm", "GPT-2 has no RMSNorm"),
        "positions": ("learned", "GPT-2 learns its positions"),
        "rotary_fraction": (1.0, AS_ABOVE),
    },
    read={"attention.qkv_bias": True, "bias": True, "residual_init_scale": True},
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
)
