"""A hash that is equal for configurations that train alike, and the differences between two that do
not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pentameter.config.choices import DECAY_KEYS
from pentameter.config.fields import leaves, sections, values_of
from pentameter.config.messages import shown
from pentameter.config.model.former_keys import former_path
from pentameter.config.schema import Config
from pentameter.config.tables import packaged_table

ADDED = (
    *("model.window_rope_theta", "model.nope_layers"),
    *("model.attention.score_size", "model.attention.out_bias"),
    *("model.rope_scaling.short_factors", "model.rope_scaling.long_factors"),
    *("data.sources", "data.chat_template", "data.template_date", "data.form", "data.bad_rows"),
    *("schedule.start_step", "train.matmuls", "train.stream"),
)
"""Keys that runs of earlier versions lack. At its default such a key trains as they did, and does
not count."""


@cache
def not_the_training() -> Mapping[str, str]:
    """Return the dotted paths of the keys that a resumed run may change, and why, by
    `not_the_training.toml`, which names some sections as a whole."""
    found: dict[str, str] = {}
    for path, why in packaged_table("config/not_the_training.toml").items():
        section = sections().get(path)
        paths = [f"{path}.{key}" for key in section.model_fields] if section else [path]
        found |= dict.fromkeys(paths, why)
    return found


@cache
def _defaults_of_added() -> Mapping[str, Any]:
    """Return dotted path → default value of each key in ADDED."""
    parts = {path: path.rpartition(".") for path in ADDED}
    return {
        path: sections()[section].model_fields[key].default
        for path, (section, _, key) in parts.items()
    }


def defining_values(config: Config) -> dict[str, Any]:
    """Return dotted path → value for the settings on which the weights after a given step depend:
    all but those in `not_the_training` and [parallel], and keys without effect."""
    values = {
        path: value
        for path, value in values_of(config).items()
        if path not in not_the_training() and not path.startswith("parallel.")
    }
    schedule, used = config.schedule, config.schedule.decay_keys
    for key in {key for keys in DECAY_KEYS.values() for key in keys}.difference(used):
        del values[f"schedule.{key}"]
    if "decay_steps" in used and schedule.decay_steps is None:
        steps = config.train.steps
        values["schedule.decay_steps"] = None if steps is None else steps - schedule.start_step
    for path, default in _defaults_of_added().items():
        if values[path] == default:
            del values[path]
    if config.lora.rank is None:  # as before there were adapters
        values = {path: value for path, value in values.items() if not path.startswith("lora.")}
    guard = config.guard
    if guard.spike_factor is None:
        del values["guard.spike_factor"], values["guard.window"]
    if guard.rollback_interval is None:  # so many skips only say where the run ends
        del values["guard.rollback_interval"], values["guard.skips"]
    if config.optimizer.default_momentum is None:
        del values["optimizer.momentum"]
    return values


def config_hash(config: Config) -> str:
    """Return the sha256, in hex, over `defining_values`. A run may be resumed by any configuration
    with the same one. Keys enter by their former names (`former_path`), so that it does not change
    with names.

    Compare like with like: a configuration whose derived values were filled in (the vocabulary
    size, say) hashes differently from its source.
    """
    values = {former_path(path): value for path, value in defining_values(config).items()}
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def diff_configs(old: Config, new: Config) -> list[str]:
    """Return "path: old → new" for each defining value that differs; empty if and only if the
    hashes are equal."""
    before, after = defining_values(old), defining_values(new)
    return [
        f"{path}: {_side(before, path)} → {_side(after, path)}"
        for path in leaves()
        if (path in before) != (path in after)
        or _canonical(before.get(path)) != _canonical(after.get(path))
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _side(values: dict[str, Any], path: str) -> str:
    return shown(values[path]) if path in values else "unused"
