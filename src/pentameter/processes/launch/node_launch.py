"""`--nodes MIN:MAX`: one launcher on each machine, which start a run's processes together, again
after a loss with the machines that are left, and again with one that has come.

A launcher follows the attempt that the nodes' folder names (`attempts.py`): it starts its share of
the processes, ends them when the attempt is over, and writes to its own file how they ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from pentameter.disk.lock import is_held, owner_of, scratch_folder
from pentameter.disk.owner import Owner
from pentameter.errors import (
    InterruptedRunError,
    PentameterError,
    RunFolderInUseError,
    StorageError,
)
from pentameter.machine.address import own_address
from pentameter.processes.group.rank import STORE
from pentameter.processes.launch.local_launch import POLL_SECONDS, Workers, handling_ctrl_z
from pentameter.processes.launch.program import Launched, Program
from pentameter.processes.launch.stop_signals import handling_stop_signals
from pentameter.processes.nodes.attempts import (
    Attempt,
    Rules,
    next_attempt,
    read_attempt,
    write_attempt,
)
from pentameter.processes.nodes.roll import GONE_SECONDS, Node, Roll

SETTLE_SECONDS = 1.5
"""Seconds without a change among the nodes until those that are there begin."""


class RunFailedError(PentameterError):
    """Raised when a run on several nodes fails for good; it has the exit code of the process that
    failed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_on_nodes(
    program: Program,
    n_processes: int,
    folder: Path,
    rules: Rules,
    progress: Callable[[], str],
    prepare: Callable[[bool], None] = lambda has_checkpoint: None,
) -> None:
    """Run `program` as `n_processes` processes on this machine, together with the launchers of
    other machines that call this with the same `folder`, in the run folder, and return when the run
    is complete.

    progress: returns the newest checkpoint's name, "" without one. prepare: called before the
    processes of an attempt are started, with True if the run has had a checkpoint.

    Raises RunFailedError if a process failed in a way that another attempt would not cure, or too
    many attempts were lost; StorageError if the run folder is not there any more;
    InterruptedRunError after a stop signal.
    """
    address, interface = own_address()
    with ExitStack() as stack:
        roll = Roll(folder, address, n_processes)
        stack.callback(roll.close)
        launcher = _Launcher(program, folder, roll, rules, progress, prepare, interface)
        stack.enter_context(handling_stop_signals(launcher.on_signal))
        stack.enter_context(handling_ctrl_z(lambda: launcher.workers))
        stack.callback(launcher.end)
        while not launcher.is_done():
            time.sleep(POLL_SECONDS)


