"""The families DeepSeek-V2 and DeepSeek-V3 of Hugging Face: latent attention, and experts in all
but the first layers. Keys in config.json and their defaults are those in `transformers`; some more
are DeepSeek's own, which `transformers` passes over."""

from __future__ import annotations

from functools import partial
from typing import Any

from pentameter.checkpoint.hugging_face.expert_rules import CHOSEN_BY_SCORE, layers_without_experts
from pentameter.checkpoint.hugging_face.families.entries import SIZES, with_defaults
from pentameter.checkpoint.hugging_face.family import NAMES, STACKED, Family, Projections
from pentameter.checkpoint.hugging_face.rotary_rules import LATENT_HEADS_TURN
from pentameter.checkpoint.hugging_face.rules import Content, Rule
from pentameter.config.messages import shown
from pentameter.config.schema import ModelConfig


def _write_first_layers(model: ModelConfig) -> dict[str, Any]:
    dense = layers_without_experts(model)
    if dense != list(range(len(dense))):
        raise ValueError(
            f"model.experts.dense_layers={shown(model.experts.dense_layers)} (only its first "
            "layers may be without experts)"
        )
    return {"first_k_dense_replace": len(dense)}


def _first_layers_without(default: int) -> Rule:
    """Return the rule for a family whose first layers may have no experts; `default` is their
    number if config.json does not give it."""
    return Rule(
        ("experts.dense_layers",),
        _write_first_layers,
        lambda content, _section: {
            "experts.dense_layers": content.get("first_k_dense_replace", default)
        },
    )


def _read_every_head(content: Content, section: Content) -> dict[str, Any]:
    n_heads, n_kv_heads = section["attention.n_heads"], content.get("num_key_value_heads")
    if n_kv_heads not in (None, n_heads):
        raise ValueError(
            f"num_key_value_heads={shown(n_kv_heads)} beside num_attention_heads={shown(n_heads)} "
            "is not supported: latent attention computes keys and values for each head"
        )
    return {"attention.n_kv_heads": None}


_EVERY_HEAD_HAS_KEYS = Rule(
    ("attention.n_kv_heads",),
    lambda model: {"num_key_value_heads": model.attention.n_heads},
    _read_every_head,
)
"""Rule for latent attention: all heads read one latent, but each computes its own keys and values
from it, so there is no choice of KV heads."""


def _write_experts_for_all(model: ModelConfig) -> dict[str, Any]:
    if not model.experts.n_shared:
        raise ValueError("model.experts.n_shared=0 (it always has shared experts)")
    return {"n_shared_experts": model.experts.n_shared}


def _experts_for_all(default: int) -> Rule:
    """Return the rule for a family that always has shared experts, without a gate; `default` is
    their number if config.json does not give it."""
    return Rule(
        ("experts.n_shared",),
        _write_experts_for_all,
        lambda content, _section: {"experts.n_shared": content.get("n_shared_experts", default)},
    )


def _write_groups(model: ModelConfig, *, n_scores: int) -> dict[str, Any]:
    """Return the entries of config.json for groups of experts. `n_scores`: the family ranks groups
    by the sum of this many of their highest scores. A single group means no groups."""
    if model.router.groups is not None and model.router.group_scores != n_scores:
        raise ValueError(
            f"model.router.group_scores={model.router.group_scores} (it compares groups by "
            f"{n_scores})"
        )
    return {"n_group": model.router.groups or 1, "topk_group": model.router.open_groups or 1}


