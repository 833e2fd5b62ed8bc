"""How verbs load the MODEL they are given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.errors import terminal_message

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.model import LoadedModel


def load_for_verb(path: Path, device: torch.device) -> LoadedModel:
    """The model of a MODEL; what was passed over or left out goes to stderr, a line each."""
    from pentameter.checkpoint.model import load_model

    warnings: list[str] = []
    loaded = load_model(path, device=device, warnings=warnings)
    for warning in warnings:
        print(f"pentameter: {terminal_message(warning)}", file=sys.stderr)
    return loaded
