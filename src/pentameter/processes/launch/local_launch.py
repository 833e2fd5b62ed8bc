"""`--nproc N`: run the same command as N processes on this machine, connected over loopback only.

No process listens for the rendezvous: they write their addresses to a file in a private folder, the
launch folder. Each process is a `Child`: signals reach it once, through the launcher, and it ends
when the launcher is gone.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pentameter.disk.lock import scratch_folder
from pentameter.disk.owner import is_stopped
from pentameter.errors import InterruptedRunError, StorageError, TrainingFailedError, exit_reason
from pentameter.machine.child import Child, ForkedChild
from pentameter.machine.cores_and_memory import check_memory, check_processes, has_gpu_file
from pentameter.processes.failures.activity import Watchdog, culprits, read_activity, stacks
from pentameter.processes.failures.failure import (
    GOES_BACK,
    Failure,
    WorkerFailedError,
    first_failure,
    print_failure,
    read_report,
    spelled,
)
from pentameter.processes.failures.flight_record import (
    read_flight_record,
    told_by_records,
    waits_on_nccl,
)
from pentameter.processes.group.rank import LaunchedRank
from pentameter.processes.launch.program import Launched, Program, worker_environment
from pentameter.processes.launch.stop_signals import handling, handling_stop_signals

if TYPE_CHECKING:
    from pentameter.config.schema import Config

GRACE_SECONDS = 4.0
"""Seconds in which the other processes may end by themselves after one failed, and again after
SIGTERM."""

SUSPEND_SECONDS = 10.0
"""Seconds from Ctrl-Z in which the processes may pause by themselves, between two steps."""

POLL_SECONDS = 0.05
# Signals from outside the program; SIGABRT may follow from another process's failure.
_ROOT_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


def run_local(
    program: Program,
    n_processes: int,
    *,
    grace_seconds: float = GRACE_SECONDS,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run `program` as `n_processes` processes, and return when all are done.

    Rank 0 inherits this process's stdout and stderr; every line that another rank prints appears on
    stderr, prefixed with its rank. Stop signals (SIGTERM, SIGINT, SIGUSR1, SIGHUP) are sent to all.
    When one process fails, the others get `grace_seconds` to end, then SIGTERM and as long again,
    then they are killed. If after a stop signal every process exceeds its current action's timeout
    (30 s at least), those that hang print their stacks, and all are killed. `look` is called every
    POLL_SECONDS.

    Raises WorkerFailedError with the first failure; its exit code is the process's, or 70 if the
    process was killed. Call it in the main thread.
    """
    with ExitStack() as stack:
        workers = Workers(stack.enter_context(scratch_folder()), grace_seconds)
        stack.enter_context(handling_stop_signals(workers.on_signal))
        stack.enter_context(handling_ctrl_z(lambda: workers))
        stack.callback(workers.end)
        workers.start(program, [Launched(rank, n_processes) for rank in range(n_processes)])
        while not workers.have_ended():
            look()
            time.sleep(POLL_SECONDS)
        failure = workers.failure()
    if failure is not None and failure.message:
        raise WorkerFailedError(failure)


def respawn(
    start: Callable[[int, bool], None],
    n_processes: int,
    n_restarts: int,
    *,
    may_shrink: bool,
    progress: Callable[[], object],
) -> None:
    """Call `start(n_processes, False)`, and again after each lost process, until it returns. After
    `n_restarts` losses without progress between them, raise the last WorkerFailedError.

    start: runs the given number of processes to their end; its second argument is True after a
        loss. A WorkerFailedError that another try would not cure (`is_loss` is False) is raised at
        once.
    may_shrink: True to use one process less after a second loss without progress, and one less
        again after each further one; after progress, all.
    progress: returns a value that changes with every checkpoint.
    """
    n, n_lost, before = n_processes, 0, progress()
    while True:
        try:
            return start(n, n_lost > 0)
        except WorkerFailedError as error:
            now = progress()
            n_lost = n_lost + 1 if now == before else 1
            if not error.failure.is_loss or n_lost > n_restarts:
                raise
            before = now
            n = max(1, n_processes - n_lost + 1) if may_shrink else n_processes
            print_failure(error.failure, debug=False)
            left = f"{n_restarts - n_lost} more times without a new checkpoint"
            print(f"pentameter: starting {n} processes again, {left}", file=sys.stderr, flush=True)


