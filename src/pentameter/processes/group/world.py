"""The world of a run: this process's rank, and collectives on small Python values.

Every method that communicates is collective: all ranks call it, in the same order. With one process
nothing is sent and torch.distributed is never imported.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pentameter.disk.retrying import growing
from pentameter.errors import PentameterError
from pentameter.processes.failures.activity import Activity

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

PAUSE_SECONDS = 0.05
_FIRST_PAUSE_SECONDS = 0.001
_LEAVE_SECONDS = 5.0  # until work that was begun is left to itself, as its disk does not answer
_LEAVE_LOST_SECONDS = 0.5  # ranks that miss another one are to say so soon


class OtherRankError(Exception):
    """Raised in place of another rank's error that cannot be pickled; it has that error's type and
    message as text."""


class _LeftError(Exception):
    """Raised in a worker thread to end it, when nobody waits for its result any more."""


@dataclass(frozen=True)
class World:
    """The ranks of a run, as one of them sees them: its rank, their number (`size`; `local_size` on
    this machine), and collectives on small values over the CPU. The default is a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes on this machine; also the index of its GPU."""
    local_size: int = 1
    timeout_seconds: float = math.inf
    """Longest wait for another rank in any process group; infinite without a process group."""
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    """Record of this rank's current step and action (training, saving, …)."""
    store: Store | None = field(default=None, compare=False, repr=False)
    """The store through which the processes met; ranks that lost another one report it there. None
    without a process group."""

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints and writes the run folder."""
        return self.rank == 0

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return, on every rank, the value that rank `source` passed; it must be picklable.
        Collective."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source)
        return box[0]  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Return, on every rank, the values that all ranks passed, ordered by rank; they must be
        picklable. Collective."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def first(self, value: T | None) -> T | None:
        """Return, on every rank, the value of the lowest rank that did not pass None; None if all
        did. Collective."""
        return next((each for each in self.all_gather(value) if each is not None), None)

    def all_reduce_max(self, value: int) -> int:
        """Return, on every rank, the largest value that a rank passed; cheap enough for every
        step. Collective."""
        return self.all_reduce_maxima(value)[0]

    def all_reduce_maxima(self, *values: int) -> Sequence[int]:
        """Return, for each argument, the largest value that a rank passed for it; all ranks pass
        equally many, and one message carries them. Collective."""
        if self.size == 1:
            return values
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        largest: list[int] = tensor.tolist()
        return largest

    def barrier(self) -> None:
        """Return once every rank has reached this call. Collective."""
        self.all_reduce_max(0)

    def await_main(self, is_busy: Callable[[], bool], doing: str) -> None:
        """Wait on every rank until `is_busy`, called on rank 0 every PAUSE_SECONDS, returns False.
        Use it while rank 0 works for longer than the others may wait in a collective. Meanwhile
        `doing` is noted as every rank's activity. Collective."""
        self._await_all(lambda: self.is_main and is_busy(), doing, 0)

    def _await_all(self, is_busy: Callable[[], bool], doing: str, step: int) -> None:
        """Wait until `is_busy()` returns False on every rank; meanwhile `doing` and `step` are
        noted as this rank's activity. Collective."""
        pauses = growing(_FIRST_PAUSE_SECONDS, longest=PAUSE_SECONDS)
        while self.all_reduce_maxima(is_busy())[0]:
            self.activity.note(doing, step, nothing_to_lose=True)
            time.sleep(next(pauses))

    def patiently(self, work: Callable[[Callable[[], None]], T], doing: str, step: int) -> list[T]:
        """Run `work` on every rank in a thread, and return all ranks' results, ordered by rank, on
        every rank. Errors are raised as by `gathered`. Use it where a disk or a network may hold up
        one rank for longer than the others may wait in a collective: meanwhile the ranks keep
        telling each other that they are alive. Collective.

        work: called with a function that it should call now and then, which raises an exception
            once nobody waits for the result any more (after a signal, or a lost rank), and so ends
            the work.
        doing, step: noted as this rank's activity meanwhile.
        """
        if self.size == 1:
            return [work(lambda: None)]
        has_left = threading.Event()
        outcome: list[tuple[T | None, BaseException | None]] = []

        def go_on() -> None:
            if has_left.is_set():
                raise _LeftError

        # Daemonic: a disk that hangs must not keep the process.
        worker = threading.Thread(
            target=lambda: outcome.append(_attempted(lambda: work(go_on))), name=doing, daemon=True
        )
        worker.start()
        try:
            self._await_all(worker.is_alive, doing, step)
        except BaseException as error:
            has_left.set()
            # What it writes is written before a lock is let go.
            worker.join(_LEAVE_LOST_SECONDS if isinstance(error, Exception) else _LEAVE_SECONDS)
            raise
        return self._exchanged(outcome[0])

    def agreed(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank, and return this rank's result. If it raises on any rank, every
        rank raises that error. Collective.

        If several ranks fail, PentameterErrors come before any other error, then the lowest rank's.
        """
        result, own = _attempted(work)
        self._exchanged((None, own))
        return result  # type: ignore[return-value]

    def gathered(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank, and return all results, ordered by rank, on every rank.
        Collective.

        If it raises on any rank, every rank raises the same error: a PentameterError before any
        other, then the lowest rank's. It sends one message; `agreed` and `all_gather` would send
        two.
        """
        return self._exchanged(_attempted(work))

    def _exchanged(self, outcome: tuple[T | None, BaseException | None]) -> list[T]:
        """Send this rank's outcome to all, and return the results of all ranks, or raise the first
        error, the same on every rank. `outcome` is (result, error), one of them None. An error of
        this rank keeps its traceback. Collective."""
        own = outcome[1]
        outcomes = self.all_gather((outcome[0], _sendable(own)))
        failures = [(rank, error) for rank, (_, error) in enumerate(outcomes) if error is not None]
        if failures:
            ours = [failure for failure in failures if isinstance(failure[1], PentameterError)]
            rank, error = (ours or failures)[0]
            raise own if own is not None and rank == self.rank else error
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone, and return its result on every rank. If it raises, every
        rank raises that error. The action must be short; `patiently_on_main` is for disks and
        networks. Collective."""
        result = self.agreed(lambda: action() if self.is_main else None)
        return self.broadcast(result)  # type: ignore[return-value]

    def patiently_on_main(self, action: Callable[[], T], doing: str, step: int) -> T:
        """Do what `on_main` does, for an action that a disk or a network may hold up (see
        `patiently`). Collective."""
        return self.patiently(lambda _: action() if self.is_main else None, doing, step)[0]  # type: ignore[return-value]


def _attempted(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call `work`. Return its result and None, or None and the exception that it raises."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _sendable(error: BaseException | None) -> BaseException | None:
    """Return an error that pickle can send to another process: `error`, or an OtherRankError with
    its type and message if it cannot be rebuilt from its pickle (it holds a lock, or its
    constructor takes more than a message). None for None."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        if not isinstance(error, PentameterError):
            return OtherRankError(f"{type(error).__name__}: {error}")
        told = PentameterError(str(error))
        told.exit_code = error.exit_code
        return told
    return error
