"""Functions that find and open checkpoints: the one that a path denotes, a run's best, its newest.
A folder counts only if its manifest and every file's hash are right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.checkpoint.format.manifest import MANIFEST_NAME, Manifest, read_manifest
from pentameter.checkpoint.format.tensor_reader import StoredTensors
from pentameter.config.urls import shown_url, was_url
from pentameter.disk.atomic import (
    MAX_JSON_BYTES,
    check_files,
    decode_json,
    is_temporary,
    read_checked,
)
from pentameter.errors import ConfigError, CorruptError, StorageError, near_run
from pentameter.record.checkpoints import list_checkpoints, step_of

STATE_NAME = "state.json"

# A run may prune faster than its remaining checkpoints can be read; large ones take minutes each.
_PATIENCE_SECONDS, _MIN_SEARCHES = 60, 10

Check = Callable[[Path, Manifest], None]
"""A function that raises CorruptError unless the files in a folder match a manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: a folder whose files were found to match its manifest when it was opened,
    with methods that read its tensors and files."""

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]
    """The JSON object in state.json: step, tokens, best and the rest of the training state, as
    saved."""

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.manifest.step

    def tensors(self, group: str) -> StoredTensors:
        """Return the tensors in a group (`model`, `optimizer`), name → tensor, memory-mapped from
        the files, on the CPU.

        A tensor saved in several regions is a LazyTensor, assembled at each access. Copy a tensor
        before changing it or keeping it for long. Raises CorruptError if the checkpoint has no such
        group or its files do not hold each tensor exactly once, StorageError if its folder has
        disappeared.
        """
        if group not in self.manifest.groups:
            known = ", ".join(sorted(self.manifest.groups)) or "none"
            raise CorruptError(f"{self.path} has no tensors {group!r}; it has: {known}")
        return StoredTensors([self.path / name for name in self.manifest.groups[group]])

    def read(self, name: str) -> bytes:
        """Return the content of a small file, such as `config.toml`, verified again. Raises
        CorruptError if the checkpoint has no such file or its bytes have changed."""
        return read_checked(self.path, self.manifest.files, name, max_bytes=MAX_JSON_BYTES)


def check_content(path: Path, manifest: Manifest) -> None:
    """Raise CorruptError, naming the file, unless the files at `path` have the sizes and hashes in
    `manifest`. This process hashes all of them; in a run of several ranks, use a `Verification`,
    which distributes them."""
    check_files(path, manifest.files)


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise CorruptError unless the files at `path` have the sizes in `manifest`; nothing is
    hashed. For ranks that open a checkpoint after rank 0 has verified it."""
    check_files(path, manifest.files, hash_content=False)


def find_model(
    path: Path, warnings: list[str] | None = None, check: Check = check_content
) -> Checkpoint | None:
    """Find the verified checkpoint that `path` denotes: a checkpoint folder itself, or the best
    checkpoint in a run folder. Return None if `path` is a Hugging Face folder.

    The best is the one with the lowest validation loss. If it is absent or damaged, the one that
    was best before it is taken, then the newest. `check` decides whether a checkpoint is intact;
    each damaged one adds a line to `warnings`. Raises ConfigError, describing the folder's content,
    if `path` is no model folder or the run has no checkpoint yet; CorruptError if no checkpoint is
    intact.
    """
    path = Path(path)
    warnings = [] if warnings is None else warnings
    if was_url(path):
        url = shown_url(str(path).replace(":/", "://", 1))
        raise ConfigError(
            f"{url} is a URL, and a model is read from a disk: copy its folder to one and name "
            "that; of the Hub's models name OWNER/NAME, hf://OWNER/NAME"
        )
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{path} {found}{near_run(path)}; give a run folder (runs/NAME), a checkpoint folder "
            "or a Hugging Face folder"
        )
    if is_hugging_face(path):
        return None
    if os.path.lexists(path / MANIFEST_NAME):
        return open_checkpoint(path, check)
    folder = path / "checkpoints"
    if not folder.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        found = ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
        raise ConfigError(
            f"{path} is neither a run folder (it has no checkpoints/) nor a checkpoint folder (it "
            f"has no {MANIFEST_NAME}) nor a Hugging Face folder (it has no config.json); found "
            f"there: {found}"
        )
    checkpoint = best_checkpoint(folder, warnings, check)
    if checkpoint is None:
        raise ConfigError(
            f"{path} is a run without a checkpoint yet; wait for its first, or train further"
        )
    return checkpoint


def is_hugging_face(path: Path) -> bool:
    """Return True if `path` is a Hugging Face model folder, whatever its architecture: it has
    config.json, but neither a pentameter manifest nor `checkpoints/`."""
    ours = (path / MANIFEST_NAME, path / "checkpoints")
    return (path / "config.json").is_file() and not any(map(os.path.lexists, ours))


