"""Finding and opening checkpoints. A folder counts only if its manifest and every file's hash
verify."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pentameter.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_JSON_BYTES,
    Manifest,
    parse_manifest,
)
from pentameter.checkpoint.tensor_reader import StoredTensors
from pentameter.disk.atomic import (
    check_file,
    decode_json,
    is_temporary,
    read_checked,
    read_regular,
    storage_errors,
)
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.machine.cores import usable_cores

STATE_NAME = "state.json"
REPLACED = ".replaced"

_PATIENCE_SECONDS = 60  # a run may prune faster than its remaining checkpoints can be read

_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.replaced)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every file matched its manifest at opening."""

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
        """Return the content of a small file (`config.toml`), verified again; CorruptError if the
        checkpoint has no such file or its bytes changed."""
        return read_checked(self.path, self.manifest.files, name, max_bytes=MAX_JSON_BYTES)


def step_folder_name(step: int) -> str:
    """Return the name for the folder of a checkpoint at `step`: `step-00000500`."""
    return f"step-{step:08d}"


def is_step_folder(name: str) -> bool:
    """Return True if `name` is one that a finished checkpoint can have: `step-` with eight digits
    or more, also with the suffix `.replaced`."""
    return _STEP_FOLDER.fullmatch(name) is not None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open and verify the checkpoint in the folder `path`.

    Raises CorruptError naming the file that is missing, damaged, malformed or a link; ConfigError
    if `path` is not a folder.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a checkpoint folder (…/step-00000500)")
    path = path.resolve()
    manifest = read_own_manifest(path)
    check_files(path, manifest)
    state = read_state(path, manifest)
    return Checkpoint(path, manifest, state)


def read_state(path: Path, manifest: Manifest) -> Mapping[str, Any]:
    """Read state.json in the folder `path`, verified against its manifest. Raises CorruptError if
    it is missing, damaged or no JSON object."""
    data = read_checked(path, manifest.files, STATE_NAME, max_bytes=MAX_JSON_BYTES)
    return decode_json(data, path / STATE_NAME)


def read_own_manifest(path: Path) -> Manifest:
    """Read and verify the manifest in the checkpoint folder `path`; CorruptError if it is missing
    or damaged, the folder is an unfinished save, or its name gives another step."""
    if is_temporary(path.name):
        raise CorruptError(f"{path} is an unfinished save; use a folder named step-…")
    manifest = read_manifest(path)
    match = _STEP_FOLDER.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise CorruptError(
            f"{path / MANIFEST_NAME} is of step {manifest.step}: a folder was renamed or swapped"
        )
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest in `folder`, whatever the folder's name; the files that it names
    are not opened. Raises CorruptError if it is missing, damaged, malformed or written by a newer
    version."""
    path = folder / MANIFEST_NAME
    data = read_regular(path, max_bytes=MAX_JSON_BYTES)
    content = decode_json(data, path)
    manifest = parse_manifest(content, path)
    # One spelling per content: equal bytes mean a true checksum and not one changed character.
    if manifest.to_bytes() != data:
        raise CorruptError(f"{path} is damaged: its content does not match its own checksum")
    return manifest


def check_files(folder: Path, manifest: Manifest, *, hash_content: bool = True) -> None:
    """Raise CorruptError naming the first file in `folder` that does not match its record in the
    manifest.

    Sizes are compared first: they reveal most damage without reading gigabytes. With
    `hash_content`, sha256 hashes follow, in up to 8 threads.
    """
    for record in manifest.files:
        check_file(folder, record, hash_content=False)
    if hash_content:
        n_threads = max(1, min(len(manifest.files), len(usable_cores()), 8))
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(partial(check_file, folder, hash_content=True), manifest.files))


@dataclass(frozen=True)
class Candidate:
    """A folder named like a checkpoint; its content has not been read."""

    step: int
    replaced: bool
    """True if its name ends with `.replaced`: renamed while a new save at its step commits;
    restored if that commit never finished."""
    path: Path


def find_checkpoint(
    folder: Path, warnings: list[str], *, run_id: str | None = None, step: int | None = None
) -> Checkpoint | None:
    """Find the verified checkpoint with the highest step in `folder`, among those from `run_id` and
    at `step` if these are given; None if there is none.

    The step comes from names and contents, never from file times. Each damaged folder that is
    passed over adds a line to `warnings`; if all are damaged, CorruptError names the newest one's
    file. A folder that another process prunes meanwhile is not damage: the search starts over, for
    up to 60 seconds, then StorageError.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        damage: list[CorruptError] = []
        for candidate in list_checkpoints(folder):
            try:
                manifest = read_own_manifest(candidate.path)
                if run_id in (None, manifest.run_id) and step in (None, manifest.step):
                    checkpoint = open_checkpoint(candidate.path)
                    warnings += [f"passed over a checkpoint: {error}" for error in damage]
                    return checkpoint
            except (CorruptError, ConfigError, StorageError) as error:
                if not candidate.path.is_dir():
                    break
                if not isinstance(error, CorruptError):
                    raise
                damage.append(error)
        else:
            if damage:
                raise CorruptError(
                    f"every checkpoint in {folder} is damaged ({len(damage)}); newest: {damage[0]}"
                    "; restore one from a copy, or start the run again in another folder"
                )
            return None
    raise StorageError(f"{folder} keeps changing while it is read; try again")


def list_checkpoints(folder: Path) -> list[Candidate]:
    """List the folders named like checkpoints, highest step first; the proper name before
    `.replaced`. Empty if `folder` does not exist."""
    found = []
    with storage_errors(folder, "list"), suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _STEP_FOLDER.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(Candidate(int(match[1]), match[2] is not None, folder / entry.name))
    return sorted(found, key=lambda candidate: (-candidate.step, candidate.replaced))
