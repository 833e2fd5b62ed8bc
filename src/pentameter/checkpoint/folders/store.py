"""The checkpoint store of one run: saves checkpoints atomically, finds them by step, removes old
ones.

A save writes into `step-N.tmp-<uuid>/`, syncs the files, then a manifest with every size and
sha256, then renames the folder to `step-N` and syncs the parent. Each rank writes its own files and
hands over their `FileRecord`s; the main process writes the manifest and renames. A kill or power
loss between any two system calls leaves either the previous checkpoint or the new one.
`save_phases.py` holds the phases of a save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.checkpoint.folders.opening import (
    Checkpoint,
    best_checkpoint,
    find_checkpoint,
    read_manifest,
    read_own_manifest,
)
from pentameter.checkpoint.folders.verification import Verification
from pentameter.checkpoint.format.manifest import Manifest, seal
from pentameter.checkpoint.format.save_phases import Contents, Exchanged, Save, Written, plan_files
from pentameter.disk.atomic import (
    check_files,
    check_free_space,
    is_temporary,
    make_folder,
    remove_tree,
    storage_errors,
    sync,
    temporary_name,
)
from pentameter.disk.lock import Fence
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.processes.group.world import World
from pentameter.record.checkpoints import (
    REPLACED,
    Candidate,
    list_checkpoints,
    step_folder_name,
    step_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: its folder, step, size in bytes and the seconds it took."""

    path: Path
    step: int
    n_bytes: int
    seconds: float