def best_checkpoint(
    folder: Path, warnings: list[str], check: Check, run_id: str | None = None
) -> Checkpoint | None:
    """Find the verified checkpoint in `folder` (a run's `checkpoints/`) that represents its run;
    None if there is none.

    Candidates, in order: the best checkpoint; the one that was best before it, if it is absent or
    damaged; the newest. The newest checkpoint records both steps in state.json (`best.step`,
    `saved_best_step`), because saving the best may have failed, on a full disk for example.

    With `run_id`, checkpoints from other runs are ignored. Each damaged one that is skipped adds a
    line to `warnings`. Raises CorruptError if all are damaged.
    """
    checkpoint, damage = None, list[str]()
    for run, step in _recorded(folder, run_id):
        try:
            checkpoint = find_checkpoint(folder, warnings, run_id=run, step=step, check=check)
        except CorruptError as error:
            damage.append(f"passed over a checkpoint: {error.__cause__}")
        if checkpoint is not None:
            break
    else:
        checkpoint = find_checkpoint(folder, warnings, run_id=run_id, check=check)
    warnings += [line for line in dict.fromkeys(damage) if line not in warnings]
    return checkpoint


def _recorded(folder: Path, run_id: str | None) -> list[tuple[str, int]]:
    """Return the (run id, step) of a run's best checkpoint, and of the one that was best before it,
    as recorded in the newest intact checkpoint that records any. Empty if none does. With a
    `run_id`, checkpoints from other runs are ignored; None takes any."""
    for candidate in list_checkpoints(folder):
        with suppress(CorruptError):
            newest = _read(candidate.path)
            run, best = newest.manifest.run_id, newest.state.get("best")
            if run_id not in (None, run) or not isinstance(best, dict):
                continue
            steps = best.get("step"), newest.state.get("saved_best_step")
            found = [(run, step) for step in steps if isinstance(step, int)]
            if found:
                return found
    return []


def open_checkpoint(path: Path, check: Check = check_content) -> Checkpoint:
    """Open the checkpoint in the folder `path`, verified by `check`.

    Raises CorruptError naming the file that is missing, damaged, malformed or a symlink;
    ConfigError if `path` is not a folder.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a checkpoint folder (…/step-00000500)")
    path = path.resolve()
    if is_temporary(path.name):
        raise CorruptError(f"{path} is an unfinished save; use a folder named step-…")
    checkpoint = _read(path)
    check(path, checkpoint.manifest)
    return checkpoint


def _read(path: Path) -> Checkpoint:
    """Read the manifest and the run's state in the checkpoint folder `path`, check them, and return
    the Checkpoint; its other files are not opened. Raises CorruptError naming the file that is
    missing, damaged or malformed."""
    manifest = read_own_manifest(path)
    data = read_checked(path, manifest.files, STATE_NAME, max_bytes=MAX_JSON_BYTES)
    return Checkpoint(path, manifest, decode_json(data, path / STATE_NAME))


def read_own_manifest(path: Path) -> Manifest:
    """Read and verify the manifest in the checkpoint folder `path`; CorruptError if it is missing
    or damaged, or the folder's name gives another step."""
    manifest = read_manifest(path)
    if step_of(path.name) not in (None, manifest.step):
        raise CorruptError(
            f"{path / MANIFEST_NAME} is of step {manifest.step}: a folder was renamed or swapped"
        )
    return manifest


def find_checkpoint(
    folder: Path,
    warnings: list[str],
    *,
    run_id: str | None = None,
    step: int | None = None,
    check: Check = check_content,
) -> Checkpoint | None:
    """Find the checkpoint with the highest step in `folder` that `check` verifies; None if there is
    none. With `run_id` or `step`, only checkpoints from that run or at that step are considered.

    The step is read from names and contents, never from file times. Each damaged checkpoint that is
    skipped adds a line to `warnings`. Raises CorruptError, naming a file of the newest, if all of
    them are damaged. A folder that another process removes during the search is not damage: the
    search starts over, for 60 seconds and at least ten times, and then raises StorageError.
    """
    deadline, n_searches = time.monotonic() + _PATIENCE_SECONDS, 0
    while time.monotonic() < deadline or n_searches < _MIN_SEARCHES:
        n_searches += 1
        damage: list[CorruptError] = []
        for candidate in list_checkpoints(folder):
            if step not in (None, candidate.step):
                continue
            try:
                manifest = read_own_manifest(candidate.path)
                if run_id in (None, manifest.run_id):
                    checkpoint = open_checkpoint(candidate.path, check)
                    warnings += [f"passed over a checkpoint: {error}" for error in damage]
                    return checkpoint
            except (CorruptError, ConfigError, StorageError) as error:
                if not candidate.path.is_dir():
                    break
                if not isinstance(error, CorruptError):
                    raise
                damage.append(error)
        else:
            if damage and step is not None:
                said = f"the checkpoint at step {step} is damaged: {damage[0]}"
                raise CorruptError(said) from damage[0]
            if damage:
                raise CorruptError(
                    f"every checkpoint in {folder} is damaged ({len(damage)}); newest: {damage[0]}"
                    "; restore one from a copy, or start the run again in another folder"
                )
            return None
    raise StorageError(f"{folder} keeps changing while it is read; try again")
