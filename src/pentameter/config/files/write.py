"""A configuration as text: TOML that `load_config` reads back, and the reference page."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection
from typing import Any

from pentameter.config.fields import Leaf, leaves, sections, tables_of, values_of
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT, Section

LINE_LENGTH = 98


def to_toml(config: Config, *, left_out_at_default: Collection[str] = ()) -> str:
    """Return a configuration as TOML that `load_config` reads back equal, each key with a comment.

    None is written `"none"`, so that the file means the same when a default changes. Only the
    dotted paths in `left_out_at_default` are left out if they have their default.
    """
    lines = ["# Every setting of a run, resolved. `pentameter train THIS-FILE` runs it again."]
    values = values_of(config)
    for section, kind in sections().items():
        if section:
            lines += ["", f"# {_summary(kind)}", f"[{section}]"]
        for leaf in leaves().values():
            is_default = values[leaf.path] == leaf.default
            if leaf.section != section or (is_default and leaf.path in left_out_at_default):
                continue
            meaning = " ".join(leaf.description.split())
            lines += [f"# {line}" for line in textwrap.wrap(meaning, LINE_LENGTH - 2)]
            lines.append(f"{leaf.key} = {toml_value(values[leaf.path])}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return `value` as TOML, on one line; None as `"none"`."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    text = json.dumps(ABSENT if value is None else value, ensure_ascii=False, allow_nan=False)
    return text.replace("\x7f", "\\u007f")  # the one control character that only TOML escapes


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration file, for editors.

    It accepts what `Config` accepts, the key `extends`, and "none" for None.
    """
    schema = Config.model_json_schema()
    extends = {
        "type": "string",
        "description": "A preset, or a file relative to this one's folder.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_for_toml({**schema, "properties": {"extends": extends, **schema["properties"]}}),
        "title": "A configuration of pentameter",
    }


def _for_toml(schema: Any) -> Any:
    """Return a JSON schema with "none" in place of null, which TOML lacks, and without required
    keys, as a file may extend another."""
    if isinstance(schema, list):
        return [_for_toml(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "null":
        return {"const": ABSENT}
    kept = {key: value for key, value in schema.items() if key not in ("required", "format")}
    if kept.get("default", ...) is None:
        kept["default"] = ABSENT
    return {key: _for_toml(value) for key, value in kept.items()}


def _summary(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring, as one line."""
    return " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())


def _row(*cells: str) -> str:
    """Format a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(default: Any) -> str:
    """Return a default as Markdown code: `none` for None, a dash if the key is required."""
    return f"`{ABSENT if default is None else '–' if default is ... else toml_value(default)}`"


def _taken(leaf: Leaf) -> str:
    """Return the values that a key takes, in words, for the reference page: shorter than in
    messages. A range of whole numbers is written as its ends; `none` is left out if it is the
    default."""
    words = re.sub(r"a whole number from (\S+) to ", r"\1 … ", leaf.expected)
    words = words.replace(" of at least 1 characters", "")
    return words.removesuffix(f" or {ABSENT}") if leaf.default is None else words


def reference_page() -> str:
    """Return the Markdown text for docs/configuration.md: every section and key with default,
    accepted values and meaning."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by `make docs` from src/pentameter/config/schema.py; do not edit. -->",
        "",
        "For who looks up a key. A run is described by one TOML file, or by the name of a preset.",
        'A file may build on another: `extends = "shakespeare-char"` names a preset, or a file',
        "relative to its own folder. Every key can be set on the command line, `--section.key",
        'value`; hyphens and underscores are the same. `none` (in TOML `"none"`) stands for an',
        "absent value, which every key takes whose default it is, `0.9,0.99` for a pair; 1 … 9 is",
        "a whole number. An unknown key is refused with the nearest known one. The flat keys of",
        "`[model]` as 0.2 had them (`n_heads`, `d_ff`) are read as ever.",
        "",
        "`pentameter completion toml` prints a JSON schema for editors, `bash`, `zsh` or `fish`",
        "what completes keys and values on the command line ([how](commands.md#completion)).",
    ]
    for section, kind in sections().items():
        title = f"`[{section}]`" if section else "Top level"
        lines += ["", f"## {title}", "", _summary(kind), ""]
        lines += ["| key | default | takes | meaning |", "| --- | --- | --- | --- |"]
        inside = [leaf for leaf in leaves().values() if leaf.section == section]
        for leaf in inside:
            meaning = " ".join(leaf.description.split())
            lines.append(_row(f"`{leaf.key}`", _shown(leaf.default), _taken(leaf), meaning))
        for leaf in filter(tables_of, inside):
            lines += ["", f"Each `[[{leaf.path}]]` has", "", "| key | default | meaning |"]
            lines.append("| --- | --- | --- |")
            for key, described in tables_of(leaf).items():
                meaning = " ".join(described.get("description", "").split())
                lines.append(_row(f"`{key}`", _shown(described.get("default", ...)), meaning))
    return "\n".join(lines) + "\n"
