"""Mixtral."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.expert_rules import (
    CHOSEN_BY_SCORE,
    EXPERTS_IN_EVERY_LAYER,
    SCORES_SUM_TO_ONE,
)
from pentameter.checkpoint.hugging_face.families.entries import (
    OF_EXPERTS,
    ONE_WINDOW,
    OTHER_NAMES,
    with_defaults,
)
from pentameter.checkpoint.hugging_face.family import NAMES, STACKED, Family
from pentameter.checkpoint.hugging_face.rotary_rules import WHOLE_HEADS_TURN_SLOWLY

MIXTRAL = Family(
    label="Mixtral",
    architecture="MixtralForCausalLM",
    written={
        **with_defaults(
            OF_EXPERTS,
            {
                "context_length": 131072,
                "attention.n_kv_heads": 8,
                "experts.width": 14336,
                "experts.per_token": 2,
                "norm_eps": 1e-5,
            },
        ),
        "experts.count": ("num_local_experts", 8),
        "attention.sliding_window": ("sliding_window", None),
    },
    rules=(
        WHOLE_HEADS_TURN_SLOWLY,
        EXPERTS_IN_EVERY_LAYER,
        SCORES_SUM_TO_ONE,
        CHOSEN_BY_SCORE,
    ),
    differs={"attention.sliding_window_pattern": ONE_WINDOW},
    not_ours={
        "layer_types": ONE_WINDOW,
        "router_jitter_noise": (0.0, "no noise is added to a router's input here"),
    },
    other_names=OTHER_NAMES,
    names={
        **NAMES,
        "experts.router": "block_sparse_moe.gate",
        "experts.gate": "block_sparse_moe.experts.{expert}.w1",
        "experts.up": "block_sparse_moe.experts.{expert}.w3",
        "experts.down": "block_sparse_moe.experts.{expert}.w2",
    },
    stacked=STACKED,
)
