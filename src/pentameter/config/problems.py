"""What is wrong with a configuration, one sentence per problem: path, value, reason, way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from pentameter.config.fields import leaves, sections
from pentameter.config.section import ABSENT

FAMILIAR = {
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
    "block_size": "model.context_length",
    "sequence_length": "model.context_length",
    "max_iters": "train.steps",
    "max_steps": "train.steps",
    "lr": "optimizer.learning_rate",
    "min_lr": "schedule.min_learning_rate",
    "lr_decay_iters": "schedule.decay_steps",
    "warmup_iters": "schedule.warmup_steps",
    "grad_clip": "optimizer.clip_norm",
    "dtype": "train.precision",
    "dataset": "data.corpus",
    "gradient_accumulation_steps": "train.micro_batch_size",
}
"""Other programs' names for our keys, as nanoGPT and Hugging Face users type them."""

LONGEST_VALUE_SHOWN = 80


def problems(error: ValidationError, asked: dict[str, Any]) -> list[str]:
    """One sentence for each thing pydantic refused in `asked`, without pydantic's own words."""
    found: dict[str, None] = {}  # an ordered set: a union reports each of its options
    for detail in error.errors(include_url=False, include_input=False):
        found[_problem(detail, asked)] = None
    return list(found)


def _problem(detail: Any, asked: dict[str, Any]) -> str:
    path = _known_path(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return unknown_key(".".join(str(part) for part in detail["loc"]))
    if path in leaves():
        return refused(path, _at(asked, path))
    if detail["type"] == "value_error":  # our own validators name their paths
        return str(detail["ctx"]["error"])
    return f"{path}={shown(_at(asked, path))} must be a section: {_keys(path)}"


def refused(path: str, value: Any) -> str:
    """The sentence for a leaf whose value is of the wrong kind or out of bounds."""
    leaf = leaves()[path]
    sentence = f"{path}={shown(value)} must be {leaf.expected}"
    if isinstance(value, str) and leaf.expected.startswith("one of "):
        near = nearest(value, leaf.expected.removeprefix("one of ").split(", "))
        sentence += f"; did you mean {near}?" if near else ""
    return sentence


def unknown_key(path: str) -> str:
    """The sentence for a path that the schema does not have, with the nearest that it has."""
    path = shortened(printable(path))
    section = path.rpartition(".")[0]
    if path in sections():
        return f"{path} is a section, not a value; it has {_keys(path)}"
    if section in leaves():
        return f"{path} is no key: {section} is a value, not a section"
    near = _nearest_path(path)
    if near:
        return f"{path} is no key; did you mean {near}?"
    section = section if section in sections() else ""
    return f"{path} is no key; {section or 'the top'} has {_keys(section)}"


def _nearest_path(path: str) -> str | None:
    section, _, key = path.rpartition(".")
    if key in FAMILIAR:
        return FAMILIAR[key]
    known = sections().get(section)
    inside = {k: f"{section}.{k}".lstrip(".") for k in (known.model_fields if known else ())}
    anywhere = {p.rpartition(".")[2]: p for p in reversed(leaves())}
    for candidates in (inside, anywhere):
        near = nearest(key, candidates)
        if near:
            return candidates[near]
    return nearest(path, leaves())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The member of `known` that `word` was probably meant to be, if any."""
    matches = difflib.get_close_matches(word[:LONGEST_VALUE_SHOWN], list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def shown(value: Any) -> str:
    """`value` as an error shows it: TOML-like, printable, short."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an integer of {value.bit_length()} bits"
    return shortened(printable(text))


def printable(text: str) -> str:
    """`text` with what a terminal cannot show (control characters, lone surrogates) escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def shortened(text: str) -> str:
    """`text`, cut where it would fill the screen."""
    return text if len(text) <= LONGEST_VALUE_SHOWN else text[: LONGEST_VALUE_SHOWN - 1] + "…"


def _known_path(location: tuple[int | str, ...]) -> str:
    """The longest part of pydantic's location that is a path of the schema."""
    parts = [str(part) for part in location]
    for n_parts in range(len(parts), 0, -1):
        path = ".".join(parts[:n_parts])
        if path in leaves() or path in sections():
            return path
    return ""


def _at(asked: dict[str, Any], path: str) -> Any:
    value: Any = asked
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _keys(section: str) -> str:
    return ", ".join(sections()[section].model_fields)
