"""gpt-oss."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.expert_rules import (
    CHOSEN_BY_SCORE,
    EXPERTS_IN_EVERY_LAYER,
    SOFTMAX_OF_THE_CHOSEN,
)
from pentameter.checkpoint.hugging_face.families.entries import (
    OF_EXPERTS,
    OTHER_NAMES,
    with_defaults,
)
from pentameter.checkpoint.hugging_face.family import NAMES, Family
from pentameter.checkpoint.hugging_face.packed_experts import PACKED_EXPERTS
from pentameter.checkpoint.hugging_face.rotary_rules import WHOLE_HEADS_TURN_BY_YARN
from pentameter.checkpoint.hugging_face.rules import ALTERNATING_WINDOWS

_ONE_FOR_BIASES = (
    True,
    "the experts would have biases and attention none; here they have them both or neither",
)

GPT_OSS = Family(
    label="gpt-oss",
    architecture="GptOssForCausalLM",
    written={
        **with_defaults(
            OF_EXPERTS,
            {
                "vocab_size": 201088,
                "context_length": 131072,
                "n_layers": 36,
                "attention.n_heads": 64,
                "attention.n_kv_heads": 8,
                "d_model": 2880,
                "attention.head_size": 64,
                "norm_eps": 1e-5,
                "experts.per_token": 4,
                "experts.width": 2880,
            },
        ),
        "experts.count": ("num_local_experts", 128),
        "feed_forward.swiglu_alpha": ("swiglu_alpha", 1.702),
        "feed_forward.swiglu_limit": ("swiglu_limit", 7.0),
    },
    rules=(
        WHOLE_HEADS_TURN_BY_YARN,
        ALTERNATING_WINDOWS,
        EXPERTS_IN_EVERY_LAYER,
        SOFTMAX_OF_THE_CHOSEN,
        CHOSEN_BY_SCORE,
    ),
    differs={"attention.sinks": (True, "gpt-oss has a sink in every head")},
    read={"attention.qkv_bias": True, "bias": True, "router.bias": True},
    not_ours={"attention_bias": _ONE_FOR_BIASES},
    activations={"silu": "swiglu_clamped"},
    other_names=OTHER_NAMES,
    names={
        **{key: name.replace(".{expert}", "") for key, name in NAMES.items()},
        "attention.sinks": "self_attn.sinks",
        "experts.router": "mlp.router",
    },
    packing=PACKED_EXPERTS,
    quantizations=("mxfp4",),
)
