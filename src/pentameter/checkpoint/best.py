"""Choice of the checkpoint that represents a run: its best one, or the best available
substitute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pentameter.checkpoint.manifest import Manifest
from pentameter.checkpoint.opening import (
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    read_own_manifest,
    read_state,
)
from pentameter.errors import CorruptError


def best_checkpoint(
    folder: Path, warnings: list[str], run_id: str | None = None
) -> Checkpoint | None:
    """Find the verified checkpoint in `folder` that represents its run; None if the folder has
    none.

    Candidates, in order: the best checkpoint; the best one saved before it, if the best is absent
    or damaged; the newest. The newest checkpoint records both steps in state.json (`best.step`,
    `saved_best_step`), because saving the best may have failed, on a full disk for example.

    With `run_id`, checkpoints from other runs are ignored. Each damaged checkpoint adds a line to
    `warnings`. Raises CorruptError if all are damaged.
    """

    def is_of(run: str | None, step: int | None) -> Callable[[Path, Manifest], bool]:
        return lambda _, manifest: run in (None, manifest.run_id) and step in (None, manifest.step)

    for run, step in _recorded(folder, run_id):
        with suppress(CorruptError):
            checkpoint = find_checkpoint(folder, is_of(run, step), warnings)
            if checkpoint is not None:
                return checkpoint
    return find_checkpoint(folder, is_of(run_id, None), warnings)


def _recorded(folder: Path, run_id: str | None) -> list[tuple[str, int]]:
    """List (run id, step) of the best checkpoint and of the best one saved before it, as recorded
    in the newest checkpoint that records any."""
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
