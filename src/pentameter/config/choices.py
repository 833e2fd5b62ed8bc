"""Literal tables of what a key's value means, one for each fact that several modules ask for.

A value that a table or a `match` has no entry for is refused by name. With an `else` for the last
one known, a new value of the schema would silently compute as an old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never, NoReturn, TypeVar

from pentameter.errors import ConfigError

Entry = TypeVar("Entry")


def look_up(table: Mapping[Any, Entry], value: object, key: str, place: str) -> Entry:
    """The entry of `table` for `value`, which the configuration has at the dotted path `key`.

    Raises ConfigError, naming both and the `place` whose table it is, where there is none.
    """
    if value not in table:
        known = ", ".join(map(str, table))
        raise ConfigError(f"{key}={value!r} is not known to {place}; possible there: {known}")
    return table[value]


def refuse_unknown(value: Never, key: str, place: str) -> NoReturn:
    """Raise ConfigError for a `value` that no case of a `match` names.

    Its type lets mypy find a `match` that a new value of the schema is missing from.
    """
    raise ConfigError(f"{key}={value!r} is not known to {place}; choose another value")


DECAY_KEYS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": ("decay_steps",),
    "linear": ("decay_steps",),
    "wsd": ("decay_steps", "cooldown_steps"),
    "step": ("decay_interval",),
}
"""`schedule.name` → the keys that say when its rate falls. Those with `decay_steps` fall to
`min_learning_rate`."""

MOMENTUM: Mapping[str, float | None] = {"adamw": None, "adam": None, "sgd": 0.0, "muon": 0.95}
"""`optimizer.name` → its momentum where none is set (Muon's: Jordan et al. 2024); None for a rule
that does not read `optimizer.momentum`."""

TAKES_SEVERAL_STAGES = {
    "gpipe": False,
    "1f1b": False,
    "interleaved": True,
    "zero-bubble": True,
    "zero-bubble-v": True,
}
"""`parallel.schedule` → whether a process may hold several stages of it."""

SPLITS_BACKWARD = {
    "gpipe": False,
    "1f1b": False,
    "interleaved": False,
    "zero-bubble": True,
    "zero-bubble-v": True,
}
"""`parallel.schedule` → whether it computes the gradients of inputs and of weights apart."""

TURNS_BACK = {
    "gpipe": False,
    "1f1b": False,
    "interleaved": False,
    "zero-bubble": False,
    "zero-bubble-v": True,
}
"""`parallel.schedule` → whether its stages run through the processes and back, as a V, so that the
first process holds the last stage too."""

CHUNKS_OF_TIME = {"ring": 2, "all-to-all": 1}
"""`parallel.context_mode` → pieces of each sequence that a process computes."""

EXCHANGES_HEADS = {"ring": False, "all-to-all": True}
"""`parallel.context_mode` → whether processes exchange time for heads, which they divide then."""

ROWS_ARE_DOCUMENTS = {
    "random": False,
    "shuffled": False,
    "sequential": False,
    "columns": False,
    "documents": True,
}
"""`data.order` → whether a row is (the beginning of) one document."""

ENDS_RUN = {"stop": True, "warn": False}
"""`checkpoint.on_error` → whether a save that fails ends the run."""
