"""Every key of the schema by its dotted path: what it accepts, its value in a configuration, and
the value that a text on the command line stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pentameter.config.schema import ABSENT, Config, Section


@dataclass(frozen=True)
class Leaf:
    """One key that holds a value (not a section)."""

    path: str
    annotation: Any
    default: Any
    description: str

    @property
    def section(self) -> str:
        """The dotted path of its section, "" at the top."""
        return self.path.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Its name in its section."""
        return self.path.rpartition(".")[2]

    @property
    def expected(self) -> str:
        """The values that the key accepts, in words: "a whole number of at least 1 or none"."""
        return _expected(self.annotation)


@cache
def sections() -> dict[str, type[Section]]:
    """Every section by dotted path, `""` being the top, in the schema's order."""
    return dict(_sections_from("", Config))


def _sections_from(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield path, section
    for key, field in section.model_fields.items():
        inner = _section_of(field)
        if inner is not None:
            yield from _sections_from(f"{path}.{key}".lstrip("."), inner)


@cache
def leaves() -> dict[str, Leaf]:
    """Every key of the configuration by dotted path, section by section."""
    found: dict[str, Leaf] = {}
    for section, kind in sections().items():
        for key, field in kind.model_fields.items():
            if _section_of(field) is not None:
                continue
            path = f"{section}.{key}".lstrip(".")
            annotation = field.annotation
            if field.metadata:  # pydantic moves the outermost Annotated's constraints here
                annotation = Annotated[(annotation, *field.metadata)]  # type: ignore[assignment]
            default = None if field.is_required() else field.default
            found[path] = Leaf(path, annotation, default, field.description or "")
    return found


def values_of(config: Config) -> dict[str, Any]:
    """Dotted path → value of every key of `config`, in the order of `leaves`."""
    return {path: attrgetter(path)(config) for path in leaves()}


def value_in(tree: Any, path: str) -> Any:
    """The value at a dotted path of tables within tables, as TOML has them; None without one."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _section_of(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _strip(annotation: Any) -> tuple[Any, list[Any]]:
    """The bare type and the flat list of its constraints."""
    if get_origin(annotation) is not Annotated:
        return annotation, []
    bare, *metadata = get_args(annotation)
    constraints: list[Any] = []
    for item in metadata:
        constraints.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return bare, constraints


def _options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the one annotation."""
    bare, _ = _strip(annotation)
    return get_args(bare) if get_origin(bare) in (Union, UnionType) else (annotation,)


def _expected(annotation: Any) -> str:
    words = [_expected_one(option) for option in _options(annotation)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _expected_one(annotation: Any) -> str:
    bare, constraints = _strip(annotation)
    if get_origin(bare) is Literal:
        values = [str(value) for value in get_args(bare)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if get_origin(bare) is tuple:
        inner = get_args(bare)
        return f"{len(inner)} values, each {_expected(inner[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    word = ABSENT if bare is type(None) else names[bare]
    bounds = " and ".join(_bounds(constraints))
    return f"{word} {bounds}" if bounds else word


def _bounds(constraints: Iterable[Any]) -> Iterator[str]:
    phrases = {
        "gt": "above {}",
        "ge": "of at least {}",
        "lt": "below {}",
        "le": "of at most {}",
        "min_length": "of at least {} characters",
        "max_length": "of at most {} characters",
        "pattern": "matching {}",
    }
    found = {
        name: getattr(constraint, name)
        for constraint in constraints
        for name in phrases
        if getattr(constraint, name, None) is not None
    }
    if "ge" in found and "le" in found:
        yield f"from {found.pop('ge')} to {found.pop('le')}"
    yield from (phrases[name].format(bound) for name, bound in found.items())


def parse_value(leaf: Leaf, text: str) -> Any:
    """The value that `text`, from the command line, stands for; `text` itself where for none.

    The schema then refuses it with the dotted path: there is one place that judges values.
    """
    for option in _options(leaf.annotation):
        value = _read_one(option, text.strip())
        if value is not None:
            return value
    return text


def _read_one(annotation: Any, text: str) -> Any:
    bare, _ = _strip(annotation)
    if get_origin(bare) is tuple:
        inner = get_args(bare)[0]
        items = [item.strip() for item in text.strip("[]()").split(",") if item.strip()]
        values = [_read_one(inner, item) for item in items]
        return None if None in values else values
    if get_origin(bare) is Literal:  # one of numbers; words are text as they are
        return next((v for v in get_args(bare) if not isinstance(v, str) and str(v) == text), None)
    if bare is bool:
        return {"true": True, "false": False}.get(text.lower())
    if bare in (int, float):
        return _read_number(bare, text)
    return None


def _read_number(kind: type[int] | type[float], text: str) -> int | float | None:
    try:
        return kind(text)
    except ValueError:
        pass
    try:
        value = whole(float(text))  # 1e4 steps
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def whole(value: Any) -> Any:
    """`value` as an int where it is a float without a fraction (TOML's `steps = 1e4`)."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def takes_whole_number(leaf: Leaf) -> bool:
    """True if `leaf` holds a whole number (or nothing)."""
    return any(_strip(option)[0] is int for option in _options(leaf.annotation))
