"""The processes that compute a case, from the side that asks them to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from pentameter.errors import TrainingFailedError
from pentameter.processes.local_launch import worker_environment
from pentameter.verify.job import Failed, Job
from pentameter.verify.nursery import REQUEST_BYTES

GRACE_SECONDS = 0.5
"""What the others have to fail too, after one has: the first to say so need not be the cause."""

_START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from pentameter.verify.nursery import tend; tend(int(sys.argv[1]), sys.argv[2])"
)


class CaseFailedError(TrainingFailedError):
    """A case gave no numbers: a process of it failed, died or hangs."""

    def __init__(self, message: str, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback


@dataclass(frozen=True)
class _Worker:
    pid: int
    connection: Connection


class Workers:
    """Processes that wait for jobs; they exist while the block runs, and are made when needed.

    They are processes of a session of their own: Ctrl-C reaches this process alone, and leaving
    the block ends them. Should this process be killed, they end by themselves.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._stack = ExitStack()
        self._numbers = count()

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(
            prefix="pentameter-verify-", ignore_cleanup_errors=True
        )
        self._folder = Path(self._stack.enter_context(folder))
        try:
            self._start_nursery()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def new_file(self) -> str:
        """A path that is not used yet, for the processes of a case to meet at."""
        return str(self._folder / f"meeting-{next(self._numbers)}")

    def run(self, jobs: Sequence[Job], *, timeout_seconds: float) -> list[Any]:
        """What the jobs returned, each done by a process of its own at the same time.

        Processes of a job that has a `prepare` do no other job. Raises CaseFailedError where one
        fails, dies or has not answered in time; the processes are then replaced.
        """
        said = self._errors_path.stat().st_size
        while len(self._workers) < len(jobs):
            self._workers.append(self._fork())
        busy = self._workers[: len(jobs)]
        reusable = False
        try:
            answers = self._ask(busy, jobs, timeout_seconds)
            self._check(answers, busy, said, timeout_seconds)
            reusable = all(job.prepare is None for job in jobs)
        finally:
            if not reusable:
                self._end(busy)
        return [answers[rank] for rank in range(len(jobs))]

    def _ask(
        self, busy: Sequence[_Worker], jobs: Sequence[Job], timeout_seconds: float
    ) -> dict[int, Any]:
        """The answers by rank, None of a process that is gone; incomplete after a failure or when
        time is up."""
        for worker, job in zip(busy, jobs, strict=True):
            with suppress(OSError):  # it is gone, which the next wait tells
                worker.connection.send(job)
        deadline = time.monotonic() + timeout_seconds
        ranks = {worker.connection: rank for rank, worker in enumerate(busy)}
        answers: dict[int, Any] = {}
        while ranks and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(ranks), left):
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = None
                if answers[rank] is None or isinstance(answers[rank], Failed):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _check(
        self, answers: dict[int, Any], busy: Sequence[_Worker], said: int, timeout_seconds: float
    ) -> None:
        """Raise CaseFailedError unless all is well, with the failure that others follow from: the
        end of a process, before an error, before the error that another process is gone."""
        for rank, answer in answers.items():
            if answer is None:
                raise CaseFailedError(f"rank {rank} {self._death(busy[rank], said)}")
        failed = [(rank, answer) for rank, answer in answers.items() if isinstance(answer, Failed)]
        if failed:
            rank, failure = min(failed, key=lambda item: (item[1].is_consequence, item[0]))
            raise CaseFailedError(f"rank {rank}: {failure.message}", failure.traceback)
        missing = sorted(set(range(len(busy))) - set(answers))
        if missing:
            ranks = ", ".join(map(str, missing))
            raise CaseFailedError(f"no answer in {timeout_seconds:g} seconds from rank {ranks}")

    def _death(self, worker: _Worker, said: int) -> str:
        code = self._end([worker])[0]
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
            if -code == signal.SIGKILL:
                how += " (out of memory?)"
        else:
            how = f"ended with exit code {code}"
        last = self._last_words(said)
        return f"{how}: {last}" if last else how

    # -- the nursery ----------------------------------------------------------------------------

    def _start_nursery(self) -> None:
        self._errors_path = self._folder / "stderr"
        here, there = socket.socketpair()
        self._stack.callback(here.close)
        self._control = here
        environment = {**worker_environment(0, 1, self._folder), "OMP_NUM_THREADS": "1"}
        with there, self._errors_path.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(there.fileno()), str(self._folder), *sys.path],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(there.fileno(),),
                start_new_session=True,
            )
        self.nursery_pid = process.pid
        self._stack.callback(_kill, process)
        self._stack.callback(self._end_all)

    def _fork(self) -> _Worker:
        own, theirs = Pipe()
        with theirs:
            pid = self._request("fork", theirs.fileno())
        return _Worker(pid, own)

    def _end(self, workers: Sequence[_Worker]) -> list[int]:
        """Exit codes of workers, which end now unless they have ended; none is used again."""
        codes = []
        for worker in workers:
            if worker in self._workers:
                self._workers.remove(worker)
                codes.append(self._request(f"end {worker.pid}"))
                worker.connection.close()
        return codes

    def _end_all(self) -> None:
        with suppress(TrainingFailedError):  # the nursery is gone; what it left has no more jobs
            self._end(list(self._workers))

    def _request(self, text: str, *descriptors: int) -> int:
        answer = b""
        with suppress(OSError):
            socket.send_fds(self._control, [text.encode()], descriptors)
            answer = self._control.recv(REQUEST_BYTES)
        if not answer:
            raise TrainingFailedError(
                "the processes of verify cannot be started: "
                + (self._last_words(0) or "their parent ended without a word")
            )
        return int(answer)

    def _last_words(self, start: int) -> str:
        """The last line that processes have written to stderr from place `start` on."""
        with self._errors_path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _kill(nursery: subprocess.Popen[bytes]) -> None:
    """End the nursery and its workers, which are a process group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(nursery.pid, signal.SIGKILL)
    nursery.wait()
