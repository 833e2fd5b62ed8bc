"""Entries of config.json that several families share; keys and defaults are those in
`transformers`' configuration classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_defaults(
    written: Mapping[str, tuple[str, Any]], defaults: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return a copy of `written` (pentameter key → (key in config.json, default)) in which the
    pentameter keys in `defaults` have the default given there."""
    changed = {key: (written[key][0], default) for key, default in defaults.items()}
    return {**written, **changed}


SIZES = {
    "vocab_size": ("vocab_size", 32000),
    "context_length": ("max_position_embeddings", 2048),
    "n_layers": ("num_hidden_layers", 32),
    "attention.n_heads": ("num_attention_heads", 32),
    "d_model": ("hidden_size", 4096),
    "feed_forward.width": ("intermediate_size", 11008),
    "feed_forward.activation": ("hidden_act", "silu"),
    "tied_head": ("tie_word_embeddings", False),
    "attention.dropout": ("attention_dropout", 0.0),
    "init_std": ("initializer_range", 0.02),
}
OF_LLAMA = {
    **SIZES,
    "attention.n_kv_heads": ("num_key_value_heads", None),
    "attention.head_size": ("head_dim", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
OF_EXPERTS = {
    **{key: entry for key, entry in OF_LLAMA.items() if key != "feed_forward.width"},
    "experts.count": ("num_experts", 64),
    "experts.per_token": ("num_experts_per_tok", 8),
    "experts.width": ("intermediate_size", 2048),
}
"""Entries for families with experts in every layer."""
OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
ONE_WINDOW = (None, "it has its window in every layer")
BIASED = {
    "attention_bias": (
        False,
        "the projections of attention would have a bias and those of the feed-forward layer none; "
        "here they have one both or neither",
    )
}
