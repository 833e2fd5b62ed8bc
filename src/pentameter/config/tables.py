"""Tables of facts that lie beside the code, as TOML files in the package."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any


def packaged_table(path: str) -> dict[str, Any]:
    """Return the content of a TOML file in the package, by its path there:
    `data/corpora/file_kinds.toml`."""
    return tomllib.loads((resources.files("pentameter") / path).read_text(encoding="utf-8"))
