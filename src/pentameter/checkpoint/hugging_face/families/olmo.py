"""OLMo 2 and OLMoE."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.expert_rules import (
    CHOSEN_BY_SCORE,
    EXPERTS_IN_EVERY_LAYER,
    SCORES_MAY_SUM_TO_ONE,
)
from pentameter.checkpoint.hugging_face.families.entries import (
    BIASED,
    OF_EXPERTS,
    OF_LLAMA,
    OTHER_NAMES,
    with_defaults,
)
from pentameter.checkpoint.hugging_face.family import NAMES, STACKED, Family
from pentameter.checkpoint.hugging_face.rotary_rules import WHOLE_HEADS_TURN

OLMO2 = Family(
    label="OLMo 2",
    architecture="Olmo2ForCausalLM",
    written=with_defaults(OF_LLAMA, {"vocab_size": 50304, "norm_eps": 1e-5}),
    rules=(WHOLE_HEADS_TURN,),
    differs={
        "norm_position": ("output", "OLMo 2 normalises what each sub-layer gives"),
        "attention.qk_norm": (
            "width",
            "OLMo 2 norms the queries and the keys of all heads together",
        ),
    },
    not_ours=BIASED,
    names={
        **NAMES,
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    },
)
OLMOE = Family(
    label="OLMoE",
    architecture="OlmoeForCausalLM",
    written={
        key: entry
        for key, entry in with_defaults(
            OF_EXPERTS,
            {
                "vocab_size": 50304,
                "context_length": 4096,
                "n_layers": 16,
                "attention.n_heads": 16,
                "d_model": 2048,
                "norm_eps": 1e-5,
            },
        ).items()
        if key != "attention.head_size"
    },
    rules=(
        WHOLE_HEADS_TURN,
        EXPERTS_IN_EVERY_LAYER,
        SCORES_MAY_SUM_TO_ONE,
        CHOSEN_BY_SCORE,
    ),
    differs={"attention.qk_norm": ("width", "OLMoE norms queries and keys of all heads together")},
    not_ours={
        **BIASED,
        "clip_qkv": (None, "queries, keys and values are not clipped here"),
    },
    other_names=OTHER_NAMES,
    stacked=STACKED,
)
