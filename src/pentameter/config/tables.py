"""Tables of facts that lie beside the code, as TOML files in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]


def packaged_table(path: str) -> dict[str, Any]:
    """Return the content of a TOML file in the package, by its path there:
    `data/corpora/file_kinds.toml`."""
    import tomllib  # `--help` needs no table, and would feel it

    return tomllib.loads((_PACKAGE / path).read_text(encoding="utf-8"))
