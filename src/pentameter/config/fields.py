"""Every key in the schema by its dotted path: accepted values, its value in a configuration, and
parsing of a value from the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from pentameter.config.naming import NAME_IN_WORDS
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT, Section


@dataclass(frozen=True)
class Leaf:
    """One key of the configuration that holds a value (not a section): path, accepted values,
    default and description."""

    path: str
    options: Sequence[Mapping[str, Any]]
    """A JSON schema, as pydantic writes it, for each kind of value accepted."""
    default: Any
    description: str

    @property
    def section(self) -> str:
        """Dotted path of the key's section, "" at the top level."""
        return self.path.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The key's name in its section."""
        return self.path.rpartition(".")[2]

    @property
    def expected(self) -> str:
        """The accepted values in words: "a whole number of at least 1 or none"."""
        words = [_expected(option) for option in self.options]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@cache
def sections() -> dict[str, type[Section]]:
    """Return dotted path → section class, in the schema's order; "" is the top level."""
    return dict(_sections_from("", Config))


def _sections_from(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield path, section
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _sections_from(f"{path}.{key}".lstrip("."), field.annotation)


@cache
def leaves() -> dict[str, Leaf]:
    """Return dotted path → Leaf for every key, section by section."""
    schema = _schema()
    found: dict[str, Leaf] = {}
    for section, kind in sections().items():
        described = schema["$defs"][kind.__name__] if section else schema
        for key, field in described["properties"].items():
            path = f"{section}.{key}".lstrip(".")
            if path not in sections():
                options, default = field.get("anyOf", [field]), kind.model_fields[key].default
                found[path] = Leaf(path, options, default, field.get("description", ""))
    return found


def values_of(config: Config) -> dict[str, Any]:
    """Return dotted path → value for every key in `config`, in the order of `leaves`. Tables in
    lists become dicts."""
    return {path: _plain(attrgetter(path)(config)) for path in leaves()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.model_dump() if isinstance(value, Section) else value


def value_in(tree: Any, path: str) -> Any:
    """Return the value at a dotted path in nested dicts; None if there is none."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted path as nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    return tree


def choices_of(option: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values that `option` lists, one of a Leaf's accepted kinds as a JSON schema; empty
    if it accepts any value of a type."""
    return option.get("enum") or ([option["const"]] if "const" in option else [])


def tables_of(leaf: Leaf) -> Mapping[str, Mapping[str, Any]]:
    """For a key that holds a list of tables, such as `data.sources`, return each key in a table →
    its JSON schema; empty for any other key."""
    return _keys_of_tables(leaf.options[0])


def _keys_of_tables(option: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    name = option.get("items", {}).get("$ref", "").rpartition("/")[2]
    keys: Mapping[str, Mapping[str, Any]] = _schema()["$defs"][name]["properties"] if name else {}
    return keys


@cache
def _schema() -> Mapping[str, Any]:
    return Config.model_json_schema()


def _expected(option: Mapping[str, Any]) -> str:
    if choices := choices_of(option):
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(str, choices))
    if option["type"] == "array" and "prefixItems" in option:
        inner = option["prefixItems"]
        return f"{len(inner)} values, each {_expected(inner[0])}"
    if option["type"] == "array":
        keys = _keys_of_tables(option)
        return (
            f"tables of {', '.join(keys)}" if keys else f"values, each {_expected(option['items'])}"
        )
    if option.get("format") == "name":
        return NAME_IN_WORDS
    if option.get("format") == "day":
        return "a day as 2024-07-26"
    word = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "null": ABSENT,
    }[option["type"]]
    phrases = {
        "exclusiveMinimum": "above {}",
        "minimum": "of at least {}",
        "exclusiveMaximum": "below {}",
        "maximum": "of at most {}",
        "minLength": "of at least {} characters",
        "maxLength": "of at most {} characters",
        "pattern": "matching {}",
    }
    bounds = [words.format(option[name]) for name, words in phrases.items() if name in option]
    if {"minimum", "maximum"} <= option.keys():
        bounds = [f"from {option['minimum']} to {option['maximum']}"]
    return " ".join([word, *([" and ".join(bounds)] if bounds else [])])


def parse_value(leaf: Leaf, text: str) -> Any:
    """Parse `text` from the command line as the key's type. If that fails, return `text` itself,
    which the schema then refuses with the key's path."""
    for option in leaf.options:
        value = _read(option, text.strip())
        if value is not None:
            return value
    return text


def _read(option: Mapping[str, Any], text: str) -> Any:
    if option["type"] == "array":
        return _read_list(option, text)
    if choices := choices_of(option):  # one of numbers; words are text as they are
        return next((v for v in choices if not isinstance(v, str) and str(v) == text), None)
    if option["type"] == "boolean":
        return {"true": True, "false": False}.get(text.lower())
    kind = {"integer": int, "number": float}.get(option["type"])
    if kind is not None:
        with suppress(ValueError):
            return kind(text)
        with suppress(ValueError):  # 1e4 steps
            value = whole_number(float(text))
            return value if isinstance(value, int) else None
    return None


def _read_list(option: Mapping[str, Any], text: str) -> Any:
    if _keys_of_tables(option):  # a command line has no tables
        return None
    inner = option["items"] if "items" in option else option["prefixItems"][0]
    items = [item.strip() for item in text.strip("[]()").split(",") if item.strip()]
    if inner["type"] == "string":
        return items
    values = [_read(inner, item) for item in items]
    return None if None in values else values


def whole_number(value: Any) -> Any:
    """Return a float without a fraction (TOML's `steps = 1e4`) as int, any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def takes_whole_number(leaf: Leaf) -> bool:
    """Return True if the key accepts any whole number in a range, not only some listed ones."""
    return any(o["type"] == "integer" and not choices_of(o) for o in leaf.options)