def check_launch(
    config: Config,
    n_processes: int,
    launched: LaunchedRank | None,
    *,
    oversubscribe: bool,
    check_fit: bool,
    local_size: int | None = None,
) -> None:
    """Raise ConfigError if the processes of a run could not train together: too few cores for them,
    too little host memory for training on CPUs (checked with `check_fit`), or a layout that does
    not fit their number.

    It runs before data is read and before the processes meet, so that N of them do not print the
    same error.

    n_processes: all processes in the run.
    launched: from `find_rank` if a launcher started them; then cores and memory are not checked.
        None if `--nproc` will start them on this machine.
    local_size: how many of them this machine will start; None for all.
    oversubscribe: True to allow any number of processes per core.
    """
    from pentameter.estimating.bytes.plan_estimates import plan_state_bytes
    from pentameter.planning.layouts.layout import make_layout
    from pentameter.planning.layouts.layout_checks import check_layout
    from pentameter.planning.plan import make_plan, needs_data

    local_size = launched.local_size if launched is not None else local_size or n_processes
    if launched is None:
        check_processes(local_size, oversubscribe=oversubscribe)
    check_layout(make_layout(config.parallel, n_processes), config, local_size)
    if needs_data(config):
        return
    plan = make_plan(config, world_size=n_processes, local_size=local_size)
    on_gpu = config.train.device == "cuda" or (config.train.device == "auto" and has_gpu_file())
    if check_fit and launched is None and n_processes > 1 and not on_gpu:
        check_memory(local_size, plan_state_bytes(plan).state_bytes)


