"""Resolution from a path to the checkpoint that represents it: a run's best, or the best available
substitute."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pentameter.checkpoint.manifest import MANIFEST_NAME
from pentameter.checkpoint.opening import (
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    open_checkpoint,
    read_own_manifest,
    read_state,
)
from pentameter.errors import ConfigError, CorruptError


def find_model(path: Path, warnings: list[str] | None = None) -> Checkpoint | None:
    """Find the verified checkpoint that `path` denotes: a checkpoint folder itself, or the best one
    in a run folder; None if `path` is a Hugging Face folder.

    The best has the lowest validation loss; if it is absent or damaged, the best one saved before
    it stands in, then the newest. Each damaged checkpoint that is passed over adds a line to
    `warnings` (None: lines are dropped). Raises ConfigError, describing the folder's content, if
    `path` is no model folder or the run has no checkpoint yet; CorruptError if no checkpoint is
    intact.
    """
    path = Path(path)
    warnings = [] if warnings is None else warnings
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{path} {found}; give a run folder (runs/NAME), a checkpoint folder or a Hugging Face "
            "folder"
        )
    if is_hugging_face(path):
        return None
    folder = path / "checkpoints"
    is_checkpoint = os.path.lexists(path / MANIFEST_NAME)
    if not is_checkpoint and not folder.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        found = ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
        raise ConfigError(
            f"{path} is neither a run folder (it has no checkpoints/) nor a checkpoint folder (it "
            f"has no {MANIFEST_NAME}) nor a Hugging Face folder (it has no config.json); found "
            f"there: {found}"
        )
    checkpoint = best_checkpoint(folder, warnings) if not is_checkpoint else open_checkpoint(path)
    if checkpoint is None:
        raise ConfigError(
            f"{path} is a run without a checkpoint yet; wait for its first, or train further"
        )
    return checkpoint


def best_checkpoint(
    folder: Path, warnings: list[str], run_id: str | None = None
) -> Checkpoint | None:
    """Find the verified checkpoint in `folder` (a run's `checkpoints/`) that represents its run;
    None if there is none.

    Candidates, in order: the best checkpoint; the best one saved before it, if the best is absent
    or damaged; the newest. The newest checkpoint records both steps in state.json (`best.step`,
    `saved_best_step`), because saving the best may have failed, on a full disk for example.

    With `run_id`, checkpoints from other runs are ignored. Each damaged one that is passed over
    adds a line to `warnings`. Raises CorruptError if all are damaged.
    """
    for run, step in _recorded(folder, run_id):
        with suppress(CorruptError):
            checkpoint = find_checkpoint(folder, warnings, run_id=run, step=step)
            if checkpoint is not None:
                return checkpoint
    return find_checkpoint(folder, warnings, run_id=run_id)


def _recorded(folder: Path, run_id: str | None) -> list[tuple[str, int]]:
    """List (run id, step) for the best checkpoint and for the best one saved before it, as recorded
    in the newest checkpoint in `folder` that records any. Empty if none does. With `run_id`, only
    checkpoints from that run are read."""
    for candidate in list_checkpoints(folder):
        with suppress(CorruptError):
            manifest = read_own_manifest(candidate.path)
            if run_id not in (None, manifest.run_id):
                continue
            state = read_state(candidate.path, manifest)
            best = state.get("best")
            if not isinstance(best, dict):
                continue
            steps = best.get("step"), state.get("saved_best_step")
            found = [(manifest.run_id, step) for step in steps if isinstance(step, int)]
            if found:
                return found
    return []


def is_hugging_face(path: Path) -> bool:
    """Return True if `path` is a Hugging Face model folder, whatever its architecture: it has
    config.json, but neither a pentameter manifest nor `checkpoints/`."""
    ours = (path / MANIFEST_NAME, path / "checkpoints")
    return (path / "config.json").is_file() and not any(map(os.path.lexists, ours))