@dataclass
class _StepFolders:
    """The step folders of one run, one for each checkpoint: tells intact ones from damaged ones,
    and renames them so that each appears and disappears as a whole.

    After a crash at any moment, readers and the next process find only complete checkpoints. A
    checkpoint that this process wrote is known to be intact; `verification` hashes any other once.
    `warnings` gets a line for each damaged checkpoint. `fence` is called before a folder appears or
    disappears, and raises if another process has taken over the run.
    """

    folder: Path
    run_id: str
    warnings: list[str]
    verification: Verification
    fence: Fence | None
    _written: dict[Path, bytes] = field(default_factory=dict)
    """Folder → manifest of each checkpoint that this process has published."""
    _told: set[str] = field(default_factory=set)

    def own(self) -> Iterator[Candidate]:
        """Yield the folders of this run's checkpoints, whether intact or damaged, the highest step
        first."""
        for candidate in list_checkpoints(self.folder):
            with suppress(CorruptError):
                if read_own_manifest(candidate.path).run_id == self.run_id:
                    yield candidate

    def is_valid(self, path: Path) -> bool:
        """Return True if the checkpoint in `path` is intact and belongs to this run."""
        try:
            manifest = read_own_manifest(path)
            if self._written.get(path) == manifest.to_bytes():
                check_files(path, manifest.files, hash_content=False)
            else:
                self.verification.check(path, manifest)
        except CorruptError as error:
            told = f"a checkpoint is damaged: {error}"
            self.warnings += [] if told in self._told else [told]
            self._told.add(told)
            return False
        return manifest.run_id == self.run_id

    def ask_for(self, step: int) -> None:
        """Verify the checkpoint that a save at `step` will replace, if there is one. Call it before
        the save changes anything; `publish` then uses the result."""
        target = self.folder / step_folder_name(step)
        if os.path.lexists(target):
            self.is_valid(target)

    def publish(self, temporary: Path, manifest: Manifest) -> None:
        """Rename a complete temporary folder, whose files were all read back, to its step's name
        (the step is in `manifest`).

        If the name is taken, the folder there is renamed first, and removed once the new one is in
        place. Until then a valid checkpoint has the suffix `.replaced`, under which readers find
        it; a damaged one has a temporary name.
        """
        target = self.folder / step_folder_name(manifest.step)
        aside = None
        with storage_errors(target, "commit"):
            if os.path.lexists(target):  # includes a symlink whose folder may be elsewhere or gone
                valid = self.is_valid(target)
                # A valid one can still be found by its second name until the new one is there.
                aside = target.with_name(
                    target.name + REPLACED if valid else temporary_name(target.name)
                )
                if aside.is_dir():  # left by a crash between the two renames below, long ago
                    self.discard(aside, self.remove)
            self.check_ours()
            if aside is not None:
                os.rename(target, aside)
            self._forget(target)
            try:
                os.rename(temporary, target)
            except BaseException:
                if aside is not None:
                    with suppress(OSError):
                        os.rename(aside, target)
                raise
        sync(self.folder)
        self._written[target] = manifest.to_bytes()  # each rank verified the files it wrote
        if aside is not None:
            with suppress(StorageError):  # the new one is committed; `clean` removes the rest
                self.discard(aside)

    def check_ours(self) -> None:
        """Raise RunFolderInUseError if another process has taken over the run folder."""
        if self.fence is not None:
            self.fence.check()

    def receive(self, step: int, fill: Callable[[Path], object]) -> None:
        """Call `fill` with an empty temporary folder, verify the files that it wrote there, and
        publish the folder. Raises CorruptError if they are not an intact checkpoint of this run at
        `step`."""
        temporary = self.folder / temporary_name(step_folder_name(step))
        try:
            with storage_errors(temporary, "create the folder"):
                os.mkdir(temporary)
            fill(temporary)
            manifest = read_manifest(temporary)
            if (manifest.run_id, manifest.step) != (self.run_id, step):
                raise CorruptError(
                    f"step {manifest.step} of run {manifest.run_id} came for step {step} of run "
                    f"{self.run_id}"
                )
            check_files(temporary, manifest.files)
            sync(temporary)
            self.publish(temporary, manifest)
            self.verification.trust(self.folder / step_folder_name(step), manifest)
        except BaseException:
            with suppress(StorageError):
                remove_tree(temporary)
            raise

    def discard(self, folder: Path, remove: Callable[[Path], object] = remove_tree) -> None:
        """Remove the checkpoint in `folder`: rename the folder to a temporary name, so that readers
        never find a partial one, then call `remove` with it."""
        self.check_ours()
        self._forget(folder)
        temporary = folder.with_name(temporary_name(folder.name.partition(".")[0]))
        with storage_errors(folder, "remove"):
            os.rename(folder, temporary)
        remove(temporary)

    def clean(self) -> list[str]:
        """Remove what interrupted saves and removals left; return the removed names. See
        `CheckpointStore.clean`."""
        self.check_ours()
        replaced = {
            each.path: self.folder / step_folder_name(each.step)
            for each in list_checkpoints(self.folder)
            if each.replaced
        }
        obsolete = [
            path for path, proper in replaced.items() if proper.exists() and self.is_valid(proper)
        ]
        with storage_errors(self.folder, "list"):
            names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        left = [
            name
            for name in names
            if is_temporary(name) and step_of(name.rsplit(".tmp-", 1)[0]) is not None
        ]
        for name in left:
            self.remove(self.folder / name)
        for path in obsolete:
            with suppress(StorageError):  # as above
                self.discard(path, self.remove)
        for path, proper in replaced.items():
            if not proper.exists():
                with storage_errors(proper, "restore"):
                    os.rename(path, proper)
                sync(self.folder)
        return [*left, *(path.name for path in obsolete)]

    def _forget(self, path: Path) -> None:
        self._written.pop(path, None)
        self.verification.forget(path)

    def remove(self, folder: Path) -> None:
        """Remove a folder that has a temporary name, not a checkpoint's. If that fails, only add a
        warning."""
        try:
            remove_tree(folder)
        except StorageError as error:
            self.warnings.append(f"what is left of a checkpoint stays: {error}")


