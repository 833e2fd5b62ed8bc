"""`--nodes MIN:MAX`: one launcher on each machine, which start a run's processes together, again
after a loss with the machines that are left, and again with one that has come.

A launcher follows the attempt that the nodes' folder names (`attempts.py`): it starts its share of
the processes, ends them when the attempt is over, and writes to its own file how they ended.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from pentameter.disk.lock import scratch_folder
from pentameter.errors import (
    InterruptedRunError,
    PentameterError,
    RunFolderInUseError,
    StorageError,
)
from pentameter.processes.attempts import (
    Attempt,
    Rules,
    next_attempt,
    read_attempt,
    write_attempt,
)
from pentameter.processes.failure import first_failure
from pentameter.processes.local_launch import POLL_SECONDS, Workers
from pentameter.processes.place import STORE
from pentameter.processes.program import Launched, Program
from pentameter.processes.roll import Node, Roll, free_port, own_address
from pentameter.processes.stop_signals import handling_stop_signals

SETTLE_SECONDS = 1.5
"""Seconds without a change among the nodes until those that are there begin."""


class RunFailedError(PentameterError):
    """The end of a run on several nodes, with the exit code of the process that failed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_on_nodes(
    program: Program,
    n_processes: int,
    folder: Path,
    rules: Rules,
    progress: Callable[[], str],
) -> None:
    """Run `program` as `n_processes` processes on this machine, together with the launchers of
    other machines that call this with the same `folder`, and return when the run is complete.

    progress: returns the newest checkpoint's name. Raises RunFailedError if a process failed in a
    way that another attempt would not cure, or too many attempts were lost; InterruptedRunError
    after a stop signal.
    """
    address, interface = own_address()
    with ExitStack() as stack:
        roll = Roll(folder, address, n_processes)
        stack.callback(roll.close)
        launcher = _Launcher(program, folder, roll, rules, progress, interface)
        stack.enter_context(handling_stop_signals(launcher.on_signal))
        stack.callback(launcher.end)
        while not launcher.is_done():
            time.sleep(POLL_SECONDS)


class _Launcher:
    """This machine's launcher, which is asked again and again whether the run `is_done`."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        roll: Roll,
        rules: Rules,
        progress: Callable[[], str],
        interface: str,
    ) -> None:
        self._program, self._folder, self._roll = program, folder, roll
        self._rules, self._progress, self._interface = rules, progress, interface
        self._before = read_attempt(folder)  # an earlier command's
        self._said = self._before
        self._mine = Attempt()  # the one whose processes were started last
        self._workers: Workers | None = None
        self._files = ExitStack()
        self._received: list[int] = []
        self._present: dict[str, Node] = {}
        self._changed_at = time.monotonic()

    def is_done(self) -> bool:
        """Decide, if it is this node's turn to, and follow the attempt. Return True once the run is
        complete. Raises RunFailedError and InterruptedRunError."""
        self._look()
        now = read_attempt(self._folder)
        if next(iter(self._present), None) == self._roll.me.name and self._roll.knows_all():
            now = self._decided(now)
        if now != self._said:
            self._said = now
            self._say(now)
        if self._workers is not None:
            self._follow(self._workers, now)
        elif self._received:
            self._roll.update(state="leaving")
            raise InterruptedRunError(
                f"stopped by {signal.Signals(self._received[0]).name}; the same command takes this "
                "node in again"
            )
        elif now.state == "running" and self._roll.me.name in now.members:
            if now.number > self._roll.me.attempt:
                self._start(now)
        elif now != self._before and now.state == "complete":
            return True
        elif now != self._before and now.state == "failed":
            raise RunFailedError(now.reason, now.exit_code)
        return False

    def _look(self) -> None:
        before = {name: (node.reaches, node.state) for name, node in self._present.items()}
        self._present = self._roll.present()
        if before != {name: (node.reaches, node.state) for name, node in self._present.items()}:
            self._changed_at = time.monotonic()

    def _decided(self, now: Attempt) -> Attempt:
        """Return the attempt that follows `now`, written for all nodes. A run that an earlier
        command ended begins anew."""
        if now.is_final:
            if now != self._before:
                return now
            now = Attempt(now.number)
        settled = time.monotonic() > self._changed_at + SETTLE_SECONDS
        following = next_attempt(
            now, self._present, self._rules, settled=settled, progress=self._progress()
        )
        if following != now:
            with contextlib.suppress(StorageError):  # tried again at the next turn
                write_attempt(self._folder, following)
                return following
        return now

    def _say(self, now: Attempt) -> None:
        """Print what has become of the run's nodes: the first of them does, for all."""
        if not now.members or now.members[0] != self._roll.me.name:
            return
        words = {"over": "the attempt is over", "stopping": "saving"}.get(now.state)
        if now.state == "running":
            n, n_nodes = sum(now.n_processes), len(now.members)
            words = f"attempt {now.number}: {n} process{'es' if n > 1 else ''} on "
            words += f"{n_nodes} node{'s' if n_nodes > 1 else ''}"
        if words:
            why = f": {now.reason}" if now.reason else ""
            print(f"pentameter: {words}{why}", file=sys.stderr, flush=True)

    def _start(self, now: Attempt) -> None:
        """Start this node's processes of the attempt `now`."""
        self._mine = now
        self._roll.update(attempt=now.number, state="running", message="", exit_code=0)
        index = now.members.index(self._roll.me.name)
        first, here = sum(now.n_processes[:index]), now.n_processes[index]
        variables = {
            STORE: now.store,
            "GLOO_SOCKET_IFNAME": self._interface,
            "NCCL_SOCKET_IFNAME": self._interface,
        }
        workers = Workers(self._files.enter_context(scratch_folder()))
        self._workers = workers
        workers.start(
            self._program,
            [
                Launched(first + local, sum(now.n_processes), local, here, variables)
                for local in range(here)
            ],
        )

    def _follow(self, workers: Workers, now: Attempt) -> None:
        """Look at this node's processes: end them as the attempt says, and note how they ended."""
        is_other = (now.number, now.members) != (self._mine.number, self._mine.members)
        is_over = is_other or now.state in ("over", "failed")
        if is_over or any(failure.killed for failure in workers.failures):
            workers.end()
        elif now.state == "stopping" and not workers.received:
            workers.on_signal(signal.SIGTERM, None)
        if not workers.have_ended():
            return
        failures = workers.failures
        self.end()
        store_port = free_port(self._roll.me.address)
        if is_over or not failures:
            self._roll.update(state="idle" if is_over else "done", store_port=store_port)
            return
        first = first_failure(failures)
        is_again = self._mine.number > self._before.number + 1
        state = "failed"
        if first.exit_code == InterruptedRunError.exit_code:
            state = "stopped"
        elif first.is_loss or (is_again and first.exit_code == RunFolderInUseError.exit_code):
            state = "lost"  # a process of an earlier attempt may hold the folder still
        message = f"rank {first.rank} {first.message}" if first.killed else first.message
        self._roll.update(
            state=state, message=message, exit_code=first.exit_code, store_port=store_port
        )

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: forward it to the processes; this node leaves when they have
        ended."""
        self._received.append(number)
        if self._workers is not None:
            self._workers.on_signal(number, frame)

    def end(self) -> None:
        """End this node's processes, and remove their files."""
        if self._workers is not None:
            self._workers.end()
            self._workers = None
        self._files.close()
