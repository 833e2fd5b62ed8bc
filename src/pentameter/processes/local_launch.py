"""`--nproc N`: the same command as N processes of this machine, which meet over loopback only.

Nothing listens for them to meet: they write their addresses to a file in a private folder. Each is
a `Child`: signals reach it once, through the launcher, and it ends when the launcher is gone.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from pentameter.disk.lock import scratch_folder
from pentameter.errors import InterruptedRunError, StorageError, TrainingFailedError
from pentameter.machine.child import Child, exit_reason
from pentameter.machine.cores import chosen_threads, usable_cores
from pentameter.processes.failure import (
    Failure,
    WorkerFailedError,
    first_failure,
    read_report,
    spelled,
)
from pentameter.processes.place import LAUNCH_FOLDER
from pentameter.processes.progress import Watchdog, culprits, is_stopped, stacks
from pentameter.processes.stop_signals import minded_stop_signals

GRACE_SECONDS = 4.0
"""Time for the others to end by themselves after a failure, and again after SIGTERM."""

_POLL_SECONDS = 0.05
# Signals that come from outside the program; an abort may be the answer to another's failure.
_ROOT_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


def run_local(
    command: Sequence[str], n_processes: int, *, grace_seconds: float = GRACE_SECONDS
) -> None:
    """Run `command` as `n_processes` processes, and return when all are done.

    Rank 0 has this process's stdout and stderr; what another rank says appears on stderr, a line
    at a time behind its rank. STOP_SIGNALS go to all of them. When one fails the others get
    `grace_seconds` to end, then SIGTERM and as long again; before that, those that hang show their
    stacks. So they do when none has made progress for a while after a signal, and then they end.

    Raises WorkerFailedError with the first failure; its exit code is that of the process, 70 for
    one that was killed. Call it in the main thread.
    """
    with ExitStack() as stack:
        workers = _Workers(stack.enter_context(scratch_folder()), grace_seconds)
        handlers = dict.fromkeys(minded_stop_signals(), workers.on_signal)
        for number, handler in {**handlers, signal.SIGTSTP: workers.on_suspend}.items():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        stack.callback(workers.end)
        workers.start(command, n_processes)
        failures = workers.wait()
    if failures:
        failure = first_failure(failures)
        if failure.message:
            raise WorkerFailedError(failure)


def python_command(*arguments: str) -> list[str]:
    """The command that runs `pentameter ARGUMENTS` with this interpreter and search path."""
    # -P: the folder that this process happens to be in may hold a `numpy.py` of somebody's. But a
    # process that found its own modules there, as `python -m` does, lets its workers do so too.
    safe = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe, "-m", "pentameter", *arguments]


def worker_environment(
    rank: int, n_processes: int, folder: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of one process of a launch."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    n_threads = chosen_threads(environ) or max(1, len(usable_cores()) // n_processes)
    return {
        **environ,
        LAUNCH_FOLDER: str(folder),
        "RANK": str(rank),
        "WORLD_SIZE": str(n_processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_processes),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(n_threads),
    }


class _Workers:
    """The worker processes of one launch."""

    def __init__(self, folder: Path, grace_seconds: float) -> None:
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._children: list[Child] = []
        self._running: dict[int, Child] = {}
        self._relays: list[threading.Thread] = []
        self._received: list[signal.Signals] = []
        self._received_at = 0.0
        self._watchdog = Watchdog(folder)
        self._ended_by_us = False

    def start(self, command: Sequence[str], n_processes: int) -> None:
        """Start them all, or none where the system cannot start one."""
        try:
            for rank in range(n_processes):
                if self._received:
                    break
                child = Child(
                    command,
                    worker_environment(rank, n_processes, self._folder),
                    folder=self._folder,
                    stdout=subprocess.PIPE if rank else None,
                    stderr=subprocess.STDOUT if rank else None,
                )
                self._children.append(child)
                for number in self._received:  # those that came while it was being started
                    child.process.send_signal(number)
                if child.process.stdout is not None:
                    said = io.TextIOWrapper(child.process.stdout, "utf-8", errors="replace")
                    relay = threading.Thread(target=_relay, args=(rank, said), daemon=True)
                    relay.start()
                    self._relays.append(relay)
        except OSError as error:
            raise StorageError(
                f"cannot start process {len(self._children) + 1} of {n_processes}: "
                f"{error.strerror}; a smaller --nproc may fit"
            ) from error

    def wait(self) -> list[Failure]:
        """The failures, once every process has ended."""
        failures: list[Failure] = []
        self._running = dict(enumerate(self._children))
        failed_at = hurried_at = None
        while self._running:
            for rank, child in list(self._running.items()):
                code = child.process.poll()
                if code is None:
                    continue
                del self._running[rank]
                ended = self._failures_of(rank, code)
                failures += ended
                # A stop as agreed may take another longer, so no hurry for that alone. For one that
                # a signal ended on its own, another may wait in C++, where Python hears of none.
                if failed_at is None and not all(failure.agreed for failure in ended):
                    failed_at = time.monotonic()
            if hurried_at is None and len(self._received) > 1:
                hurried_at = time.monotonic()
            self._press(failed_at, hurried_at, failures)
            failures += self._give_up_the_silent()
            time.sleep(_POLL_SECONDS)
        for relay in self._relays:
            relay.join(1.0)  # a process that outlives the worker may hold the pipe
        return failures

    def _press(
        self, failed_at: float | None, hurried_at: float | None, failures: list[Failure]
    ) -> None:
        """Make those end that should have: after a failure, and after a second signal.

        Where processes have only missed another one so far, that one hangs: it shows its stacks,
        and is killed, since it has nobody to save anything with.
        """
        now = time.monotonic()
        if failed_at is not None and now > failed_at + self._grace_seconds:
            if all(failure.consequence for failure in failures):
                if not self._ended_by_us:
                    self._ended_by_us = True
                    self._show_stacks()
                self._kill()
            elif not self._ended_by_us:
                self._ended_by_us = True
                self._send(signal.SIGTERM)
            elif now > failed_at + 2 * self._grace_seconds:
                self._kill()
        if hurried_at is not None and now > hurried_at + self._grace_seconds:
            self._ended_by_us = True
            self._kill()

    def _give_up_the_silent(self) -> list[Failure]:
        """End all that run where a signal asked them to stop and none has made progress since.

        Returns the failure that says so. One that hangs makes all others wait for it.
        """
        if not self._running or not self._received or self._ended_by_us:
            return []
        self._watchdog.look(self._running)
        if not self._watchdog.timed_out(self._running, self._received_at):
            return []
        self._ended_by_us = True
        silent = self._show_stacks()
        seconds = time.monotonic() - self._received_at
        message = (
            f"stopped by {self._received[0].name}, but {spelled(silent)} did nothing more for "
            f"{seconds:.0f} s {self._watchdog.place(silent[0])} and had to be killed; the same "
            "command goes back to the last checkpoint"
        )
        self._kill()
        return [Failure(silent[0], InterruptedRunError.exit_code, message, 0.0)]

    def _show_stacks(self) -> list[int]:
        """The ranks that the others wait for, as far as it can be told; their stacks go to
        stderr."""
        pids = {rank: child.pid for rank, child in self._running.items()}
        if not pids:
            return []
        shown = stacks(self._folder, pids)
        silent = culprits(pids, shown)
        for rank in silent:
            said = "is stopped" if is_stopped(pids[rank]) else "cannot show where it is"
            _relay(rank, iter(shown.get(rank, f"{said}, process {pids[rank]}").splitlines()))
        return silent

    def _failures_of(self, rank: int, code: int) -> list[Failure]:
        """The failure that a process ended with, by its report or exit code; empty for none."""
        stopped, now = InterruptedRunError.exit_code, time.time()
        report = read_report(self._folder, rank)
        interrupted = code == 128 + signal.SIGINT  # before it minded signals
        if report is not None and not (interrupted and self._received):
            return [report]
        if code == 0:
            return []
        if len(self._received) > 1 and (code == stopped or self._ended_by_us):
            message = "stopped at once by a second signal; the same command continues"
            return [Failure(rank, stopped, message, now)]
        if self._received and (interrupted or code == stopped or -code in self._received):
            name = self._received[0].name
            message = f"stopped by {name} before the first step; the same command starts again"
            return [Failure(rank, stopped, message, now)]
        if code < 0 and self._ended_by_us:
            return []
        message = f"{exit_reason(code)} and no report"
        if code < 0:
            message = f"{exit_reason(code)}; the same command goes back to the last checkpoint"
            now = 0.0 if -code in _ROOT_CAUSES else now
            code = TrainingFailedError.exit_code
        return [Failure(rank, code, message, now)]

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal that asks to stop on to all workers."""
        self._received_at = self._received_at or time.monotonic()
        self._received.append(signal.Signals(number))
        self._send(signal.Signals(number))

    def on_suspend(self, number: int, frame: FrameType | None) -> None:
        """Suspend at Ctrl-Z with all workers: in sessions of their own they would go on."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            child.process.send_signal(number)  # which spares one that has ended

    def _kill(self) -> None:
        """End those that run, with whatever they started."""
        for child in self._children:
            child.kill()

    def end(self) -> None:
        """End those that still run."""
        for child in self._children:
            child.close()


def _relay(rank: int, lines: Iterator[str]) -> None:
    """Copy what a process says to stderr, behind its rank."""
    name = f"rank {rank}: "
    for line in lines:
        with suppress(OSError, ValueError):  # nobody reads; keep the process's pipe empty
            print(f"{name}{line.rstrip().removeprefix(name)}", file=sys.stderr, flush=True)
