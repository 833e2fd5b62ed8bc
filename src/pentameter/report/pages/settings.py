"""A run's settings, and the ones that its user chose."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pentameter.config.fields import leaves, values_of
from pentameter.config.files.load import load_config, preset_names
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT
from pentameter.errors import ConfigError
from pentameter.planning.plan import make_plan

Settings = dict[str, Any]
"""Dotted path → value, None if absent."""

TEXT_KEYS = ("data.corpus", "data.path", "data.sources")

LEFT_OPEN = (None, "auto", "epoch")
"""Values in a preset that are replaced when a run is planned."""


@dataclass(frozen=True)
class Choices:
    """The preset nearest to a run's settings, and the settings that differ from it. A frozen
    record."""

    preset: str
    before: Settings
    """Dotted path → the preset's value, for each setting that differs, so that the user must have
    changed it."""


def default_of(path: str) -> Any:
    """Return a key's default in the form of config.toml (a tuple is a list). None if the key is
    unknown or has no default."""
    return _plain(leaves()[path].default) if path in leaves() else None


def settings(config: Mapping[str, Any]) -> Settings:
    """Return the values in config.toml by dotted path: known keys in the schema's order, then
    unknown ones."""
    found = dict(flatten(config))
    for path, leaf in leaves().items():
        if found.get(path) == ABSENT and ABSENT in leaf.expected.split():
            found[path] = None
    return {path: found[path] for path in (*leaves(), *found) if path in found}


def choices(found: Settings, rows_per_epoch: int | None) -> Choices | None:
    """Return the run's nearest preset, and the settings that differ from it; None if no key in
    `found` is known. config.toml does not record which preset it came from, so the nearest is the
    one with the fewest differing settings. `rows_per_epoch`, from plan.json (None if unknown),
    resolves a preset that counts epochs."""
    if not found.keys() & leaves().keys():
        return None
    known = [path for path in found if path in leaves() and path != "name"]

    def n_differences(config: Config) -> int:  # from what it states
        stated = values_of(config)
        return sum(_plain(stated[path]) not in (*LEFT_OPEN, found[path]) for path in known)

    preset = min(_presets(), key=n_differences)
    resolved = _resolved(preset, found, rows_per_epoch)
    on_its_text = _resolved(_with_data_of(preset, found), found, rows_per_epoch)
    differs = [
        path
        for path in known
        if found[path] != resolved.get(path)
        and (path in TEXT_KEYS or found[path] != on_its_text.get(path))
    ]
    # A value that the preset leaves open may follow from others that were chosen. The Plan fills
    # in nothing of [data].
    stated = values_of(preset)
    is_open = {
        path for path in differs if stated[path] in LEFT_OPEN and not path.startswith("data.")
    }
    chosen = {path: found[path] for path in differs if path not in is_open}
    implied = resolved
    with contextlib.suppress(ConfigError):  # of another version
        implied = _resolved(load_config(preset, chosen), found, rows_per_epoch)
        for path in is_open:  # a number in the place of `auto`, from which others may follow
            if stated[path] is not None and found[path] != implied.get(path):
                chosen[path] = found[path]
        implied = _resolved(load_config(preset, chosen), found, rows_per_epoch)
    return Choices(
        preset.name,
        {
            path: resolved.get(path)
            for path in differs
            if path in chosen or found[path] != implied.get(path)
        },
    )


@functools.cache
def _presets() -> tuple[Config, ...]:
    return tuple(load_config(name) for name in preset_names())


def _with_data_of(preset: Config, found: Settings) -> Config:
    """Return `preset` with the text of a run's settings `found`, so that settings that suit only
    the preset's own text get their defaults."""
    text = {path: found[path] for path in TEXT_KEYS if found.get(path) not in (None, ABSENT)}
    try:
        return load_config(preset, text)
    except ConfigError:  # two texts, in a damaged configuration
        return preset


def _resolved(config: Config, found: Settings, rows_per_epoch: int | None) -> Settings:
    """Return a configuration's settings with derived values filled in, as in a run folder, or as
    they are if it cannot be planned. The vocabulary size is taken from `found`, a run's
    settings."""
    vocab_size = found.get("model.vocab_size")
    with contextlib.suppress(ConfigError, TypeError):  # it does not divide, or is damaged
        config = make_plan(config, vocab_size, rows_per_epoch).portable_config
    return {path: _plain(value) for path, value in values_of(config).items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each value in nested tables. A table in a list has its index
    as key, `data.sources.0.path`. `prefix` is put before every path."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from flatten(dict(enumerate(value)), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
