"""Keys of `[model]` by the names that they had before it held tables.

Files, run folders, command lines and Python code that have the former names are read as ever;
what is written has the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pentameter.errors import ConfigError

Value = TypeVar("Value")

FORMER_KEYS: Mapping[str, str] = {
    "n_heads": "attention.n_heads",
    "n_kv_heads": "attention.n_kv_heads",
    "head_size": "attention.head_size",
    "attention": "attention.type",
    "kv_rank": "attention.kv_rank",
    "q_rank": "attention.q_rank",
    "rope_head_size": "attention.rope_head_size",
    "v_head_size": "attention.v_head_size",
    "qk_norm": "attention.qk_norm",
    "attention_sinks": "attention.sinks",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "qkv_bias": "attention.qkv_bias",
    "attention_dropout": "attention.dropout",
    "activation": "feed_forward.activation",
    "swiglu_alpha": "feed_forward.swiglu_alpha",
    "swiglu_limit": "feed_forward.swiglu_limit",
    "d_ff": "feed_forward.width",
    "dense_layers": "experts.dense_layers",
    "n_experts": "experts.count",
    "experts_per_token": "experts.per_token",
    "d_expert": "experts.width",
    "n_shared_experts": "experts.n_shared",
    "shared_expert_gate": "experts.shared_gate",
    "expert_capacity": "experts.capacity",
    "balance": "router.balance",
    "balance_rate": "router.balance_rate",
    "balance_weight": "router.balance_weight",
    "router": "router.score_function",
    "router_z_loss": "router.z_loss",
    "router_top_k_first": "router.top_k_first",
    "router_renormalize": "router.renormalize",
    "router_scale": "router.scale",
    "router_bias": "router.bias",
    "router_groups": "router.groups",
    "router_open_groups": "router.open_groups",
    "router_group_scores": "router.group_scores",
}
"""Former key in `[model]` → its path there now."""

TABLES = {path.partition(".")[0] for path in FORMER_KEYS.values()}
_PRESENT = {f"model.{former}": f"model.{path}" for former, path in FORMER_KEYS.items()}
_FORMER = {path: former for former, path in _PRESENT.items()}


def present_path(path: str) -> str:
    """Return the dotted path of the key that `path` names, perhaps by a former name."""
    return _PRESENT.get(path, path)


def former_path(path: str) -> str:
    """Return the dotted path that a key had first; the path itself if that never changed. Hashes of
    configurations are computed with it."""
    return _FORMER.get(path, path)


def with_present_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `[model]`, nested tables, with each former key moved to its present
    place. Raises ValueError for a key that is given by both its names."""
    former = {key: value for key, value in model.items() if _is_former(key, value)}
    present = {key: value for key, value in model.items() if key not in former}
    for key, value in former.items():
        table, _, name = FORMER_KEYS[key].partition(".")
        inside = present.get(table, {})
        if not isinstance(inside, Mapping) or name in inside:
            raise ValueError(_given_twice(f"model.{key}", f"model.{table}.{name}"))
        present[table] = {**inside, name: value}
    return present


def present_pairs(pairs: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """Return the (dotted path, value) pairs with present paths in place of former ones. Raises
    ConfigError for a key that is given by both its names."""
    given: dict[str, str] = {}
    for path, _ in pairs:
        present = present_path(path)
        if given.setdefault(present, path) != path:
            raise ConfigError(_given_twice(former_path(present), present))
    return [(present_path(path), value) for path, value in pairs]


def _is_former(key: str, value: object) -> bool:
    """Return whether `key` of `[model]`, with this `value`, is a former one. `attention` and
    `router` name tables now; they are former keys if their value is text, as it was then."""
    return key in FORMER_KEYS and (key not in TABLES or isinstance(value, str))


def _given_twice(former: str, present: str) -> str:
    """Return the refusal of a key that is given by its former and by its present path."""
    return f"{former} is a former name of {present}, and both are given; keep {present}"
