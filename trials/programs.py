"""Programs of trials as commands, which any folder can start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def program(module: str, *arguments: str) -> list[str]:
    """The command of a module of `trials`, in `environment()`."""
    return [sys.executable, "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's variables and `variables`, so that what is started finds `trials`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