class _Launcher:
    """The launcher of one machine in a run on several: it starts and watches this machine's
    processes, and agrees with the other machines' launchers on who takes part. Call `is_done` again
    and again until it returns True."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        roll: Roll,
        rules: Rules,
        progress: Callable[[], str],
        prepare: Callable[[bool], None],
        interface: str,
    ) -> None:
        self._program, self._folder, self._roll = program, folder, roll
        self._rules, self._interface = rules, interface
        self._progress, self._prepare = progress, prepare
        self._before = read_attempt(folder)  # an earlier command's, or one that is at work
        self._read = self._said = self._before
        self._away_since: float | None = None
        self._waits_for: Owner | None = None
        self.workers: Workers | None = None
        self._mine = Attempt()  # the one whose processes were started last
        self._files = ExitStack()
        self._received: list[int] = []
        self._present: dict[str, Node] = {}
        self._changed_at = time.monotonic()

    def is_done(self) -> bool:
        """Do what is due: decide on the next attempt, if this is the node that decides, and start,
        watch or end this machine's processes as the present attempt says. Return True once the run
        is complete. Raises RunFailedError, StorageError and InterruptedRunError."""
        before = {name: (node.reaches, node.state) for name, node in self._present.items()}
        self._present = self._roll.present()
        if before != {name: (node.reaches, node.state) for name, node in self._present.items()}:
            self._changed_at = time.monotonic()
        now = self._read = read_attempt(self._folder, self._read)
        if not self._is_folder_there():
            return False
        if next(iter(self._present), None) == self._roll.me.name and self._roll.knows_all():
            now = self._decided(now)
        if now != self._said:
            self._said = now
            if now.members and now.members[0] == self._roll.me.name:  # for all nodes
                _say(now)
        if self.workers is not None:
            self._follow(self.workers, now)
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

    def _is_folder_there(self) -> bool:
        """Return True if the run folder can be seen, False while it cannot; raise StorageError if
        that lasts."""
        try:
            self._roll.check_folder()
        except StorageError:
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() > self._away_since + GONE_SECONDS:
                raise
            return False
        self._away_since = None
        return True

    def _decided(self, now: Attempt) -> Attempt:
        """Return the attempt (the nodes that train together) that follows `now`, and write it to
        the run folder for all nodes. If `now` is the end of a run by an earlier command, begin
        again."""
        if now.is_final:
            if now != self._before:
                return now
            now = Attempt(now.number)
        if not self._present.keys() & {*now.members}:
            hosts = self._roll.silent_hosts()
            if (holder := _holder_at_work(now, hosts, self._folder.parent)) is not None:
                if holder != self._waits_for:
                    _print(f"{holder} trains this run, and its launcher is silent: waiting for it")
                self._waits_for = holder
                return now
        settled = time.monotonic() > self._changed_at + SETTLE_SECONDS
        progress = self._progress() or now.progress  # a moment without an answer forgets nothing
        following = next_attempt(
            now, self._present, self._rules, settled=settled, progress=progress
        )
        if following != now:
            with contextlib.suppress(StorageError):  # tried again at the next turn
                write_attempt(self._folder, following)
                return following
        return now

    def _start(self, now: Attempt) -> None:
        """Start this node's processes of the attempt `now`."""
        self._mine = now
        self._roll.update(attempt=now.number, state="running", message="", exit_code=0)
        index = now.members.index(self._roll.me.name)
        first, here = sum(now.n_processes[:index]), now.n_processes[index]
        variables = {
            STORE: now.store,
            "GLOO_SOCKET_IFNAME": self._interface,
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or self._interface,
        }
        self._prepare(bool(now.progress))
        workers = Workers(self._files.enter_context(scratch_folder()))
        self.workers = workers
        n = sum(now.n_processes)
        ours = [Launched(first + each, n, each, here, variables) for each in range(here)]
        workers.start(self._program, ours)

    def _follow(self, workers: Workers, now: Attempt) -> None:
        """Look at this node's processes in the attempt `now`: end them if the attempt is over or
        stopping, and record in this node's file how they ended."""
        is_other = (now.number, now.members) != (self._mine.number, self._mine.members)
        is_over = is_other or now.state in ("over", "failed")
        if is_over or any(failure.killed for failure in workers.failures):
            workers.end()
        elif now.state == "stopping" and not workers.received:
            workers.on_signal(signal.SIGTERM, None)
        if not workers.have_ended():
            return
        first = workers.failure()
        self.end()
        self._roll.renew_store_port()
        if is_over or first is None:
            self._roll.update(state="idle" if is_over else "done")
            return
        # A process of an earlier attempt, also of one that was at work when this launcher came,
        # may hold the folder still.
        before = self._before
        is_again = self._mine.number > before.number + (before.is_final or before.number == 0)
        state = "failed"
        if first.exit_code == InterruptedRunError.exit_code:
            state = "stopped"
        elif first.is_loss or (is_again and first.exit_code == RunFolderInUseError.exit_code):
            state = "lost"
        message = f"rank {first.rank} {first.message}" if first.killed else first.message
        self._roll.update(state=state, message=message, exit_code=first.exit_code)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: forward it to the processes; this node leaves when they have
        ended."""
        self._received.append(number)
        if self.workers is not None:
            self.workers.on_signal(number, frame)

    def end(self) -> None:
        """End this node's processes, and remove their files."""
        if self.workers is not None:
            self.workers.end()
            self.workers = None
        self._files.close()


def _say(now: Attempt) -> None:
    """Print what happened to the run's nodes: the attempt's state and reason."""
    words = {"over": "the attempt is over", "stopping": "saving"}.get(now.state)
    if now.state == "running":
        n, n_nodes = sum(now.n_processes), len(now.members)
        words = f"attempt {now.number}: {n} process{'es' if n > 1 else ''} on "
        words += f"{n_nodes} node{'s' if n_nodes > 1 else ''}"
    if words:
        _print(f"{words}: {now.reason}" if now.reason else words)


def _print(words: str) -> None:
    print(f"pentameter: {words}", file=sys.stderr, flush=True)


def _holder_at_work(now: Attempt, silent_hosts: set[str], run_folder: Path) -> Owner | None:
    """Look for a launcher that seems dead because it is frozen (suspended, for example), while its
    processes still train. Return the process that holds the run folder's lock and trains, although
    no launcher of the attempt `now` answers; None if there is none. It is better to wait for such a
    run than to begin another attempt: its launcher will take in other nodes when it goes on.

    silent_hosts: names of the machines whose launcher may be frozen.
    """
    if now.state not in ("running", "stopping"):
        return None
    owner = owner_of(run_folder / "run.lock")
    is_theirs = owner is not None and owner.host in silent_hosts
    return owner if is_theirs and is_held(run_folder / "run.lock") else None
