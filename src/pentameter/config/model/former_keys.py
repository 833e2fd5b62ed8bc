"""Keys of `[model]` by the names that they had before it held tables.

Files, run folders, command lines and Python code that have the former names are read as ever;
what is written has the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pentameter.config.tables import packaged_table
from pentameter.errors import ConfigError

Value = TypeVar("Value")

TABLES = {"attention", "feed_forward", "experts", "router"}
"""The tables in `[model]` that former keys are in now."""


@cache
def former_keys() -> Mapping[str, str]:
    """Return former key in `[model]` → its path there now."""
    return packaged_table("config/model/former_keys.toml")


@cache
def _former_paths() -> Mapping[str, str]:
    return {f"model.{path}": f"model.{former}" for former, path in former_keys().items()}


def present_path(path: str) -> str:
    """Return the dotted path of the key that `path` names, perhaps by a former name."""
    section, _, key = path.partition(".")
    return f"model.{former_keys()[key]}" if section == "model" and key in former_keys() else path


def former_path(path: str) -> str:
    """Return the dotted path that a key had first; the path itself if that never changed. Hashes of
    configurations are computed with it."""
    return _former_paths().get(path, path)


def with_present_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `[model]`, nested tables, with each former key moved to its present
    place. Raises ValueError for a key that is given by both its names."""
    former = {key: value for key, value in model.items() if _is_former(key, value)}
    present = {key: value for key, value in model.items() if key not in former}
    for key, value in former.items():
        table, _, name = former_keys()[key].partition(".")
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
    return key in former_keys() and (key not in TABLES or isinstance(value, str))


def _given_twice(former: str, present: str) -> str:
    """Return the refusal of a key that is given by its former and by its present path."""
    return f"{former} is a former name of {present}, and both are given; keep {present}"