def _read_groups(
    content: Content, _section: Content, *, n_scores: int, default: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Return the `[model]` keys for groups of experts from `n_group` and `topk_group`; `default`
    has the two values that they have if absent. `n_scores` is as for `_write_groups`. A single
    group means no groups."""
    n_groups, n_open = content.get("n_group", default[0]), content.get("topk_group", default[1])
    if n_groups == 1:
        return dict(_UNGROUPED)
    return {
        "router.groups": n_groups,
        "router.open_groups": n_open,
        "router.group_scores": n_scores,
    }


_UNGROUPED = {"router.groups": None, "router.open_groups": None, "router.group_scores": 2}
_METHODS = ("greedy", "group_limited_greedy")
"""Values of DeepSeek-V2's `topk_method`: experts are chosen from all, or from the best groups."""


def _write_method(model: ModelConfig) -> dict[str, Any]:
    method = _METHODS[model.router.groups is not None]
    return {"topk_method": method, **_write_groups(model, n_scores=1)}


def _read_method(content: Content, section: Content) -> dict[str, Any]:
    method = content.get("topk_method", "greedy")
    if method not in _METHODS:
        raise ValueError(
            f"topk_method={shown(method)} is not supported; possible: {', '.join(_METHODS)}"
        )
    if method == "greedy":
        return dict(_UNGROUPED)
    if content.get("n_group") is None:
        raise ValueError(f"topk_method={shown(method)} needs n_group, the number of groups")
    return _read_groups(content, section, n_scores=1, default=(None, None))


_KEYS_OF_GROUPS = tuple(_UNGROUPED)
_GROUPS_BY_THEIR_BEST = Rule(_KEYS_OF_GROUPS, _write_method, _read_method)
_GROUPS_BY_THEIR_TWO_BEST = Rule(
    _KEYS_OF_GROUPS,
    partial(_write_groups, n_scores=2),
    partial(_read_groups, n_scores=2, default=(8, 4)),
)


def _read_number_chosen(_content: Content, section: Content) -> dict[str, Any]:
    """Check that config.json says how many experts a token chooses, because DeepSeek-V2 has no
    default for it; else raise ValueError. Returns no keys."""
    if section["experts.per_token"] is None:
        raise ValueError("num_experts_per_tok is missing: the experts that a token is sent to")
    return {}


_NUMBER_CHOSEN_IS_GIVEN = Rule((), read=_read_number_chosen)

_NAMES = {
    **NAMES,
    "latent_attention_norm": "input_layernorm",
    "latent_attention.q_down": "self_attn.q_a_proj",
    "latent_attention.q_norm": "self_attn.q_a_layernorm",
    "latent_attention.kv_norm": "self_attn.kv_a_layernorm",
    "latent_attention.kv": "self_attn.kv_b_proj",
    "latent_attention.out": "self_attn.o_proj",
    "experts.router.balance": "mlp.gate.e_score_correction_bias",
    "experts.shared.gate": "mlp.shared_experts.gate_proj",
    "experts.shared.up": "mlp.shared_experts.up_proj",
    "experts.shared.down": "mlp.shared_experts.down_proj",
}
_PROJECTIONS = Projections(
    ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"), "latent"
)
_LATENT_NORMS = "norms of latents have 1e-6 whatever it says, and here all norms have the same"
_DIFFERS = {
    "attention.type": ("latent", "{} computes keys and values from a latent"),
    "norm_eps": (1e-6, "{}'s norms of latents have 1e-6"),
    "experts.shared_gate": (False, "{} has no gate on its shared experts"),
}
_NOT_OURS = {
    "rms_norm_eps": (1e-6, _LATENT_NORMS),
    "attention_bias": (False, "some of attention's projections would have a bias, others none"),
    "moe_layer_freq": (1, "every layer after the first ones has experts"),
}

DEEPSEEK_V2 = Family(
    label="DeepSeek-V2",
    architecture="DeepseekV2ForCausalLM",
    written={
        **with_defaults(SIZES, {"vocab_size": 102400}),
        "attention.head_size": ("qk_nope_head_dim", 128),
        "attention.rope_head_size": ("qk_rope_head_dim", 64),
        "attention.v_head_size": ("v_head_dim", 128),
        "attention.kv_rank": ("kv_lora_rank", 512),
        "attention.q_rank": ("q_lora_rank", 1536),
        "experts.count": ("n_routed_experts", 64),
        "experts.per_token": ("num_experts_per_tok", None),
        "experts.width": ("moe_intermediate_size", 1407),
        "router.scale": ("routed_scaling_factor", 1.0),
    },
    rules=(
        LATENT_HEADS_TURN,
        _EVERY_HEAD_HAS_KEYS,
        _NUMBER_CHOSEN_IS_GIVEN,
        _first_layers_without(0),
        _experts_for_all(2),
        _GROUPS_BY_THEIR_BEST,
        CHOSEN_BY_SCORE,
    ),
    differs={
        **_DIFFERS,
        "router.renormalize": (False, "{} does not divide the chosen scores by their sum"),
        "router.top_k_first": (False, "{} chooses by a softmax over all experts"),
    },
    not_ours={
        **_NOT_OURS,
        "mlp_bias": (False, "the experts would have no bias"),
        "scoring_func": ("softmax", "scores are a softmax in this family"),
        "norm_topk_prob": (
            False,
            "`transformers` leaves the chosen scores as they are, and DeepSeek's own program "
            "divides them by their sum",
        ),
    },
    other_names={"n_routed_experts": "num_experts"},
    names=_NAMES,
    projections=_PROJECTIONS,
    stacked=STACKED,
)

DEEPSEEK_V3 = Family(
    label="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    written={
        **with_defaults(
            DEEPSEEK_V2.written,
            {
                "vocab_size": 129280,
                "context_length": 4096,
                "n_layers": 61,
                "attention.n_heads": 128,
                "d_model": 7168,
                "feed_forward.width": 18432,
                "experts.count": 256,
                "experts.per_token": 8,
                "experts.width": 2048,
                "router.scale": 2.5,
            },
        ),
        "router.renormalize": ("norm_topk_prob", True),
    },
    rules=(
        LATENT_HEADS_TURN,
        _EVERY_HEAD_HAS_KEYS,
        _NUMBER_CHOSEN_IS_GIVEN,
        _first_layers_without(3),
        _experts_for_all(1),
        _GROUPS_BY_THEIR_TWO_BEST,
    ),
    differs={
        **_DIFFERS,
        "router.score_function": ("sigmoid", "{} scores experts by sigmoids"),
        "router.top_k_first": (False, "{} scores experts by sigmoids"),
    },
    read={"router.balance": "bias"},
    not_ours={
        **_NOT_OURS,
        "rope_interleave": (True, "rotated channels are pairs of neighbors in published weights"),
        "scoring_func": ("sigmoid", "scores are sigmoids in this family"),
        "topk_method": ("noaux_tc", "a bias is added to the scores by which experts are chosen"),
    },
    other_names={
        "n_routed_experts": "num_local_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    },
    names=_NAMES,
    projections=_PROJECTIONS,
    stacked=STACKED,
    extra_layers=("num_nextn_predict_layers", 1),
)
