"""Copies of a run's checkpoints in `checkpoint.copy_to`, made by a thread of rank 0 while training
goes on.

A checkpoint is copied once it is committed in the run folder; training waits for copies only at its
end. If saves are faster than copies, the newest one is copied next, and those between are left out,
but for the ones that a run resumed from it may return to: its best, and those to roll back to,
which are copied before it. A copy that fails is made up for by the next one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from pentameter.checkpoint.opening import step_folder_name
from pentameter.checkpoint.remote_copies import RemoteCopies
from pentameter.config.schema import CheckpointConfig
from pentameter.config.urls import shown_url
from pentameter.disk.atomic import read_regular
from pentameter.disk.remote_folder import PAUSES
from pentameter.errors import PentameterError, StorageError
from pentameter.processes.world import PAUSE_SECONDS, World
from pentameter.train.log_files import MAX_METRICS_BYTES
from pentameter.train.run_folder import RunFolder

COPIED_FILES = ("plan.json", "environment.json", "metrics.jsonl", "log.txt", "config.toml")
"""The run's own files that go with each copy. Its samples do, too, in one object: SAMPLES_NAME."""
SAMPLES_NAME = "samples.json"


@dataclass(frozen=True)
class CopyMetrics:
    """A copy of the checkpoint at `step` in `checkpoint.copy_to` that was made, or has failed:
    `bytes` written, and seconds since it was asked for."""

    step: int
    bytes: int
    seconds: float
    error: str | None
    """Why it failed; None for a copy that is there and was read back."""


@dataclass(frozen=True)
class _Job:
    """A checkpoint to copy, and the steps of those that a run resumed from it may return to."""

    step: int
    needs: tuple[int, ...]
    asked_at: float
    """Seconds on the performance counter."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps to copy, in this order: what is needed comes first."""
        return *(need for need in self.needs if need != self.step), self.step