@dataclass(eq=False)
class CheckpointStore:
    """The folder `checkpoints/` in a run: saves, finds and removes its checkpoints.

    A process that writes to it holds the run's lock and passes its `fence`. Once another process
    has taken over the run, everything that would make a checkpoint appear or disappear raises
    RunFolderInUseError instead.

    Manifests record `run_id` and `config_hash`; checkpoints with another run id are never changed.
    `warnings` collects one line for each damaged checkpoint that was skipped. In a run of several
    ranks, pass a `verification` for all of them, and call methods that find or remove checkpoints
    within its `on_main`.
    """

    folder: Path
    run_id: str
    config_hash: str
    verification: Verification = field(default_factory=Verification)
    fence: Fence | None = None
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._exchanged = Exchanged()
        self._folders = _StepFolders(
            self.folder, self.run_id, self.warnings, self.verification, self.fence
        )

    def with_verification(self, verification: Verification) -> CheckpointStore:
        """Return a CheckpointStore for the same folder that uses `verification`, and whose list of
        warnings begins with the present ones."""
        return replace(self, verification=verification, warnings=[*self.warnings])

    def save(
        self, contents: Contents, world: World | None = None, meshes: Sequence[DeviceMesh] = ()
    ) -> Saved:
        """Save a checkpoint with these contents; it is durable on return. Arguments and errors are
        those of `plan`.

        A failure (StorageError) leaves all other checkpoints as they were and nothing half-written.
        Saving a step again replaces it, and at each moment the old or the new one can be found.
        """
        return self.commit(self.plan(contents, world, meshes))

    def plan(
        self, contents: Contents, world: World | None = None, meshes: Sequence[DeviceMesh] = ()
    ) -> Save:
        """Begin a save: plan which rank writes which regions, check for free space and create the
        temporary folder. The returned Save carries it through snapshot and write to `commit`.

        Collective if `world` has several ranks (None is this process alone): each passes the same
        groups with the tensors it has (DTensors; or plain ones, equal on every rank that passes
        them), and writes the regions it owns to `GROUP-00001-of-00004.safetensors`. `meshes` are
        the layout's, from which the owners of regions follow; without any, ranks exchange lists.

        Raises StorageError if space is lacking, ValueError for a state that JSON cannot hold or an
        incomplete tensor, TypeError for a tensor that cannot be saved, ConfigError if the step's
        folder belongs to another run; an error on one rank is raised on all.
        """
        started_at = time.perf_counter()
        world = World() if world is None else world
        files, n_bytes = plan_files(contents.tensors, world, meshes, self._exchanged)
        small: dict[str, bytes] = {}

        def begin() -> Path:
            small.update(contents.small_files())
            self._refuse_foreign(contents.step)
            make_folder(self.folder)
            check_free_space(self.folder, n_bytes + sum(map(len, small.values())))
            temporary = self.folder / temporary_name(step_folder_name(contents.step))
            with storage_errors(temporary, "create the folder"):
                os.mkdir(temporary)
            return temporary

        temporary = world.on_main(begin)
        groups = [*contents.tensors]
        return Save(
            contents.step, temporary, groups, files, small, world, contents.layout, started_at
        )

    def commit(self, save: Save) -> Saved:
        """Wait until all ranks have written their files, however long their disks take, then rename
        the save's folder to its final name.

        Collective. Raises StorageError if a write failed on any rank or the rename fails; the
        save's folder is then removed.
        """
        world, doing = save.world, "committing" if save.is_beside else "saving"

        def seal_and_publish(written: Sequence[Written]) -> int:
            self._folders.ask_for(save.step)
            manifest = seal(
                save.folder,
                {
                    group: [each.tensors[group] for each in written if group in each.tensors]
                    for group in save.groups
                },
                [record for each in written for record in each.small],
                run_id=self.run_id,
                step=save.step,
                config_hash=self.config_hash,
                layout=save.layout,
            )
            self._folders.publish(save.folder, manifest)
            return manifest.n_bytes

        try:
            written = world.patiently(lambda _: save.written(), doing, save.step)
            n_bytes = self.verification.among(world).on_main(
                lambda: seal_and_publish(written), doing, save.step
            )
        except BaseException:
            if world.is_main:
                with suppress(StorageError):
                    remove_tree(save.folder)
            raise
        seconds = time.perf_counter() - save.started_at
        return Saved(self.folder / step_folder_name(save.step), save.step, n_bytes, seconds)

    def receive(self, step: int, fill: Callable[[Path], object]) -> None:
        """Add this run's checkpoint at `step`, for example from a remote copy. `fill` is called
        with an empty folder and writes the checkpoint's files and its manifest there. The
        checkpoint appears once all files are verified, and is durable on return. Raises
        CorruptError if one of them is damaged, or they belong to another run or step."""
        make_folder(self.folder)
        self._folders.receive(step, fill)

    def _refuse_foreign(self, step: int) -> None:
        """Raise ConfigError if a checkpoint from another run has this step's name."""
        target = self.folder / step_folder_name(step)
        try:
            run_id = read_manifest(target).run_id
        except (CorruptError, StorageError):
            return  # absent or damaged: belongs to no run
        if run_id != self.run_id:
            raise ConfigError(
                f"{target} belongs to run {run_id}, this is run {self.run_id}; use another "
                "--run-dir, or move that checkpoint away"
            )

    def latest(self) -> Checkpoint | None:
        """Find the verified checkpoint with this run's highest step; None if the run has none.

        A damaged checkpoint is skipped, with a line in `warnings`. Raises CorruptError if all are
        damaged.
        """
        return self.at(None)

    def at(self, step: int | None) -> Checkpoint | None:
        """Open and verify this run's checkpoint at `step`, or the `latest` one if `step` is None.
        Return None if there is none. Raises CorruptError if it is damaged."""
        check = self.verification.check
        return find_checkpoint(
            self.folder, self.warnings, run_id=self.run_id, step=step, check=check
        )

    def best(self) -> Checkpoint | None:
        """Find the verified checkpoint that represents this run (see `best_checkpoint`); None if
        the run has none. Raises CorruptError if all are damaged."""
        return best_checkpoint(self.folder, self.warnings, self.verification.check, self.run_id)

    def clean(self) -> list[str]:
        """Remove the folders that saves and removals of a process which has ended left unfinished;
        return their names.

        Readers never look at these folders, so one that cannot be removed only adds a warning. A
        checkpoint that was set aside for a new save of its step gets its name back if that save was
        never committed.
        """
        return self._folders.clean()

    def prune(
        self,
        keep_last: int,
        keep_steps: Collection[int] = (),
        remove: Callable[[Path], object] = remove_tree,
    ) -> list[int]:
        """Remove this run's checkpoints except the `keep_last` newest valid ones and those at
        `keep_steps`; return the removed steps.

        A checkpoint is removed only if a newer one verifies, and a damaged one never counts as
        kept. Folders that belong to other runs or cannot be identified stay. `remove` is called
        with each folder once it has a temporary name, and may return before the files are gone.
        """
        candidates, kept_steps, n_to_keep = [*self._folders.own()], {*keep_steps}, max(1, keep_last)
        if all(each.step in kept_steps for each in candidates[n_to_keep:]):
            return []  # whichever of the newest verify, which need not be known then
        removed = []
        kept: set[int] = set()  # steps: what a save at one replaced may be there still
        for candidate in candidates:
            if len(kept) < n_to_keep:
                kept |= {candidate.step} if self._folders.is_valid(candidate.path) else set()
            elif candidate.step not in kept_steps:
                self._folders.discard(candidate.path, remove)
                removed.append(candidate.step)
        return removed

    def discard_after(self, step: int) -> list[int]:
        """Remove this run's checkpoints after `step`, and return their steps. If the checkpoint at
        `step` itself is missing or damaged, nothing is removed and the list is empty."""
        candidates = list(self._folders.own())
        if not any(each.step == step and self._folders.is_valid(each.path) for each in candidates):
            return []
        newer = [each for each in candidates if each.step > step]
        for each in newer:
            self._folders.discard(each.path)
        return [each.step for each in newer]
