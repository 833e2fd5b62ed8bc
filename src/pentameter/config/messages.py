"""Error messages that refuse a configuration, a sentence per problem: path, value, rule, remedy.

pydantic finds the problems; its own messages name no path, value or similar key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from pentameter.config.fields import Leaf, leaves, sections, tables_of, value_in
from pentameter.config.model.former_keys import former_keys
from pentameter.config.section import ABSENT
from pentameter.config.tables import packaged_table
from pentameter.errors import nearest, printable

FAMILIAR_VALUES = {"gpu": "cuda", "float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}
"""Other programs' names for our values."""

LONGEST_VALUE_SHOWN = 80

MOST_PROBLEMS = 10
"""Maximum sentences in one refusal. A file of another kind has any number of unknown keys, and
finding the nearest known one takes a while for each."""


def problems(
    error: ValidationError | None, asked: dict[str, Any], unknown: Iterable[str] = ()
) -> tuple[list[str], int]:
    """Return sentences about everything wrong in the nested dict `asked`, and the number of
    problems. `error` is pydantic's, None if it found nothing; `unknown` are dotted paths that the
    schema lacks. One sentence stands for all beyond MOST_PROBLEMS."""
    sayings = {path: partial(_unknown_key, path) for path in unknown}
    for detail in error.errors(include_url=False, include_input=False) if error else ():
        if detail["type"] == "extra_forbidden":
            path = ".".join(map(str, detail["loc"]))
            sayings.setdefault(path, partial(_unknown_key, path))
        else:
            path = _known_path(detail["loc"])  # once: a union reports each of its options
            sayings.setdefault(path, partial(_problem, detail, path, asked))
    said = [say() for say in itertools.islice(sayings.values(), MOST_PROBLEMS)]
    rest = len(sayings) - len(said)
    return [*said, f"and {rest:,} more"] if rest else said, len(sayings)


def _problem(detail: Any, path: str, asked: dict[str, Any]) -> str:
    """Return the sentence for one error that pydantic found (`detail`), at the dotted path `path`
    in the nested dict `asked`."""
    if path not in leaves() and detail["type"] == "value_error":
        return str(detail["ctx"]["error"])  # our own validators name their paths
    value = value_in(asked, path)
    inside = detail["loc"][path.count(".") + 1 :]
    if path in leaves() and (keys := tables_of(leaves()[path])) and isinstance(value, list | tuple):
        return _wrong_in_table(path, value, inside, keys)
    if path not in leaves():
        return f"{path}={shown(value)} must be a section: {_keys(path)}"
    leaf = leaves()[path]
    sentence = f"{path}={shown(value)} must be {leaf.expected}"
    if isinstance(value, str) and leaf.expected.startswith("one of "):
        possible = leaf.expected.removeprefix("one of ").split(", ")
        near = FAMILIAR_VALUES.get(value.lower())
        near = near if near in possible else nearest(value, possible)
        sentence += f"; did you mean {near}?" if near else ""
    return sentence


def _wrong_in_table(
    path: str, tables: Sequence[Any], inside: tuple[int | str, ...], keys: Mapping[str, Any]
) -> str:
    """Return the sentence for an error in `tables`, a list of tables at `path`. `inside` is the
    table's index and perhaps a key; `keys` maps each possible key to its JSON schema."""
    number, *rest = inside or (0,)
    path, table = f"{path}[{number}]", tables[int(number)]
    if not rest or not isinstance(table, dict):
        return f"{path}={shown(table)} must be a table of {', '.join(keys)}"
    key = str(rest[0])
    value, field = table.get(key), keys[key]
    expected = Leaf(key, field.get("anyOf", [field]), None, "").expected
    is_infinite = isinstance(value, float) and math.isinf(value)
    return f"{path}.{key}={shown(value)} must be {'finite, ' if is_infinite else ''}{expected}"


def _unknown_key(path: str) -> str:
    """Return the sentence for a dotted path that the schema lacks: it names the most similar key,
    or if there is none the keys that the section has."""
    path = shortened(printable(path))
    section = path.rpartition(".")[0]
    for leaf in leaves().values():  # of a table in a list, `data.sources.0.pth`
        if path.startswith(f"{leaf.path}.") and (keys := tables_of(leaf)):
            return f"{path} is no key; the tables of {leaf.path} have {', '.join(keys)}"
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
    familiar = packaged_table("config/familiar_keys.toml")
    if key in familiar:
        return str(familiar[key])
    known = sections().get(section)
    inside = {k: f"{section}.{k}".lstrip(".") for k in (known.model_fields if known else ())}
    if section == "model":
        inside |= {former: f"model.{present}" for former, present in former_keys().items()}
    if near := nearest(key, inside):
        return inside[near]
    by_key: dict[str, list[str]] = {}
    for leaf in leaves().values():
        by_key.setdefault(leaf.key, []).append(leaf.path)
    if near := nearest(key, by_key):
        return nearest(path, by_key[near]) or by_key[near][0]
    return nearest(path, leaves())


def shown(value: Any) -> str:
    """Return `value` as short, printable text for an error message, as in TOML; None as `none`.
    Long text is cut at LONGEST_VALUE_SHOWN characters."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an integer of {value.bit_length()} bits"
    return shortened(printable(text))


def shortened(text: str) -> str:
    """Truncate `text` to LONGEST_VALUE_SHOWN characters."""
    return text if len(text) <= LONGEST_VALUE_SHOWN else text[: LONGEST_VALUE_SHOWN - 1] + "…"


def _known_path(location: tuple[int | str, ...]) -> str:
    """Return the longest dotted path in the schema with which pydantic's location begins; "" if
    none."""
    parts = [str(part) for part in location]
    for n_parts in range(len(parts), 0, -1):
        path = ".".join(parts[:n_parts])
        if path in leaves() or path in sections():
            return path
    return ""


def _keys(section: str) -> str:
    return ", ".join(sections()[section].model_fields)
