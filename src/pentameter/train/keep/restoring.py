"""Bringing a run back from `checkpoint.copy_to`, before it starts: to a machine whose run folder
holds nothing of it, or less than was copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pentameter.checkpoint.folders.remote_copies import (
    Copy,
    RemoteCopies,
    fetch_checkpoint,
    read_run_file,
)
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.disk.atomic import (
    MAX_JSON_BYTES,
    check_free_space,
    decode_json,
    make_folder,
    read_regular,
    storage_errors,
    sync,
    write_atomic,
)
from pentameter.disk.lock import Fence, RunLock
from pentameter.disk.remote_folder import RemoteFolder
from pentameter.errors import ConfigError, CorruptError, RunFolderInUseError, StorageError
from pentameter.formatting import size
from pentameter.processes.group.world import World
from pentameter.record.identity import RunIdentity
from pentameter.train.keep.copying import COPIED_FILES, SAMPLES_NAME
from pentameter.train.keep.resuming import RunRequest, newest_of_run, refuse_foreign
from pentameter.train.keep.run_folder import RESUME_WORDS, refuse_symlinks
from pentameter.train.say.console import Console


def restore_newer_copy(request: RunRequest, console: Console) -> RemoteCopies | None:
    """If `checkpoint.copy_to` holds a newer checkpoint of the run than its folder, restore it,
    together with the earlier ones that the run may return to, and the run's history. Return the
    copies in the store on rank 0; None on other ranks, and without `copy_to`. Collective; other
    ranks wait for as long as it takes.

    Raises ConfigError if the copies are of another run, or if there are any and `--resume never`
    was given. Raises StorageError if the store does not answer, unless `checkpoint.on_error` is
    `warn` and the folder has a checkpoint to resume from. Raises CorruptError if all copies are
    damaged.
    """
    settings, world = request.config.checkpoint, request.world
    if settings.copy_to is None:
        return None
    verification = request.verification
    there = verification.on_main(lambda: _newest_there(request), "verifying")
    restoring = _Restoring(request, settings.copy_to, console, there)
    if world.is_main:
        restoring.start()
    world.await_main(restoring.is_busy, "restoring")
    console.show("")
    warnings = world.on_main(restoring.outcome)
    console.warn(warnings)
    return restoring.copies


def _newest_there(request: RunRequest) -> tuple[str, int] | None:
    """Return (the run's id, the step of its newest complete checkpoint) of the run in the run
    folder; None if there is none."""
    with suppress(CorruptError):  # what is damaged here is no reason not to bring it back
        return newest_of_run(request.run_dir, request.verification.check)
    return None


class _Restoring(threading.Thread):
    """A thread on rank 0 that restores checkpoints from `checkpoint.copy_to`, while rank 0 keeps
    the other ranks waiting. It is a daemon thread, as a request that hangs must not keep alive a
    process that a signal stops."""

    def __init__(
        self, request: RunRequest, url: str, console: Console, there: tuple[str, int] | None
    ) -> None:
        super().__init__(name="restoring", daemon=True)
        self._request, self._url, self._console, self._there = request, url, console, there
        self._path = request.run_dir
        self._warnings: list[str] = []
        self._error: BaseException | None = None
        self.copies: RemoteCopies | None = None
        """The copies in the store, once it has listed them."""

    def run(self) -> None:
        """Restore, and keep an exception for `outcome` to raise."""
        try:
            self.copies = RemoteCopies(RemoteFolder(self._url), self._warnings)
            self._restore(self.copies)
        except BaseException as error:
            self._error = error

    def is_busy(self) -> bool:
        """Return True while it works; print a line about a store that fails for some seconds."""
        word = None if self.copies is None else self.copies.folder.attempts.take_word()
        if word is not None:
            self._console.say(f"warning: {word}")
        return self.is_alive()

    def outcome(self) -> list[str]:
        """Return the warnings, or raise the error that stopped the thread."""
        if self._error is not None:
            raise self._error
        return self._warnings

    def _restore(self, copies: RemoteCopies) -> None:
        run_id, step_there = (None, -1) if self._there is None else self._there
        try:
            copies.read()
        except StorageError as error:
            if run_id is None or self._request.config.checkpoint.on_error != "warn":
                raise
            self._warnings.append(f"{error}. Training goes on from the run folder")
            return
        if not copies.copies:
            return
        self._refuse_other_run(copies, run_id)
        newest = [copies.copies[step] for step in sorted(copies.copies, reverse=True)]
        newer = [copy for copy in newest if copy.step > step_there]
        if newer:
            with RunLock(self._path / "run.lock", waiting=self._console.say) as lock:
                self._bring_back(copies, newer, lock.fence)

    def _refuse_other_run(self, copies: RemoteCopies, run_id: str | None) -> None:
        """Raise ConfigError if the run may not resume from the copies. `run_id` is the id in the
        run folder's checkpoints, None if there are none."""
        resume, url = self._request.resume, copies.folder
        if resume == "never":
            raise ConfigError(
                f"--resume never: {url} already holds a run; give another checkpoint.copy_to, or "
                "remove what is there"
            )
        if run_id not in (None, copies.run_id):
            raise ConfigError(
                f"{self._path} holds checkpoints of run {run_id}, and {url} copies of run "
                f"{copies.run_id}; give another checkpoint.copy_to or another --run-dir"
            )
        if run_id is None and resume not in RESUME_WORDS:
            raise ConfigError(
                f"--resume {resume} begins a new run, and {url} holds copies of run "
                f"{copies.run_id}; give another checkpoint.copy_to"
            )

    def _bring_back(self, copies: RemoteCopies, newer: list[Copy], fence: Fence) -> None:
        """Restore the newest of the copies in `newer` that is complete. `newer` lists those that
        are newer than every checkpoint in the run folder, the newest first. `fence` is asked before
        each write."""
        assert copies.run_id is not None  # there are copies
        refuse_symlinks(self._path)
        refuse_foreign(self._path, RunIdentity(copies.run_id))
        store = CheckpointStore(
            self._path / "checkpoints",
            run_id=copies.run_id,
            config_hash="",
            verification=self._request.verification.among(World()),
            fence=fence,
        )
        damage = []
        for copy in newer:
            try:
                self._fetch(copies, copy, store, fence)
            except CorruptError as error:
                damage.append(error)
                continue
            self._warnings += [f"passed over a copy: {error}" for error in damage]
            self._console.say(f"restored step {copy.step} from {copies.folder}")
            return
        raise CorruptError(
            f"every newer copy in {copies.folder} is damaged; newest: {damage[0]}; give another "
            "checkpoint.copy_to to go on from the run folder"
        )

    def _fetch(
        self, copies: RemoteCopies, copy: Copy, store: CheckpointStore, fence: Fence
    ) -> None:
        """Restore one copy. config.toml marks a run folder, so it is removed first and written
        last: a half restored folder is no run."""
        files = {
            name: read_run_file(copies.folder, copy, name) for name in (*COPIED_FILES, SAMPLES_NAME)
        }
        needed = [copies.copies[step] for step in copy.needs if step in copies.copies]
        make_folder(store.folder)
        check_free_space(store.folder, sum(each.n_bytes for each in (copy, *needed)))
        with _unmarked(self._path, fence):
            for each in needed:
                try:
                    fetch_checkpoint(copies.folder, each, store, self._progress(each))
                except CorruptError as error:
                    self._warnings.append(f"step {each.step} is not restored: {error}")
            fetch_checkpoint(copies.folder, copy, store, self._progress(copy))
            fence.check()
            _write_run_files(self._path, files)

    def _progress(self, copy: Copy) -> Callable[[int], None]:
        n_arrived = 0

        def show(n_bytes: int) -> None:
            nonlocal n_arrived
            n_arrived += n_bytes
            self._console.show(
                f"restoring step {copy.step}: {size(n_arrived)} of {size(copy.n_bytes)}"
            )

        return show


@contextmanager
def _unmarked(path: Path, fence: Fence) -> Iterator[None]:
    """Context manager: remove config.toml, which marks the run folder `path`. The block writes a
    new one. After an error the old one is put back, unless `fence` says that another process has
    taken over the folder."""
    marker = path / "config.toml"
    before = None
    with suppress(CorruptError):
        before = read_regular(marker, max_bytes=MAX_JSON_BYTES)
    fence.check()
    with storage_errors(marker, "remove"):
        marker.unlink(missing_ok=True)
    sync(path)
    try:
        yield
    except RunFolderInUseError:
        raise
    except BaseException:
        if before is not None and not marker.exists():
            write_atomic(marker, before)
        raise


def _write_run_files(path: Path, files: dict[str, bytes]) -> None:
    """Write a run's own files (name → content) into its folder, config.toml last; remove those
    whose content is empty."""
    samples = files.pop(SAMPLES_NAME)
    make_folder(path / "samples")
    for name, text in (decode_json(samples, path / SAMPLES_NAME) if samples else {}).items():
        is_plain = name.startswith("step-") and name.removesuffix(".txt")[5:].isdecimal()
        if is_plain and isinstance(text, str):
            write_atomic(path / "samples" / name, text.encode())
    for name in COPIED_FILES:
        if files[name]:
            write_atomic(path / name, files[name])
        else:
            with storage_errors(path / name, "remove"):
                (path / name).unlink(missing_ok=True)
