"""The processes that compute a case: jobs go out, numbers come back, and a failure is named."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self

from pentameter.config.schema import Config
from pentameter.disk.lock import scratch_folder
from pentameter.errors import TrainingFailedError
from pentameter.machine.child import ChildEndedError, Forked, ForkServer, exit_reason
from pentameter.processes.local_launch import worker_environment

if TYPE_CHECKING:  # which imports torch
    from pentameter.verify.proof import SentModel

GRACE_SECONDS = 0.5
"""Time for the others to fail too, after one has: the first to say so need not be the cause."""
JOBS_OF_A_WORKER = 10
"""Jobs after which workers are replaced. Each leaves process groups that PyTorch keeps to the end
of the process, and gloo's idle threads wake up a hundred times a second: eight workers after twenty
cases kept a core busy."""


@dataclass(frozen=True)
class Job:
    """The part of a case that one of its `world_size` processes computes."""

    config: Config
    n_steps: int
    rank: int
    world_size: int
    rendezvous_file: str
    timeout_seconds: float
    prepare: str | None = None
    """`module:function`, called first, without arguments. Tests plant faults with it."""
    model: SentModel | None = None
    """Somebody's own model; None for the built-in GPT."""


@dataclass(frozen=True)
class Failed:
    """A worker's answer to a job that raised."""

    message: str
    """The last line of the traceback."""
    traceback: str
    is_consequence: bool
    """True if it only says that another worker is gone."""


class CaseFailedError(TrainingFailedError):
    """A case without numbers: a process of it failed, died or hangs."""

    def __init__(self, message: str, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback


class Workers:
    """Processes that wait for jobs; they exist while the block runs, and are made when needed.

    They are forked from a fork server that has imported torch, so that a worker that is spoilt is
    replaced in no time. Leaving the block ends them.
    """

    def __init__(self) -> None:
        self._workers: list[Forked] = []
        self._n_done = 0
        self._numbers = count()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undone now where the fork server cannot be started
            self._folder = stack.enter_context(scratch_folder())
            self._errors_path = self._folder / "stderr"
            errors = stack.enter_context(self._errors_path.open("ab"))
            self.server = ForkServer(
                "pentameter.verify.steps",
                environment={**worker_environment(0, 1, self._folder), "OMP_NUM_THREADS": "1"},
                folder=self._folder,
                output=errors,
            )
            stack.callback(self.server.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        # Where the fork server is gone, what it left has no jobs.
        with self._stack, suppress(ChildEndedError):
            self._end(self._workers)

    def new_file(self) -> str:
        """A path that is not used yet, for the rendezvous of the processes of a case."""
        return str(self._folder / f"rendezvous-{next(self._numbers)}")

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """The answers to the jobs, each computed by a worker of its own at the same time.

        Processes of a job that has a `prepare` do no other job, others some. Raises CaseFailedError
        where one fails, dies or has not answered in time; the processes are then replaced.
        """
        said = self._errors_path.stat().st_size
        reusable = False
        try:
            while len(self._workers) < len(jobs):
                self._workers.append(self.server.fork("pentameter.verify.steps:answer"))
            busy = self._workers[: len(jobs)]
            try:
                answers = self._ask(busy, jobs)
                self._check(answers, busy, said, jobs[0].timeout_seconds)
                reusable = all(job.prepare is None for job in jobs)
            finally:
                self._n_done += 1
                if not reusable:
                    self._end(busy)
                elif self._n_done % JOBS_OF_A_WORKER == 0:
                    self._end(self._workers)
        except ChildEndedError as error:
            raise TrainingFailedError(
                "the processes of verify cannot be started: "
                + (self._last_words(0) or "their parent ended without a word")
            ) from error
        return [answers[rank] for rank in range(len(jobs))]

    def _ask(self, busy: Sequence[Forked], jobs: Sequence[Job]) -> dict[int, Any]:
        """The answers by rank, None of a process that is gone; incomplete after a failure or when
        time is up."""
        for worker, job in zip(busy, jobs, strict=True):
            with suppress(OSError):  # it is gone, which the next wait tells
                worker.connection.send(job)
        deadline = time.monotonic() + jobs[0].timeout_seconds
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
        self, answers: dict[int, Any], busy: Sequence[Forked], said: int, timeout_seconds: float
    ) -> None:
        """Raise CaseFailedError unless all is well, with the failure that others follow from: the
        end of a process, before an error, before the error that another process is gone."""
        for rank, answer in answers.items():
            if answer is None:
                reason, last = exit_reason(self._end([busy[rank]])[0]), self._last_words(said)
                raise CaseFailedError(f"rank {rank} {reason}{': ' if last else ''}{last}")
        failed = [(rank, answer) for rank, answer in answers.items() if isinstance(answer, Failed)]
        if failed:
            rank, failure = min(failed, key=lambda item: (item[1].is_consequence, item[0]))
            raise CaseFailedError(f"rank {rank}: {failure.message}", failure.traceback)
        missing = sorted(set(range(len(busy))) - set(answers))
        if missing:
            ranks = ", ".join(map(str, missing))
            raise CaseFailedError(f"no answer in {timeout_seconds:g} seconds from rank {ranks}")

    def _end(self, workers: Sequence[Forked]) -> list[int]:
        """Exit codes of workers, which end now unless they have ended; none is used again."""
        running = [worker for worker in workers if worker in self._workers]
        self._workers = [worker for worker in self._workers if worker not in running]
        return [self.server.end(worker) for worker in running]

    def _last_words(self, start: int) -> str:
        """The last line that processes have written to stderr from place `start` on."""
        with self._errors_path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
