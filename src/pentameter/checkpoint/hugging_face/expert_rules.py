"""Conversion rules for keys of experts that config.json expresses differently: which layers have
experts, how the chosen scores are normalised, how wide a shared expert is. The files in `families/`
assign rules to families."""

from __future__ import annotations

from functools import partial
from typing import Any

from pentameter.checkpoint.hugging_face.rules import Content, Rule
from pentameter.config.messages import shown
from pentameter.config.schema import ModelConfig


def layers_without_experts(model: ModelConfig) -> list[int]:
    """List the layers without experts. Raises ValueError if no layer has any."""
    if model.experts.count is None:
        raise ValueError("model.experts.count=none (all its models have experts)")
    return [layer for layer in range(model.n_layers) if not model.experts.are_in(layer)]


def _write_every_layer(model: ModelConfig) -> dict[str, Any]:
    if layers_without_experts(model):
        raise ValueError(
            f"model.experts.dense_layers={shown(model.experts.dense_layers)} (every layer has "
            "experts)"
        )
    return {}


EXPERTS_IN_EVERY_LAYER = Rule(
    ("feed_forward.width", "experts.dense_layers"),
    _write_every_layer,
    lambda _content, _section: {"feed_forward.width": None, "experts.dense_layers": 0},
)
"""Rule for a family whose every layer has experts. It refuses `model.experts.dense_layers`, and
reads `model.feed_forward.width`, which only layers without experts have, as None."""


def _read_layers(content: Content, section: Content) -> dict[str, Any]:
    """Return `experts.dense_layers`, the layers without experts, from `decoder_sparse_step` and
    `mlp_only_layers`. The value is their number if they are the first layers, else a tuple of their
    indices."""
    n_layers = section["n_layers"]
    step, listed = content.get("decoder_sparse_step", 1), content.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise ValueError(
            f"decoder_sparse_step={shown(step)} is not supported: every so many layers have "
            "experts, a whole number from 1"
        )
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise ValueError(f"mlp_only_layers={shown(listed)} is not a list of layers")
    dense = [layer for layer in range(n_layers) if layer in listed or (layer + 1) % step]
    are_first = dense == list(range(len(dense)))
    return {"experts.dense_layers": len(dense) if are_first else tuple(dense)}


LAYERS_WITH_EXPERTS = Rule(
    ("experts.dense_layers",),
    lambda model: {"decoder_sparse_step": 1, "mlp_only_layers": layers_without_experts(model)},
    _read_layers,
)
"""Rule for a family in which some layers may have one feed-forward layer instead of experts."""


def _sums_to_one(model: ModelConfig) -> bool:
    """Return True if a token's scores for its chosen experts sum to 1: they are divided by their
    sum, or are a softmax over the chosen logits alone, which is the same function."""
    return model.router.renormalize or model.router.top_k_first


SCORES_MAY_SUM_TO_ONE = Rule(
    ("router.renormalize", "router.top_k_first"),
    lambda model: {"norm_topk_prob": _sums_to_one(model)},
    lambda content, _section: {
        "router.renormalize": content.get("norm_topk_prob", False),
        "router.top_k_first": False,
    },
)
"""Rule for a family with the switch `norm_topk_prob`, which says whether a token's scores are
divided by their sum."""


def _write_summing_to_one(model: ModelConfig) -> dict[str, Any]:
    if not _sums_to_one(model):
        raise ValueError("model.router.renormalize=false (the chosen scores always sum to 1)")
    return {}


SCORES_SUM_TO_ONE = Rule(
    ("router.renormalize", "router.top_k_first"),
    _write_summing_to_one,
    lambda _content, _section: {"router.renormalize": True, "router.top_k_first": False},
)
"""Rule for a family in which a token's scores always sum to 1; it refuses a model in which they
need not."""

SOFTMAX_OF_THE_CHOSEN = Rule(
    SCORES_SUM_TO_ONE.keys,
    _write_summing_to_one,
    lambda _content, _section: {"router.renormalize": False, "router.top_k_first": True},
)
"""Rule like SCORES_SUM_TO_ONE, but read as a softmax of the chosen experts' logits, which is the
same function."""


def _write_expert_for_all(model: ModelConfig) -> dict[str, Any]:
    if not (model.experts.n_shared and model.experts.shared_gate):
        raise ValueError(
            f"model.experts.n_shared={model.experts.n_shared} beside model.experts.shared_gate="
            f"{shown(model.experts.shared_gate)} (it always has a shared expert, with a gate)"
        )
    return {"shared_expert_intermediate_size": model.experts.n_shared * model.expert_width}


def _read_expert_for_all(content: Content, section: Content) -> dict[str, Any]:
    """Return the number of shared experts: the width of all shared experts together ÷ the width of
    one other expert. Raises ValueError if that is not a whole number."""
    key, width = "shared_expert_intermediate_size", section["experts.width"]
    shared = content.get(key, 5632)
    if type(width) is not int or width < 1:
        return {"experts.n_shared": 1, "experts.shared_gate": True}  # the schema refuses the width
    if type(shared) is not int or shared < 1 or shared % width:
        raise ValueError(
            f"{key}={shown(shared)} beside moe_intermediate_size={width} is not supported: shared "
            "experts are as wide here as the others together are, so it must be a multiple"
        )
    return {"experts.n_shared": shared // width, "experts.shared_gate": True}


SHARED_EXPERT_WITH_A_GATE = Rule(
    ("experts.n_shared", "experts.shared_gate"), _write_expert_for_all, _read_expert_for_all
)
"""Rule for a family whose layers always have a shared expert, with a gate."""


def _refuse_bias_of_choice(model: ModelConfig) -> dict[str, Any]:
    if model.router.balance == "bias":
        raise ValueError(
            "model.router.balance='bias' (the experts are chosen by the scores alone, without the "
            "numbers that it adds)"
        )
    return {}


CHOSEN_BY_SCORE = Rule((), _refuse_bias_of_choice)
"""Rule that refuses `model.router.balance = "bias"`, the only way of balancing that also acts when
a trained model chooses experts."""


def _write_first_layers(model: ModelConfig) -> dict[str, Any]:
    dense = layers_without_experts(model)
    if dense != list(range(len(dense))):
        raise ValueError(
            f"model.experts.dense_layers={shown(model.experts.dense_layers)} (only its first "
            "layers may be without experts)"
        )
    return {"first_k_dense_replace": len(dense)}


FIRST_LAYERS_WITHOUT_EXPERTS = Rule((), _write_first_layers)
"""Rule that refuses a model in which other layers than its first ones have no experts."""


def _write_shared_experts(model: ModelConfig) -> dict[str, Any]:
    if not model.experts.n_shared:
        raise ValueError("model.experts.n_shared=0 (it always has shared experts)")
    return {"n_shared_experts": model.experts.n_shared}


ALWAYS_SHARED_EXPERTS = Rule((), _write_shared_experts)
"""Rule for a family that always has shared experts, without a gate."""


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
GROUPS_BY_THEIR_BEST = Rule(_KEYS_OF_GROUPS, _write_method, _read_method)
GROUPS_BY_THEIR_TWO_BEST = Rule(
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


NUMBER_CHOSEN_IS_GIVEN = Rule((), read=_read_number_chosen)
