"""Mistral."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.families.entries import OF_LLAMA, ONE_WINDOW, with_defaults
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.checkpoint.hugging_face.rotary_rules import WHOLE_HEADS_TURN

MISTRAL = Family(
    label="Mistral",
    architecture="MistralForCausalLM",
    written={
        **with_defaults(
            OF_LLAMA,
            {"context_length": 131072, "feed_forward.width": 14336, "attention.n_kv_heads": 8},
        ),
        "attention.sliding_window": ("sliding_window", 4096),
    },
    rules=(WHOLE_HEADS_TURN,),
    differs={"attention.sliding_window_pattern": ONE_WINDOW},
    not_ours={"layer_types": ONE_WINDOW},
)
