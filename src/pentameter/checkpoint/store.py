"""The checkpoints of one run: saved whole or not at all, found by step, pruned with care.

A save writes into `step-N.tmp-<uuid>/`, syncs the files, then a manifest with every size and
sha256, then renames the folder to `step-N` and syncs the parent. Each process of a run writes
files of its own and hands over their `FileRecord`s; the manifest and the rename are the main
process's. Between any two system calls a kill or a power loss leaves the previous checkpoint,
or the new one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_files,
    encode_json,
    is_plain_name,
    read_manifest,
    seal,
)
from pentameter.checkpoint.opening import (
    REPLACED,
    STATE_NAME,
    Checkpoint,
    find_checkpoint,
    is_step_folder,
    list_checkpoints,
    read_own_manifest,
    step_folder_name,
)
from pentameter.checkpoint.safetensors_writer import Groups, files_to_write
from pentameter.disk.atomic import (
    FileRecord,
    check_free_space,
    is_temporary,
    make_folder,
    remove_tree,
    storage_errors,
    sync,
    temporary_name,
    write_verified,
)
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.processes.world import World

_SLACK_BYTES = 2**20  # folder entries, the manifest, block rounding


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: where, which step, its size and how long it took."""

    path: Path
    step: int
    n_bytes: int
    seconds: float


