"""Verify's worker processes: started on demand, given one job per rank, replaced when one fails."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from pentameter.disk.lock import scratch_folder
from pentameter.errors import TrainingFailedError, exit_reason
from pentameter.machine.child import ChildEndedError, Forked, ForkServer
from pentameter.processes.launch.program import Launched, worker_environment
from pentameter.verify.jobs import Failed, Job

GRACE_SECONDS = 0.5
"""Seconds for which replies are still awaited after one worker has failed: the first to report need
not be the cause."""
JOBS_OF_A_WORKER = 10
"""Number of `run` calls after which all workers are replaced. Each job leaves process groups that
PyTorch keeps until the process ends, and gloo's idle threads wake up a hundred times a second:
eight workers kept a core busy after twenty cases."""


class CaseFailedError(TrainingFailedError):
    """A case gave no numbers, because a process in it failed, died or hangs. `worker_traceback` is
    the failed worker's traceback; empty if it left none."""

    def __init__(self, message: str, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback


class Workers:
    """Context manager for verify's worker processes, which wait for jobs. They are started on
    demand, and killed when the block ends.

    They are forked from a fork server that has imported torch, so that replacing a broken worker
    takes next to no time.
    """

    def __init__(self) -> None:
        self._workers: list[Forked] = []
        self._n_done = 0
        self._numbers = count()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undone at once if the fork server cannot be started
            self._folder = stack.enter_context(scratch_folder())
            self._errors_path = self._folder / "stderr"
            errors = stack.enter_context(self._errors_path.open("ab"))
            self.server = ForkServer(
                "pentameter.verify.steps",
                environment={
                    **worker_environment(Launched(0, 1), self._folder),
                    "OMP_NUM_THREADS": "1",
                },
                folder=self._folder,
                output=errors,
            )
            stack.callback(self.server.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        # If the fork server is gone, its remaining children have no jobs.
        with self._stack, suppress(ChildEndedError):
            self._end(self._workers)

    def new_file(self) -> str:
        """Return an unused file path, which is not created yet, for the rendezvous of a case's
        processes."""
        return str(self._folder / f"rendezvous-{next(self._numbers)}")

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Run the jobs at the same time, each in a worker of its own, and return their results.
        Jobs and results are in order of rank.

        A worker is used again for later jobs, unless a job had `prepare` or sharded experts:
        DTensor keeps process groups for equal meshes, and the experts' groups have other names in
        each layout.

        Raises CaseFailedError if a worker fails, dies or does not reply within the job's
        `timeout_seconds`; the workers are then replaced. Raises TrainingFailedError if workers
        cannot be started.
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
                reusable = not any(job.prepare or job.shards_experts for job in jobs)
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
        """Send job i to worker i, wait, and return the replies by rank: a result, a Failed, or None
        for a process that ended. Replies may be missing after a timeout, or GRACE_SECONDS after a
        failure."""
        for worker, job in zip(busy, jobs, strict=True):
            with suppress(OSError):  # it is gone, as the wait below will show
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
        """Raise CaseFailedError unless every worker has replied with a result. The error names the
        failure from which others follow: a process that ended, else an error, else an error that
        only says that another process is gone, else a missing reply; of several, the first.

        answers: the replies by rank.
        busy: the workers, by rank.
        said: offset in the file of the workers' stderr at which this run began.
        timeout_seconds: for the message.
        """
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
        """Kill those of `workers` that are still in use, never to be used again; return their exit
        codes."""
        running = [worker for worker in workers if worker in self._workers]
        self._workers = [worker for worker in self._workers if worker not in running]
        return [self.server.end(worker) for worker in running]

    def _last_words(self, start: int) -> str:
        """Return the last non-blank line in the workers' stderr since file offset `start`; empty
        if there is none."""
        with self._errors_path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