class Workers:
    """The processes of one launch on this machine: this object starts, watches and ends them.
    `folder` is the launch folder, for rendezvous and reports. After a failure the other processes
    have `grace_seconds` to end by themselves, and as long again after SIGTERM."""

    def __init__(self, folder: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        self.failures: list[Failure] = []
        """Failures of the processes that have ended."""
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._children: list[Child | ForkedChild] = []
        self._running: dict[int, Child | ForkedChild] = {}
        self._relays: list[threading.Thread] = []
        self.received: list[signal.Signals] = []
        """Stop signals forwarded to the processes so far."""
        self.received_at = 0.0
        self._failed_at: float | None = None
        self._hurried_at: float | None = None
        self._watchdog = Watchdog(folder)
        self._ended_by_us = False
        self._hanging: list[int] = []  # for which others waited until they were lost
        self._world_size = 0

    @property
    def pids(self) -> dict[int, int]:
        """Rank → process id of the processes that run."""
        return {rank: child.pid for rank, child in self._running.items()}

    def start(self, program: Program, processes: Sequence[Launched]) -> None:
        """Start `program` once for each of `processes`; no further ones once a stop signal has
        arrived. Raises StorageError if the system cannot start one."""
        try:
            for process in processes:
                self._world_size = process.world_size
                if self.received:
                    break
                child = _started(program, process, self._folder, self._relays)
                self._children.append(child)
                self._running[process.rank] = child
                for number in self.received:  # signals received while it was being started
                    child.send_signal(number)
        except OSError as error:
            raise StorageError(
                f"cannot start process {len(self._children) + 1} of {len(processes)}: "
                f"{error.strerror}; a smaller --nproc may fit"
            ) from error

    def have_ended(self) -> bool:
        """Look at the processes, end those that hang after a failure or a stop signal, and return
        True once all have ended. To be called repeatedly until then."""
        for rank, child in list(self._running.items()):
            code = child.poll()
            if code is None:
                continue
            del self._running[rank]
            ended = self._failures_of(rank, code)
            self.failures += ended
            # An agreed stop may take another rank longer, so it alone sets no deadline. If a
            # signal ended one rank only, another may wait in C++, deaf to Python's signals.
            if self._failed_at is None and not all(failure.agreed for failure in ended):
                self._failed_at = time.monotonic()
        if self._hurried_at is None and len(self.received) > 1:
            self._hurried_at = time.monotonic()
        self._end_overdue()
        self.failures += self._end_silent()
        if self._running:
            return False
        while self._relays:
            self._relays.pop().join(1.0)  # a process that outlives the worker may hold the pipe
        return True

    def _end_overdue(self) -> None:
        """End processes that should have ended by themselves; called again and again while some
        run.

        After the first failure and the grace time the running processes get SIGTERM, after twice
        that time SIGKILL; after the second stop signal and the grace time SIGKILL. If all failures
        are lost connections, a running process hangs: its stacks are printed, and it gets SIGKILL
        at once, as the ranks with which it could save are gone.
        """
        failed_at, hurried_at = self._failed_at, self._hurried_at
        now = time.monotonic()
        if failed_at is not None and now > failed_at + self._grace_seconds:
            if all(failure.consequence for failure in self.failures):
                if not self._ended_by_us:
                    self._ended_by_us = True
                    _show_waits(self.failures)
                    self._hanging = self._show_stacks()
                self._kill()
            elif not self._ended_by_us:
                self._ended_by_us = True
                self.send(signal.SIGTERM)
            elif now > failed_at + 2 * self._grace_seconds:
                self._kill()
        if hurried_at is not None and now > hurried_at + self._grace_seconds:
            self._ended_by_us = True
            self._kill()

    def _end_silent(self) -> list[Failure]:
        """After a stop signal, if every running process has exceeded its action's timeout, print
        the stacks of those that seem to hang, and kill all. Return a list with one failure that
        names the hanging ranks; an empty list if nothing was done. All processes are silent in that
        case, since those that do not hang wait for one that does."""
        if not self._running or not self.received or self._ended_by_us:
            return []
        self._watchdog.look(self._running)
        if not self._watchdog.timed_out(self._running, self.received_at):
            return []
        self._ended_by_us = True
        silent = self._show_stacks()
        seconds = time.monotonic() - self.received_at
        message = (
            f"stopped by {self.received[0].name}, but {spelled(silent)} did nothing more for "
            f"{seconds:.0f} s {self._watchdog.of(silent[0])} and had to be killed; {GOES_BACK}"
        )
        self._kill()
        return [Failure(silent[0], InterruptedRunError.exit_code, message, 0.0)]

    def _show_stacks(self) -> list[int]:
        """Ask the running processes for their stacks, print on stderr those of the ranks that the
        others seem to wait for, and return these ranks."""
        pids = self.pids
        if not pids:
            return []
        stopped = [rank for rank, pid in pids.items() if is_stopped(pid)]
        shown = stacks(self._folder, pids)
        # On NCCL a rank waits for others wherever its stack needs the device's numbers.
        waits = waits_on_nccl(self._folder, pids)
        silent = stopped or culprits([rank for rank in pids if rank not in waits] or pids, shown)
        for rank in silent:
            lines = shown.get(rank, f"cannot show where it is, process {pids[rank]}").splitlines()
            if rank in stopped:
                lines.insert(0, f"is stopped, process {pids[rank]}")
            _relay(rank, iter(lines))
        return silent

    def _failures_of(self, rank: int, code: int) -> list[Failure]:
        """Return the failure of the process that ended with exit code `code` (negative: the signal
        that ended it) as a list, empty if it did not fail. It is read from the report that the
        process left, or made from the code."""
        stopped, now = InterruptedRunError.exit_code, time.time()
        report = read_report(self._folder, rank)
        # Before it handled signals; it may die of its threads once it has reported that.
        interrupted = 128 + signal.SIGINT in (code, report and report.exit_code)
        if report is not None and not (interrupted and self.received):
            return [report]
        if code == 0:
            return []
        if len(self.received) > 1 and (code == stopped or self._ended_by_us):
            message = "stopped at once by a second signal; the same command continues"
            return [Failure(rank, stopped, message, now)]
        if self.received and (interrupted or code == stopped or -code in self.received):
            name = self.received[0].name
            message = f"stopped by {name} before the first step; the same command starts again"
            return [Failure(rank, stopped, message, now)]
        if code < 0 and self._ended_by_us:
            return []
        return [_unreported(rank, code, self._folder)]

    def failure(self) -> Failure | None:
        """Return the failure that caused the others, once all have ended; None if no process
        failed. If all have only lost another one on NCCL, its message names that one."""
        if not self.failures:
            return None
        first = first_failure(self.failures)
        if not first.consequence:
            return _with_wait(first, self.failures)
        said = told_by_records(self._folder, self._world_size, self._hanging)
        return first if said is None else replace(first, message=f"{said} {GOES_BACK.capitalize()}")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: forward it to all workers."""
        self.received_at = self.received_at or time.monotonic()
        self.received.append(signal.Signals(number))
        self.send(signal.Signals(number))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all workers."""
        for child in self._children:
            child.send_signal(number)

    def _kill(self) -> None:
        """Kill the running workers, with every process that they started."""
        for child in self._children:
            child.kill()

    def end(self) -> None:
        """Kill the workers that still run, and wait for them. This is not recorded as a failure."""
        self._ended_by_us = True
        for child in self._children:
            child.close()


def _started(
    program: Program, process: Launched, folder: Path, relays: list[threading.Thread]
) -> Child | ForkedChild:
    """Start one process with the launch folder `folder`, and return it; what it prints is relayed
    by a thread that is added to `relays`, unless its rank is 0."""
    environment = worker_environment(process, folder)
    if process.rank == 0:
        return program.start(environment, folder, None)
    read_end, write_end = os.pipe()
    said = io.TextIOWrapper(io.FileIO(read_end), "utf-8", errors="replace")
    try:
        child = program.start(environment, folder, write_end)
    finally:
        os.close(write_end)
    relay = threading.Thread(target=_relay, args=(process.rank, said), daemon=True)
    relay.start()
    relays.append(relay)
    return child


def handling_ctrl_z(workers: Callable[[], Workers | None]) -> AbstractContextManager[None]:
    """Return a context manager for a launcher: while its block runs, Ctrl-Z (SIGTSTP) suspends the
    processes that `workers` returns, then the launcher, and resuming it resumes them. Main thread
    only."""
    return handling({signal.SIGTSTP: _Suspension(workers).on_signal})


class _Suspension:
    """Handler of Ctrl-Z in a launcher: suspend the processes in `workers()` (None if there are
    none), then the launcher itself, and resume them when it is resumed. The processes need this, as
    they are in sessions of their own, which the terminal does not suspend.

    The first Ctrl-Z asks the processes to pause between two steps, where none waits for another. A
    rank suspended while it waits would find on resuming that its timeout is over. A second Ctrl-Z
    suspends at once.
    """

    def __init__(self, workers: Callable[[], Workers | None]) -> None:
        self._workers = workers
        self._until: float | None = None  # monotonic seconds, while the workers are asked

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTSTP."""
        if self._until is not None:
            self._until = 0.0
            return
        self._until = time.monotonic() + SUSPEND_SECONDS
        workers = self._workers()
        if workers is not None:
            self._suspend(workers)
        self._until = None  # the next request may come before we have gone on
        # By the system's own way: without a shell that could resume this process (`ssh -t HOST
        # pentameter …`) it does nothing, and all go on.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.on_signal)
        if workers is not None:
            workers.send(signal.SIGCONT)

    def _suspend(self, workers: Workers) -> None:
        workers.send(signal.SIGTSTP)
        while not (paused := all(map(is_stopped, workers.pids.values()))):
            if self._until is None or time.monotonic() > self._until:
                break
            time.sleep(POLL_SECONDS)
        if not paused and len(workers.pids) > 1:
            print(
                "pentameter: suspended within a step; after parallel.timeout_seconds the processes "
                "will have lost each other",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        workers.send(signal.SIGSTOP)


def _unreported(rank: int, code: int, folder: Path) -> Failure:
    """Return a Failure for a process that ended with exit code `code` (negative: the signal that
    ended it) without a report of its own. If NCCL's watchdog ended it because another process did
    not come to a collective, the Failure says so, with what the process's record in the launch
    folder tells."""
    latest = read_activity(folder, rank)
    record = read_flight_record(folder, rank) if -code == signal.SIGABRT else None
    if record is not None:
        waited, stack = "", ""
        if record.wait is not None:
            waited, stack = str(record.wait), record.wait.stack
        message = f"NCCL gave up waiting for another process {latest}. {GOES_BACK.capitalize()}"
        exit_code = TrainingFailedError.exit_code
        lost = Failure(rank, exit_code, message, time.time(), consequence=True)
        return replace(lost, waited=waited, stack=stack)
    message, now = f"{exit_reason(code)} and no report", time.time()
    if code < 0:
        where = f" {latest}" if latest.step else ""
        message = f"{exit_reason(code)}{where}; {GOES_BACK}"
        now = 0.0 if -code in _ROOT_CAUSES else now
        code = TrainingFailedError.exit_code
    return Failure(rank, code, message, now, killed=True)


def _with_wait(failure: Failure, failures: Sequence[Failure]) -> Failure:
    """Return `failure` with a further clause, if its process ended without a report: the collective
    in which the other processes, by their `failures`, waited for it in vain."""
    waited = next((each.waited for each in failures if each.waited), "")
    if failure.consequence or failure.traceback or not failure.message or not waited:
        return failure
    return replace(failure, message=f"{failure.message}. It did not reach {waited}")


def _show_waits(failures: Sequence[Failure]) -> None:
    """Print on stderr the functions in which ranks waited for one that was lost; ranks with the
    same functions are printed together."""
    alike: dict[str, list[int]] = {}
    for failure in failures:
        if failure.stack:
            alike.setdefault(f"{failure.waited}:\n{failure.stack}", []).append(failure.rank)
    for text, ranks in alike.items():
        who = spelled(sorted(ranks))
        print(f"{who} waited at {text}", file=sys.stderr, flush=True)


def _relay(rank: int, lines: Iterator[str]) -> None:
    """Print each of a process's output lines on stderr, prefixed with its rank."""
    name = f"rank {rank}: "
    for line in lines:
        with suppress(OSError, ValueError):  # nobody reads it; keep the process's pipe empty
            print(f"{name}{line.rstrip().removeprefix(name)}", file=sys.stderr, flush=True)