class CheckpointCopies:
    """The copies of the checkpoints of the run in `folder`. Without `checkpoint.copy_to`, and on
    other ranks than 0 (`remote` is None there), its methods do nothing.

    A folder for a run is on a disk that all its machines see, so one process can copy all of it,
    and no message between ranks decides which copy is complete.
    """

    def __init__(
        self, settings: CheckpointConfig, folder: RunFolder, remote: RemoteCopies | None
    ) -> None:
        self._settings, self._folder, self._remote = settings, folder, remote
        self._changed = threading.Condition()
        self._next: _Job | None = None
        self._held: _Job | None = None
        self._now: _Job | None = None
        self._discard_after: int | None = None
        self._is_working = self._has_ended = False
        self._done: deque[CopyMetrics] = deque()
        self._thread: threading.Thread | None = None
        self.failure: StorageError | None = None
        """The error of the latest copy, if it failed."""

    @property
    def steps_in_use(self) -> set[int]:
        """Steps whose checkpoints are being copied, or are next: they must stay."""
        with self._changed:
            jobs = (self._next, self._held, self._now)
            return {step for job in jobs if job is not None for step in job.steps}

    def request(self, step: int, needs: Collection[int], *, at_end: bool = False) -> None:
        """Have the checkpoint at `step` copied, and before it those at the steps in `needs` that
        exist. `at_end` says that the run ends there: the copy is begun by `finish`, so that what is
        recorded until then goes with it."""
        if self._remote is None:
            return
        job = _Job(step, tuple(needs), time.perf_counter())
        with self._changed:
            if at_end:
                self._held = job
                return
            self._next = job
            self._start()

    def discard_after(self, step: int) -> None:
        """Remove the copies of steps after `step`, which a run that gave up has removed."""
        if self._remote is None:
            return
        with self._changed:
            self._next = self._held = None
            self._discard_after = step
            self._start()

    def take_done(self) -> list[CopyMetrics]:
        """Return the copies that were made, or have failed, since the last call."""
        with self._changed:
            done = [*self._done]
            self._done.clear()
            return done

    def finish(self, world: World, is_stopping: Callable[[], bool]) -> str | None:
        """Wait for all copies, from the time at which `is_stopping` returns True on for
        `checkpoint.copy_wait_seconds` at most. Return a clause about what is not copied, the same
        on every rank; None if all is. Collective."""
        if self._settings.copy_to is None:
            return None
        self._release()
        deadline = _Deadline(is_stopping, self._settings.copy_wait_seconds)
        world.await_main(lambda: self._is_busy and not deadline.has_passed, "copying", 0)
        return world.broadcast(self._not_copied())

    def finish_after_error(self, is_stopping: Callable[[], bool]) -> None:
        """Wait for all copies, for `checkpoint.copy_wait_seconds` at most, and no longer once
        `is_stopping` returns True: a launcher that ends the processes of a run that has lost one
        wants to start them again. Not collective."""
        self._release()
        deadline = _Deadline(lambda: True, self._settings.copy_wait_seconds)
        while self._is_busy and not deadline.has_passed and not is_stopping():
            time.sleep(PAUSE_SECONDS)

    def _release(self) -> None:
        """Begin the run's last copy; the thread ends once nothing is left to do."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            if self._held is not None:
                self._next, self._held = self._held, None
                self._start()

    @property
    def _is_busy(self) -> bool:
        with self._changed:
            waiting = (self._next, self._discard_after)
            return self._is_working or any(each is not None for each in waiting)

    def _not_copied(self) -> str | None:
        with self._changed:
            job = self._now or self._next
            if job is not None:
                waited = f"{self._settings.copy_wait_seconds:g} s (checkpoint.copy_wait_seconds)"
                return f"{self._not(job)}: it took longer than {waited}"
            return None if self.failure is None else str(self.failure)

    def _not(self, job: _Job) -> str:
        return f"step {job.step} is not copied to {shown_url(self._settings.copy_to or '')}"

    def _start(self) -> None:
        self._changed.notify_all()
        if self._thread is None:
            # Daemonic: a request that hangs must not keep the process.
            self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        assert self._remote is not None  # else nothing is requested
        while True:
            with self._changed:
                self._now, self._is_working = None, False
                self._changed.notify_all()
                while self._next is None and self._discard_after is None:
                    if self._has_ended:
                        return
                    self._changed.wait()
                job, discard_after = self._next, self._discard_after
                self._now, self._is_working = job, True
                self._next = self._discard_after = None
            self._remote.folder.pauses = PAUSES
            if discard_after is not None:
                with suppress(PentameterError):  # a run from there would give up again, no more
                    self._remote.discard_after(discard_after)
            if job is not None:
                self._record(job)

    def _record(self, job: _Job) -> None:
        """Make a copy, and keep what became of it for `take_done`."""
        n_bytes, failure = 0, None
        try:
            n_bytes = self._copy(job)
        except Exception as error:  # each kind of file system has errors of its own
            told = error if isinstance(error, PentameterError) else repr(error)
            failure = StorageError(f"{self._not(job)}: {told}")
        seconds = time.perf_counter() - job.asked_at
        with self._changed:
            self.failure = failure
            if n_bytes or failure is not None:
                error_text = None if failure is None else str(failure)
                self._done.append(CopyMetrics(job.step, n_bytes, seconds, error_text))

    def _copy(self, job: _Job) -> int:
        assert self._remote is not None
        n_bytes = 0
        for step in job.steps:
            path = self._folder.store.folder / step_folder_name(step)
            if step != job.step and not path.is_dir():
                continue  # a best one that could not be saved, or a better one has followed
            n_bytes += self._remote.add(
                path,
                self._run_files,
                run_id=self._folder.run_id,
                needs=job.needs,
                keep_last=self._settings.keep_last,
            )
        return n_bytes

    def _run_files(self) -> dict[str, bytes]:
        """Return the run's own files as they are now, logs up to their last whole line."""
        path, files = self._folder.path, {}
        for name in COPIED_FILES:
            with suppress(PentameterError):
                files[name] = read_regular(path / name, max_bytes=MAX_METRICS_BYTES)
        for name in ("metrics.jsonl", "log.txt"):
            content = files.get(name, b"")
            files[name] = content[: content.rfind(b"\n") + 1]
        samples = sorted((path / "samples").glob("step-*.txt"))
        texts = {each.name: each.read_text(encoding="utf-8") for each in samples}
        return files | ({SAMPLES_NAME: json.dumps(texts).encode()} if texts else {})


def open_copies(
    settings: CheckpointConfig, folder: RunFolder, remote: RemoteCopies | None, world: World
) -> CheckpointCopies:
    """Make rank 0 the one that copies the run in `folder` to `remote` (None on other ranks), so
    that a wrong bucket or a missing permission is found before the first step. Collective. Raises
    ConfigError if copies of another run are there, StorageError if nothing can be written."""

    def claim() -> None:
        if remote is None:
            return
        remote.folder.check_writer = folder.check_not_replaced
        if remote.is_read:  # else the store did not answer: the user asked to go on with a warning
            remote.claim(folder.run_id)

    if settings.copy_to is not None:
        world.on_main(claim)
    return CheckpointCopies(settings, folder, remote)


class _Deadline:
    """The end of a wait that becomes limited, to `seconds`, once `is_stopping` returns True."""

    def __init__(self, is_stopping: Callable[[], bool], seconds: float) -> None:
        self._is_stopping, self._seconds = is_stopping, seconds
        self._at: float | None = None

    @property
    def has_passed(self) -> bool:
        """True once the time is over."""
        if self._at is None and self._is_stopping():
            self._at = time.monotonic() + self._seconds
        return self._at is not None and time.monotonic() >= self._at
