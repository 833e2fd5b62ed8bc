"""Copies of a run's checkpoints in `checkpoint.copy_to`, made by a thread of rank 0 while training
goes on.

A checkpoint is copied once it is committed in the run folder; training waits for copies only at its
end. If saves are faster than copies, the newest one is copied next, and those between are left out,
but for the ones that a run resumed from it may return to: its best, and those to roll back to,
which are copied before it; one of these that is damaged is left out, with a warning. A copy that
fails is made up for by the next one.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pentameter.checkpoint.folders.opening import read_own_manifest
from pentameter.checkpoint.folders.remote_copies import RemoteCopies
from pentameter.config.schema import CheckpointConfig
from pentameter.config.urls import shown_url
from pentameter.disk.atomic import MAX_JSON_BYTES, read_regular
from pentameter.disk.remote_folder import PAUSES, SAY_AFTER_SECONDS, Attempts
from pentameter.errors import CorruptError, PentameterError, StorageError
from pentameter.processes.failures.activity import STARTING
from pentameter.processes.group.world import PAUSE_SECONDS, World
from pentameter.record.checkpoints import step_folder_name
from pentameter.record.events import CopyMetrics
from pentameter.record.log_files import MAX_METRICS_BYTES
from pentameter.train.keep.run_folder import RunFolder

COPIED_FILES = ("plan.json", "environment.json", "metrics.jsonl", "log.txt", "config.toml")
"""Files of the run that are copied along with each checkpoint. Its samples are too, packed into one
object, SAMPLES_NAME."""
SAMPLES_NAME = "samples.json"
MOST_TIMES_SAVED = 5
"""Times that a checkpoint may be saved again at its step while it is copied."""
_READINGS = 5  # of a manifest, PAUSE_SECONDS apart
_GRACE_SECONDS = 1.0  # for the thread that copies to give up by itself


@dataclass(frozen=True)
class _Job:
    """One job for the thread that copies checkpoints to `checkpoint.copy_to`: the step of the
    checkpoint to copy, and the steps of earlier ones that a run resumed from it may need."""

    step: int
    needs: tuple[int, ...]
    asked_at: float
    """Seconds on the performance counter."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps to copy, in order: first those that the newest checkpoint needs."""
        return *(need for need in self.needs if need != self.step), self.step


def _not_copied(step: int | None, settings: CheckpointConfig) -> str:
    """Return a clause that says which step is not copied. `step` is None for a job that only
    removes copies."""
    url = shown_url(settings.copy_to or "")
    return f"{url} is not tidied up" if step is None else f"step {step} is not copied to {url}"


class _Copier:
    """Copies checkpoints of the run in `folder` to the store `remote`, one job at a time, in the
    copying thread."""

    def __init__(self, settings: CheckpointConfig, folder: RunFolder, remote: RemoteCopies) -> None:
        self._settings, self._folder, self._remote = settings, folder, remote
        self._damaged: set[int] = set()  # steps that others need and cannot be copied
        self.words: deque[str] = deque()
        """Warnings about checkpoints left out, not yet printed."""

    def copy(self, job: _Job) -> int:
        """Copy the checkpoints of a job, and return how many bytes were written. A damaged earlier
        checkpoint is left out; any other error is raised."""
        n_bytes = 0
        for step in job.steps:
            path = self._folder.store.folder / step_folder_name(step)
            if step == job.step:
                n_bytes += self._add(path, job)
                self._damaged.discard(step)
            elif step not in self._damaged and path.is_dir():  # a better one may have followed
                try:
                    n_bytes += self._add(path, job)
                except CorruptError as error:  # the newest one is copied all the same
                    self._damaged.add(step)
                    self.words.append(
                        f"{_not_copied(step, self._settings)}: {error}; later ones are copied"
                    )
        return n_bytes

    def _add(self, path: Path, job: _Job) -> int:
        """Copy the checkpoint at `path`, and return the bytes that were written. If it is saved
        again at its step meanwhile, the newer content is copied."""
        for n_left in reversed(range(MOST_TIMES_SAVED)):
            before = _content(path)
            try:
                return self._remote.add(
                    path,
                    partial(_run_files, self._folder.path),
                    run_id=self._folder.run_id,
                    needs=job.needs,
                    keep_last=self._settings.keep_last,
                )
            except PentameterError:
                if not n_left or _content(path) == before:
                    raise
        raise AssertionError("unreachable")


