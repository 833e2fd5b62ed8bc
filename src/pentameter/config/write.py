"""A configuration as text: the TOML that `load_config` reads back, and the reference page."""

from __future__ import annotations

import textwrap
from typing import Any

from pentameter.config.fields import Leaf, leaves, sections
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT

LINE_LENGTH = 98


def to_toml(config: Config) -> str:
    """TOML that `load_config` reads back to an equal Config, every key with its meaning.

    Nothing is left out: a value that is absent is written `"none"`, so that the file means the
    same when a default changes.
    """
    lines = ["# Every setting of a run, resolved. `pentameter train THIS-FILE` runs it again."]
    for section, kind in sections().items():
        keys = [leaf for leaf in leaves().values() if leaf.path.rpartition(".")[0] == section]
        if section:
            lines += ["", f"# {summary(kind.__doc__)}", f"[{section}]"]
        for leaf in keys:
            lines += _comment(leaf.description)
            lines.append(f"{leaf.path.rpartition('.')[2]} = {toml_value(value_at(config, leaf))}")
    return "\n".join(lines) + "\n"


def value_at(config: Config, leaf: Leaf) -> Any:
    """The value that `config` has for `leaf`."""
    value: Any = config
    for part in leaf.path.split("."):
        value = getattr(value, part)
    return value


def toml_value(value: Any) -> str:
    """`value` as TOML writes it; None as `"none"`."""
    if value is None:
        return f'"{ABSENT}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    assert isinstance(value, str), f"the schema has no values of type {type(value)}"
    return '"' + "".join(map(_escape, value)) + '"'


def _escape(character: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in named:
        return named[character]
    # TOML forbids raw control characters; DEL is one too.
    return f"\\u{ord(character):04x}" if ord(character) < 0x20 or character == "\x7f" else character


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), LINE_LENGTH - 2)]


def summary(docstring: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((docstring or "").strip().split("\n\n")[0].split())


def reference_page() -> str:
    """docs/configuration.md: every section and key with default, accepted values and meaning."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by `make docs` from src/pentameter/config/schema.py; do not edit. -->",
        "",
        "A run is described by one TOML file, or by the name of a preset. A file may build on",
        'another: `extends = "shakespeare-char"` names a preset, or a file relative to its own',
        "folder. Every key can be set on the command line, `--section.key value`; hyphens and",
        'underscores are the same. `none` (in TOML `"none"`) stands for an absent value,',
        "`0.9,0.99` for a pair. An unknown key is refused with the nearest known one.",
    ]
    for section, kind in sections().items():
        title = f"`[{section}]`" if section else "Top level"
        lines += ["", f"## {title}", "", summary(kind.__doc__), ""]
        lines += ["| key | default | takes | meaning |", "| --- | --- | --- | --- |"]
        for leaf in leaves().values():
            if leaf.path.rpartition(".")[0] == section:
                lines.append(_row(leaf))
    return "\n".join(lines) + "\n"


def _row(leaf: Leaf) -> str:
    key = leaf.path.rpartition(".")[2]
    default = ABSENT if leaf.default is None else toml_value(leaf.default)
    meaning = " ".join(leaf.description.split())
    cells = (f"`{key}`", f"`{default}`", leaf.expected, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
