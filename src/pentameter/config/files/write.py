"""A configuration as text: TOML that `load_config` reads back, and the schema for editors."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection
from typing import Any

from pentameter.config.fields import leaves, sections, values_of
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
            lines += ["", f"# {section_summary(kind)}", f"[{section}]"]
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


def section_summary(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring, as one line."""
    return " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())