class CheckpointCopies:
    """The copies of a run's checkpoints in a remote store (`checkpoint.copy_to`), made by rank 0 in
    a thread; `folder` is the run folder. Without `checkpoint.copy_to`, and on other ranks, where
    `remote` is None, the methods do nothing.

    All machines of a run see its folder, so one process can copy everything, and ranks need not
    agree on which copy is complete.
    """

    def __init__(
        self, settings: CheckpointConfig, folder: RunFolder, remote: RemoteCopies | None
    ) -> None:
        self._settings, self._remote = settings, remote
        self._changed = threading.Condition()
        self._next: _Job | None = None
        self._held: _Job | None = None
        self._now: _Job | None = None
        self._discard_after: int | None = None
        self._is_working = self._has_ended = False
        self._done: deque[CopyMetrics] = deque()
        self._copier = None if remote is None else _Copier(settings, folder, remote)
        self._thread: threading.Thread | None = None
        self.failure: StorageError | None = None
        """The error of the latest copy, if it failed."""
        self.attempts = Attempts() if remote is None else remote.folder.attempts

    @property
    def steps_in_use(self) -> set[int]:
        """The steps whose checkpoints are being copied or will be next. These checkpoints must not
        be removed."""
        with self._changed:
            jobs = (self._next, self._held, self._now)
            return {step for job in jobs if job is not None for step in job.steps}

    def request(self, step: int, needs: Collection[int], *, at_end: bool = False) -> None:
        """Have the checkpoint at `step` copied, and before it those at the steps in `needs` that
        exist. `at_end` says that the run ends at `step`: its copy then waits for `finish`, so that
        everything recorded until then is copied with it."""
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
        """Remove the copies of steps after `step` from the remote store, when the run has given up
        and removed these checkpoints."""
        if self._remote is None:
            return
        with self._changed:
            self._next = self._held = None
            self._discard_after = step
            self._start()

    def take_done(self) -> list[CopyMetrics]:
        """Return the metrics of each copy that was made, or has failed, since the last call."""
        with self._changed:
            done = [*self._done]
            self._done.clear()
            return done

    def finish(
        self, world: World, is_stopping: Callable[[], bool], say: Callable[[str], None]
    ) -> str | None:
        """Wait for all copies. Return a clause about what is not copied, the same on every rank, or
        None if all is. The wait ends after `checkpoint.copy_wait_seconds`, which count only while
        the store fails or once `is_stopping` returns True. `say` is called with a line when it
        takes long. Collective."""
        if self._settings.copy_to is None:
            return None
        self._release()
        wait = _Wait(self, is_stopping, self._settings.copy_wait_seconds, say)
        world.await_main(lambda: not wait.is_over(), "copying")
        return world.broadcast(self._not_copied())

    def finish_after_error(
        self, is_stopping: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        """Wait for all copies, for `checkpoint.copy_wait_seconds` at most. The wait ends once
        `is_stopping` returns True: a launcher that stops the other ranks after a loss wants to
        start them again. `say` as in `finish`. Not collective."""
        self._release()
        wait = _Wait(self, lambda: True, self._settings.copy_wait_seconds, say)
        while not (wait.is_over() or is_stopping()):
            time.sleep(PAUSE_SECONDS)

    def take_word(self) -> str | None:
        """Return a line to print that was not returned before: about a damaged checkpoint that was
        not copied, or about a store that has failed for some seconds. None if there is no such
        line."""
        if self._copier is not None and self._copier.words:
            return f"warning: {self._copier.words.popleft()}"
        word = self.attempts.take_word()
        return None if word is None else f"warning: {self.missing}: {word}"

    def _release(self) -> None:
        """Begin the copy that was held back until the run's end; the copying thread ends when
        nothing is left to do."""
        self.attempts.limit(self._settings.copy_wait_seconds)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            if self._held is not None:
                self._next, self._held = self._held, None
                self._start()

    @property
    def is_busy(self) -> bool:
        """True while something is being copied or removed, or is to be."""
        with self._changed:
            waiting = (self._next, self._discard_after)
            return self._is_working or any(each is not None for each in waiting)

    @property
    def missing(self) -> str:
        """A clause that names the newest step whose copy was asked for and is not made yet."""
        with self._changed:
            jobs = (self._held, self._next, self._now)
            steps = [job.step for job in jobs if job is not None]
            return _not_copied(max(steps, default=None), self._settings)

    def _not_copied(self) -> str | None:
        if not self.is_busy:
            return str(self.failure) if self.failure else None
        waited = f"{self._settings.copy_wait_seconds:g} s (checkpoint.copy_wait_seconds)"
        answer = f"; {self.attempts.answer}" if self.attempts.answer else ""
        return f"{self.missing}: it took longer than {waited}{answer}"

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
        """Make the copies of one job, and keep the result, or the error, for `take_done`."""
        assert self._copier is not None  # else nothing is requested
        n_bytes, failure = 0, None
        try:
            n_bytes = self._copier.copy(job)
        except Exception as error:  # each kind of file system has errors of its own
            told = error if isinstance(error, PentameterError) else repr(error)
            failure = StorageError(f"{_not_copied(job.step, self._settings)}: {told}")
        seconds = time.perf_counter() - job.asked_at
        with self._changed:
            self.failure = failure
            if n_bytes or failure is not None:
                error_text = None if failure is None else str(failure)
                self._done.append(CopyMetrics(job.step, n_bytes, seconds, error_text))


def _run_files(path: Path) -> dict[str, bytes]:
    """Return the own files of the run in the folder `path` as they are now, logs up to their last
    whole line."""
    files = {}
    for name in COPIED_FILES:
        with suppress(PentameterError):
            files[name] = read_regular(path / name, max_bytes=MAX_METRICS_BYTES)
    for name in ("metrics.jsonl", "log.txt"):
        content = files.get(name, b"")
        files[name] = content[: content.rfind(b"\n") + 1]
    texts = {}
    for each in sorted((path / "samples").glob("step-*.txt")):
        with suppress(PentameterError):  # no copy of a checkpoint fails for want of a sample
            sample = read_regular(each, max_bytes=MAX_JSON_BYTES)
            texts[each.name] = sample.decode(errors="replace")
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
        world.patiently_on_main(claim, STARTING, 0)
    return CheckpointCopies(settings, folder, remote)


def _content(path: Path) -> bytes | None:
    """Return bytes that identify what the checkpoint folder at `path` holds, from its manifest.
    Return None if the manifest cannot be read, as happens for a moment while another checkpoint is
    renamed to that path."""
    for _ in range(_READINGS):
        with suppress(PentameterError):
            return read_own_manifest(path).to_bytes()
        time.sleep(PAUSE_SECONDS)
    return None


@dataclass
class _Wait:
    """The wait for `copies` that are not made yet, at the end of a run. It lasts at most `seconds`,
    which count only while the store fails or once `is_stopping` returns True. After
    SAY_AFTER_SECONDS, `say` is called with a line to print: the store's answer, or that a copy is
    being made."""

    copies: CheckpointCopies
    is_stopping: Callable[[], bool]
    seconds: float
    say: Callable[[str], None]
    _ends_at: float = math.inf
    _says_at: float = field(default_factory=lambda: time.monotonic() + SAY_AFTER_SECONDS)

    def is_over(self) -> bool:
        """Return True once nothing is left to copy, or the time is up."""
        copies, now = self.copies, time.monotonic()
        if (word := copies.take_word()) is not None:
            self.say(word)
            self._says_at = math.inf
        if not copies.is_busy:
            return True
        if now >= self._says_at:
            self.say(f"{copies.missing} yet, and it is waited for")
            self._says_at = math.inf
        if self._ends_at == math.inf and self.is_stopping():
            # The thread, which gives up then, has something to say first.
            self._ends_at = now + self.seconds + _GRACE_SECONDS
        # The thread gives up by itself, unless a request hangs.
        if now < self._ends_at and copies.attempts.left_seconds > -_GRACE_SECONDS:
            return False
        copies.attempts.abandon()  # in a process that goes on, another run may copy there
        return True
