"""The page of a GPU day: its JSON lines as a table for each item, in Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_page(folder: Path) -> None:
    """Write gpu_day.md beside a day's gpu_day.jsonl."""
    lines = (folder / "gpu_day.jsonl").read_text().splitlines()
    items: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        row = json.loads(line)
        items.setdefault(row.pop("item"), []).append(row)
    parts = ["# A day with a GPU\n"]
    for name, rows in items.items():
        ended = [row for row in rows if "ended" in row]
        said = [row for row in rows if "ended" not in row]
        how = ", ".join(f"exit {row['ended']} after {row['seconds']} s" for row in ended)
        parts.append(f"## {name} ({how or 'cut off'})\n\n{_tables(said)}")
    (folder / "gpu_day.md").write_text("\n".join(parts))


def _tables(rows: list[dict[str, Any]]) -> str:
    """Return rows as tables, one for each set of keys."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    text = ""
    for keys, alike in kinds.items():
        text += f"| {' | '.join(keys)} |\n|{' --- |' * len(keys)}\n"
        for row in alike:
            text += f"| {' | '.join(_cell(row[key]) for key in keys)} |\n"
        text += "\n"
    return text


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")[:300]