class CheckpointStore:
    """The folder `checkpoints/` of a run; whoever writes to it holds the run's lock.

    `warnings` collects one line for each damaged checkpoint that was passed over.
    """

    def __init__(self, folder: Path, *, run_id: str, config_hash: str) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.config_hash = config_hash
        self.warnings: list[str] = []
        self._verified: dict[Path, bytes] = {}  # hashed by this run: once is enough

    def save(
        self,
        step: int,
        tensors: Groups,
        state: Mapping[str, Any],
        extra_files: Mapping[str, bytes],
        layout: Mapping[str, int] | None = None,
        world: World | None = None,
    ) -> Saved:
        """Save the checkpoint of `step`; it is durable on return.

        `tensors` holds groups of named tensors, each written to `GROUP.safetensors`; `state` must
        be JSON without NaN; `extra_files` are small files to lie beside. A failure (StorageError)
        leaves all other checkpoints as they were and nothing half-written. Saving a step again
        replaces it, and at each moment the old or the new one can be found.

        Collective where `world` has several processes: each passes the same groups with the
        tensors it has (DTensors; or plain ones, equal wherever they are passed), and writes its
        share to `GROUP-00001-of-00004.safetensors`. Where one fails, all raise its failure.
        """
        start_seconds = time.perf_counter()
        world = World() if world is None else world
        temporary = world.broadcast(self.folder / temporary_name(step_folder_name(step)))
        files = files_to_write(tensors, world)
        n_tensor_bytes = sum(world.all_gather(sum(file.n_bytes for _, file in files.values())))

        def encode() -> dict[str, bytes]:
            _check_names(extra_files, tensors)
            return {STATE_NAME: encode_json(dict(state)), **extra_files}

        small = world.agreed(encode)

        def begin() -> None:
            self._refuse_foreign(step)
            make_folder(self.folder)
            n_bytes = n_tensor_bytes + sum(map(len, small.values()))
            check_free_space(self.folder, n_bytes + _SLACK_BYTES)
            with storage_errors(temporary, "create the folder"):
                os.mkdir(temporary)

        def write() -> dict[str, FileRecord]:
            records = {
                group: write_verified(temporary / name, file.chunks())
                for group, (name, file) in files.items()
            }
            if records and not world.is_main:
                sync(temporary)  # on another machine than the main process's, perhaps
            return records

        def commit() -> int:
            records = {
                group: [of_rank[group] for of_rank in written if group in of_rank]
                for group in tensors
            }
            manifest = seal(
                temporary,
                records,
                small,
                run_id=self.run_id,
                step=step,
                config_hash=self.config_hash,
                layout=layout or {},
            )
            self._publish(temporary, manifest)
            return manifest.n_bytes

        try:
            world.on_main(begin)
            written = world.all_gather(world.agreed(write))
            n_bytes = world.on_main(commit)
        except BaseException:
            if world.is_main:
                with suppress(StorageError):
                    remove_tree(temporary)
            raise
        seconds = time.perf_counter() - start_seconds
        return Saved(self.folder / step_folder_name(step), step, n_bytes, seconds)

    def _refuse_foreign(self, step: int) -> None:
        """Raise ConfigError where another run's checkpoint has this step's name."""
        target = self.folder / step_folder_name(step)
        try:
            run_id = read_manifest(target).run_id
        except (CorruptError, StorageError):
            return  # absent or damaged: nobody's
        if run_id != self.run_id:
            raise ConfigError(
                f"{target} belongs to run {run_id}, this is run {self.run_id}; use another "
                "--run-dir, or move that checkpoint away"
            )

    def _publish(self, temporary: Path, manifest: Manifest) -> None:
        """Give a complete temporary folder, all of whose files were read back, its step's name: by
        one rename where none stood before."""
        target = self.folder / step_folder_name(manifest.step)
        aside = None
        with storage_errors(target, "commit"):
            if os.path.lexists(target):  # a link, too, whose folder may be elsewhere or gone
                valid = self._is_valid(target)
                # A valid one stays findable under its second name until the new one stands.
                aside = target.with_name(
                    target.name + REPLACED if valid else temporary_name(target.name)
                )
                if aside.is_dir():  # left by a crash between the two renames below, long ago
                    self._discard(aside)
                os.rename(target, aside)
            self._verified.pop(target, None)
            try:
                os.rename(temporary, target)
            except BaseException:
                if aside is not None:
                    with suppress(OSError):
                        os.rename(aside, target)
                raise
        sync(self.folder)
        self._verified[target] = manifest.to_bytes()  # by those who wrote it, each its files
        if aside is not None:
            with suppress(StorageError):  # the new one is committed; `clean` removes the rest
                self._discard(aside)

    def latest(self) -> Checkpoint | None:
        """The verified checkpoint of this run's highest step; None when it has none.

        A damaged one is passed over, with a line in `warnings`; CorruptError when all are.
        """
        checkpoint = find_checkpoint(
            self.folder, lambda _, manifest: manifest.run_id == self.run_id, self.warnings
        )
        if checkpoint is not None:
            self._verified[self.folder / checkpoint.path.name] = checkpoint.manifest.to_bytes()
        return checkpoint

    def clean(self) -> list[str]:
        """Remove the unfinished saves and removals of a process that is gone; their names.

        Readers never look at these. A checkpoint that was renamed for a new save of its step gets
        its name back where that save was never committed.
        """
        removed = []
        with storage_errors(self.folder, "list"):
            names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        for name in names:
            if not is_temporary(name) or not is_step_folder(name.rsplit(".tmp-", 1)[0]):
                continue
            remove_tree(self.folder / name)
            removed.append(name)
        for candidate in list_checkpoints(self.folder):
            if not candidate.replaced:
                continue
            proper = self.folder / step_folder_name(candidate.step)
            if not proper.exists():
                with storage_errors(proper, "restore"):
                    os.rename(candidate.path, proper)
                sync(self.folder)
            elif self._is_valid(proper):
                self._discard(candidate.path)
                removed.append(candidate.path.name)
        return removed

    def prune(self, keep_last: int, keep_steps: Collection[int] = ()) -> list[int]:
        """Remove all of this run but the `keep_last` newest valid ones and `keep_steps`; the steps.

        Only what is older than a checkpoint that verifies goes, and a damaged one never counts
        as kept. Other runs' folders and those nobody can identify stay.
        """
        kept_steps = set(keep_steps)
        removed = []
        n_kept = 0
        for candidate in list_checkpoints(self.folder):
            if not self._is_own(candidate.path):
                continue
            if n_kept < max(1, keep_last):
                n_kept += self._is_valid(candidate.path)
            elif candidate.step not in kept_steps:
                self._discard(candidate.path)
                removed.append(candidate.step)
        return removed

    def discard_after(self, step: int) -> list[int]:
        """Remove this run's checkpoints after `step`, where that one verifies; their steps."""
        candidates = [each for each in list_checkpoints(self.folder) if self._is_own(each.path)]
        if not any(each.step == step and self._is_valid(each.path) for each in candidates):
            return []
        newer = [each for each in candidates if each.step > step]
        for each in newer:
            self._discard(each.path)
        return [each.step for each in newer]

    def _is_own(self, path: Path) -> bool:
        try:
            return read_own_manifest(path).run_id == self.run_id
        except CorruptError:
            return False

    def _is_valid(self, path: Path) -> bool:
        """Whether a folder of this run verifies; its content is hashed once in a run."""
        try:
            manifest = read_own_manifest(path)
            known = self._verified.get(path) == manifest.to_bytes()
            check_files(path, manifest, hash_content=not known)
        except CorruptError as error:
            self.warnings.append(f"a checkpoint is damaged: {error}")
            return False
        self._verified[path] = manifest.to_bytes()
        return manifest.run_id == self.run_id

    def _discard(self, folder: Path) -> None:
        """Remove a checkpoint, first its name, then its files: no moment shows half of it."""
        self._verified.pop(folder, None)
        temporary = folder.with_name(temporary_name(folder.name.partition(".")[0]))
        with storage_errors(folder, "remove"):
            os.rename(folder, temporary)
        remove_tree(temporary)


def _check_names(extra_files: Mapping[str, bytes], groups: Collection[str]) -> None:
    """Raise ValueError for a file or group whose name is taken, or leads out of the folder."""
    taken = {MANIFEST_NAME, STATE_NAME, *(f"{group}.safetensors" for group in groups)}
    for name in [*extra_files, *groups]:
        if not is_plain_name(name) or name in taken:
            raise ValueError(f"a checkpoint cannot hold a file or group named {name!r}")
