"""MODEL on the command line: a run folder stands for its best checkpoint, else its last.

A Hugging Face folder is told apart here, and read by `pentameter.checkpoint.hugging_face`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pentameter.checkpoint.manifest import MANIFEST_NAME, Manifest
from pentameter.checkpoint.opening import (
    Checkpoint,
    find_checkpoint,
    open_checkpoint,
    read_state,
)
from pentameter.errors import ConfigError, CorruptError


def is_hugging_face(path: Path) -> bool:
    """Whether `path` is a model folder of Hugging Face, of whatever architecture."""
    ours = (path / MANIFEST_NAME, path / "checkpoints")
    return (path / "config.json").is_file() and not any(map(os.path.lexists, ours))


def find_model(path: Path, warnings: list[str] | None = None) -> Checkpoint:
    """The verified checkpoint that `path` means: a checkpoint folder, or a run folder's best.

    The best step is the one the newest checkpoint records in state.json (`best.step`). When it is
    not there, or damaged, the last checkpoint stands in, and `warnings` gets a line for what is
    damaged. Raises ConfigError saying what was found when `path` is neither, CorruptError when
    no checkpoint is whole.
    """
    path = Path(path)
    warnings = [] if warnings is None else warnings
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{path} {found}; give a run folder (runs/NAME), a checkpoint folder or a Hugging Face "
            "GPT-2 folder"
        )
    if (path / MANIFEST_NAME).exists() or (path / MANIFEST_NAME).is_symlink():
        return open_checkpoint(path)
    folder = path / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(_describe(path))
    best = _best(folder)
    if best is not None:
        with suppress(CorruptError):
            checkpoint = find_checkpoint(
                folder, lambda _, manifest: (manifest.run_id, manifest.step) == best, warnings
            )
            if checkpoint is not None:
                return checkpoint
    checkpoint = find_checkpoint(folder, lambda _, manifest: True, warnings)
    if checkpoint is None:
        raise ConfigError(
            f"{path} is a run without a checkpoint yet; wait for its first, or train further"
        )
    return checkpoint


def _best(folder: Path) -> tuple[str, int] | None:
    """Run id and best step as the newest checkpoint that can say so has it."""
    newest: list[tuple[str, int]] = []

    def reads_state(path: Path, manifest: Manifest) -> bool:
        if newest:
            return False
        best = read_state(path, manifest).get("best")
        if isinstance(best, dict) and isinstance(best.get("step"), int):
            newest.append((manifest.run_id, best["step"]))
        return False

    with suppress(CorruptError):
        find_checkpoint(folder, reads_state, [])
    return newest[0] if newest else None


def _describe(path: Path) -> str:
    if is_hugging_face(path):
        return f"{path} is a Hugging Face folder, in which there is no checkpoint; use load_model"
    names = sorted(entry.name for entry in path.iterdir())
    found = ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
    return (
        f"{path} is neither a run folder (it has no checkpoints/) nor a checkpoint folder (it has "
        f"no {MANIFEST_NAME}) nor a Hugging Face folder (it has no config.json); found there: "
        f"{found}"
    )
