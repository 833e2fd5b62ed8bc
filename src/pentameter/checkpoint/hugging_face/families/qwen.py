"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.expert_rules import (
    CHOSEN_BY_SCORE,
    LAYERS_WITH_EXPERTS,
    SCORES_MAY_SUM_TO_ONE,
    SHARED_EXPERT_WITH_A_GATE,
)
from pentameter.checkpoint.hugging_face.families.entries import (
    BIASED,
    OF_LLAMA,
    ONE_WINDOW,
    OTHER_NAMES,
    with_defaults,
)
from pentameter.checkpoint.hugging_face.family import STACKED, Family
from pentameter.checkpoint.hugging_face.rotary_rules import WHOLE_HEADS_TURN
from pentameter.checkpoint.hugging_face.rules import (
    EVERY_OTHER_WITH_A_WINDOW,
    LAYERS_WITH_A_WINDOW,
    ONE_SWITCH_FOR_WINDOWS,
)

_OF_QWEN = with_defaults(
    OF_LLAMA,
    {
        "vocab_size": 151936,
        "context_length": 32768,
        "feed_forward.width": 22016,
        "attention.n_kv_heads": 32,
    },
)
_OF_EXPERTS_BESIDE = {
    **with_defaults(
        _OF_QWEN,
        {"n_layers": 24, "d_model": 2048, "feed_forward.width": 6144, "attention.n_kv_heads": 4},
    ),
    "experts.count": ("num_experts", 128),
    "experts.per_token": ("num_experts_per_tok", 8),
    "experts.width": ("moe_intermediate_size", 768),
}
"""Entries for families with experts beside layers that have one feed-forward layer, of another
width."""
QWEN2 = Family(
    label="Qwen 2",
    architecture="Qwen2ForCausalLM",
    written=_OF_QWEN,
    rules=(WHOLE_HEADS_TURN, LAYERS_WITH_A_WINDOW),
    differs={
        "attention.qkv_bias": (True, "Qwen 2's queries, keys and values have biases"),
        "bias": (False, "Qwen 2 has no other biases"),
    },
)
QWEN3 = Family(
    label="Qwen 3",
    architecture="Qwen3ForCausalLM",
    written=with_defaults(_OF_QWEN, {"attention.head_size": 128}),
    rules=(WHOLE_HEADS_TURN, LAYERS_WITH_A_WINDOW),
    differs={"attention.qk_norm": ("head", "Qwen 3 norms queries and keys head by head")},
    not_ours=BIASED,
)
QWEN2_MOE = Family(
    label="Qwen 2 MoE",
    architecture="Qwen2MoeForCausalLM",
    written={
        **with_defaults(
            _OF_EXPERTS_BESIDE,
            {
                "attention.n_heads": 16,
                "attention.n_kv_heads": 16,
                "feed_forward.width": 5632,
                "experts.width": 1408,
                "experts.count": 60,
                "experts.per_token": 4,
            },
        ),
        "attention.qkv_bias": ("qkv_bias", True),
    },
    rules=(
        WHOLE_HEADS_TURN,
        EVERY_OTHER_WITH_A_WINDOW,
        LAYERS_WITH_EXPERTS,
        SHARED_EXPERT_WITH_A_GATE,
        SCORES_MAY_SUM_TO_ONE,
        CHOSEN_BY_SCORE,
    ),
    other_names=OTHER_NAMES,
    stacked=STACKED,
)
QWEN3_MOE = Family(
    label="Qwen 3 MoE",
    architecture="Qwen3MoeForCausalLM",
    written=_OF_EXPERTS_BESIDE,
    rules=(
        WHOLE_HEADS_TURN,
        ONE_SWITCH_FOR_WINDOWS,
        LAYERS_WITH_EXPERTS,
        SCORES_MAY_SUM_TO_ONE,
        CHOSEN_BY_SCORE,
    ),
    differs={
        "attention.qk_norm": ("head", "Qwen 3 MoE norms queries and keys head by head"),
        "attention.sliding_window_pattern": ONE_WINDOW,
    },
    not_ours={**BIASED, "layer_types": ONE_WINDOW},
    other_names=OTHER_NAMES,
    stacked=STACKED,
)
