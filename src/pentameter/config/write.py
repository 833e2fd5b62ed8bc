"""Text made of a configuration: TOML that `load_config` reads back, and the reference page."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from pentameter.config.fields import Leaf, leaves, sections, tables_of, values_of
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT, Section

LINE_LENGTH = 98


def to_toml(config: Config) -> str:
    """TOML that `load_config` reads back to an equal Config, every key with its meaning.

    Nothing is left out: a value that is absent is written `"none"`, so that the file means the
    same when a default changes.
    """
    lines = ["# Every setting of a run, resolved. `pentameter train THIS-FILE` runs it again."]
    values = values_of(config)
    for section, kind in sections().items():
        if section:
            lines += ["", f"# {_summary(kind)}", f"[{section}]"]
        for leaf in leaves().values():
            if leaf.section != section:
                continue
            meaning = " ".join(leaf.description.split())
            lines += [f"# {line}" for line in textwrap.wrap(meaning, LINE_LENGTH - 2)]
            lines.append(f"{leaf.key} = {toml_value(values[leaf.path])}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """`value` as TOML writes it, which is as JSON does; None as `"none"`, tables within a line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    text = json.dumps(ABSENT if value is None else value, ensure_ascii=False, allow_nan=False)
    return text.replace("\x7f", "\\u007f")  # the one control character that only TOML escapes


def _summary(section: type[Section]) -> str:
    """The first paragraph of a section's docstring, on one line."""
    return " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())


def _tables(leaf: Leaf) -> list[str]:
    """The keys of each table of a list of them; nothing for another key."""
    keys = tables_of(leaf)
    if not keys:
        return []
    lines = ["", f"Each `[[{leaf.path}]]` has", "", "| key | default | meaning |"]
    lines.append("| --- | --- | --- |")
    for key, described in keys.items():
        value = described.get("default", ...)
        shown = ABSENT if value is None else "–" if value is ... else toml_value(value)
        default = f"`{shown}`"
        meaning = " ".join(described.get("description", "").split())
        lines.append(f"| `{key}` | {default} | {meaning} |")
    return lines


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
        lines += ["", f"## {title}", "", _summary(kind), ""]
        lines += ["| key | default | takes | meaning |", "| --- | --- | --- | --- |"]
        for leaf in leaves().values():
            if leaf.section != section:
                continue
            default = ABSENT if leaf.default is None else toml_value(leaf.default)
            meaning = " ".join(leaf.description.split())
            cells = (f"`{leaf.key}`", f"`{default}`", leaf.expected, meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        for leaf in leaves().values():
            if leaf.section == section:
                lines += _tables(leaf)
    return "\n".join(lines) + "\n"
