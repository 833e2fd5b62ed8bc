"""Failure reports: an error that many processes meet is printed once, by the process that failed
first.

The processes of a run fail together: when one fails, the others lose their connection to it. A
person wants to read the first failure. Under `--nproc` every process leaves a report, and the
launcher prints the first. Under other launchers, a process that is probably not the first waits a
little: torchrun and `srun --kill-on-bad-exit` end it meanwhile.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pentameter.disk.record import read_record, write_record
from pentameter.errors import (
    ConfigError,
    InterruptedRunError,
    PentameterError,
    StorageError,
    TrainingFailedError,
    few,
    printable,
    terminal_message,
)
from pentameter.processes.failures.waiting import Wait, first_wait
from pentameter.processes.group.rank import LAUNCH_FOLDER, find_rank
from pentameter.processes.standard_streams import NAMES

EXPECTED = (PentameterError, OSError, KeyboardInterrupt)
"""Exceptions whose message is enough for a person; others are printed with their traceback."""

HOLD_BACK_SECONDS = 2.0
"""Seconds that a rank other than 0 waits before it prints an error that all ranks are likely to
meet. An error that merely follows from another rank's error waits twice as long."""

# Messages from gloo, nccl and torch's stores, each one long line from C++; in small letters, as
# their releases differ in capitals.
_GONE = re.compile(
    "connection (closed by peer|reset by peer|refused)|broken pipe|failed to recv, got 0 bytes|"
    "remote process exited|ncclremoteerror"
)
_LATE = re.compile(
    "timed out waiting|waiting for clients|wait timeout|socket (has timed out|timeout)|"
    "collective operation timeout"
)

_MOST_RANKS_NAMED = 8

GOES_BACK = "the same command goes back to the last checkpoint, or begins anew if there is none"
"""Clause for people: how a run goes on that one of its processes has left."""


class LostProcessError(TrainingFailedError):
    """Raised when another process of the run has ended or no longer responds, for a reason that
    only that process knows. `wait` says in which collective this process noticed it; None if that
    is not known."""

    def __init__(self, message: str, wait: Wait | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class WorkerFailedError(PentameterError):
    """Raised in the launcher of `--nproc` when a process that it started has failed; it has that
    process's exit code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.exit_code = failure.exit_code
        self.failure = failure


@dataclass(frozen=True)
class Failure:
    """The failure of one process, as it tells the launcher or prints it: message, exit code,
    traceback, and whether it may be a consequence of another's failure."""

    rank: int
    exit_code: int
    message: str
    """The error in words for people; empty if nothing is to be printed, because whoever read the
    output closed it."""
    time: float
    """Time at which it happened, in seconds since the epoch."""
    traceback: str = ""
    expected: bool = True
    """True if the message is enough for a person; False if the traceback is printed, too."""
    consequence: bool = False
    """True if another process's failure has caused it: a lost connection or a timeout."""
    agreed: bool = False
    """True if it is a stop on a signal, on which all processes have agreed."""
    waited: str = ""
    """In a consequence, where the process waited: the collective in words."""
    stack: str = ""
    """In a consequence, the functions in which the process waited, a line for each."""
    killed: bool = False
    """True if the process ended without a report: by SIGKILL, a segmentation fault, an abort."""

    @property
    def is_loss(self) -> bool:
        """True if the same command, started again, may succeed: a process was killed, lost or met
        an unexpected error, such as a device's. An expected error would come again."""
        return self.killed or self.consequence or not self.expected


def lost_process(error: BaseException) -> Literal["gone", "late"] | None:
    """Return `gone` if `error` (with its causes) merely says that another process closed its
    connection, `late` if one did not respond in time; None if this process itself failed."""
    each: BaseException | None = error
    while each is not None:
        text = str(each).lower()
        if isinstance(each, RuntimeError):
            if _GONE.search(text):
                return "gone"
            if _LATE.search(text):
                return "late"
        each = each.__cause__ or each.__context__  # leaving a block may raise a second error
    return None


def spelled(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 3`, `ranks 1, 2 and 5`; above 8, `ranks 0, 1, … and 12 more`."""
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    if len(ranks) > _MOST_RANKS_NAMED:
        return f"ranks {few(ranks, _MOST_RANKS_NAMED)}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def at_least_one_of(ranks: Sequence[int]) -> str:
    """Return a phrase that names `ranks` as suspects: "at least one of ranks …", or the rank itself
    if there is only one. Not all of them need be lost, as one lost rank may keep others from
    answering."""
    return spelled(ranks) if len(ranks) == 1 else f"at least one of {spelled(ranks)}"


def unanswered(
    absent: Sequence[int], waits: Mapping[int, Wait], timeout_seconds: float, doing: str
) -> str:
    """Return a sentence for an error message: some ranks did not answer in time, and where the
    others wait for them.

    absent: the ranks that did not answer; empty if they are not known.
    waits: rank → the collective in which it waits, for those ranks of which that is known.
    timeout_seconds: how long the others waited.
    doing: what a waiting rank was doing, with its step, in words.
    """
    earliest = first_wait(list(waits.values()), absent)
    where = ""
    if earliest is not None:
        there = sorted(rank for rank, wait in waits.items() if str(wait) == str(earliest))
        waiting = f"{spelled(there)} wait{'s' * (len(there) == 1)}"
        where = f": it did not reach {earliest}, where {waiting}"
    waited = f"within {timeout_seconds:g} s (parallel.timeout_seconds) {doing}{where}"
    if absent:
        return f"{at_least_one_of(absent)} did not answer {waited}."
    return f"no answer {waited}, and no process hangs: is the network cut?"


def went_away(absent: Sequence[int], waits: Mapping[int, Wait], doing: str) -> str:
    """Return a sentence for an error message: one of the ranks `absent` ended while others were
    waiting for it (some process, if `absent` is empty). `waits` and `doing` are as for
    `unanswered`."""
    earliest = first_wait(list(waits.values()), absent)
    before = "" if earliest is None else f", before {earliest}"
    who = at_least_one_of(absent) if absent else "another process of the run"
    return f"{who} went away {doing}{before}; look for its message."


def first_failure(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest. Lost connections and stops by a
    signal count only if there is nothing else. If several processes met the same error, return the
    lowest rank's."""
    stopped = InterruptedRunError.exit_code
    first = min(failures, key=lambda f: (f.consequence, f.exit_code == stopped, f.time))
    same = [f for f in failures if f.message == first.message and not f.consequence]
    return min(same, key=lambda f: f.rank, default=first)


def report_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in which `rank` leaves its failure; `folder` is the launch
    folder, the private one that `--nproc` shares with its processes."""
    return folder / f"failure-{rank}.json"


def read_report(folder: Path, rank: int) -> Failure | None:
    """Return the Failure that `rank` left in the launch folder; None if there is none, or only
    an incomplete one."""
    return read_record(report_path(folder, rank), Failure)


def explanation(error: BaseException) -> tuple[str, int]:
    """Return an error's message for people, and the command's exit code. The code is a
    PentameterError's own, 74 for an OSError, 130 for an interrupt, 1 for any other error. If our
    standard stream failed because nobody reads it any more, return ("", 0)."""
    if isinstance(error, BrokenPipeError) and error.filename in NAMES:
        return "", 0  # the reader of our output went away (`… | head`): not our failure
    if isinstance(error, PentameterError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + signal.SIGINT
    if isinstance(error, OSError):
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        return f"{where}{error.strerror or error}", StorageError.exit_code
    return f"{type(error).__name__}: {error}", 1


def failure_of(error: BaseException, rank: int = 0) -> Failure:
    """Return the Failure that describes `error`, raised on `rank`; for a WorkerFailedError,
    the worker's own."""
    if isinstance(error, WorkerFailedError):
        return error.failure
    message, exit_code = explanation(error)
    wait = error.wait if isinstance(error, LostProcessError) else None
    return Failure(
        rank=rank,
        exit_code=exit_code,
        message=message,
        time=time.time(),
        traceback="".join(traceback.format_exception(error)),
        expected=isinstance(error, EXPECTED),
        consequence=isinstance(error, LostProcessError),
        agreed=isinstance(error, InterruptedRunError) and error.agreed,
        waited="" if wait is None else str(wait),
        stack="" if wait is None else wait.stack,
    )


def print_failure(failure: Failure, *, debug: bool) -> None:
    """Print the failure's message on stderr, after its traceback if `debug` or if the message alone
    is not enough. Prints nothing if the message is empty."""
    if not failure.message:
        return
    if debug or not failure.expected:
        print(printable(failure.traceback, keep="\n\t"), end="", file=sys.stderr)
    rank = f"rank {failure.rank}: " if failure.rank else ""
    print(f"pentameter: {rank}{terminal_message(failure.message)}", file=sys.stderr)


def tell_failure(error: BaseException, *, debug: bool = False) -> bool:
    """Report the failure of one process among several: to the launcher under `--nproc`, else on
    stderr. Return False, and do nothing, in a process that runs alone; True once reported.

    Call it while `error` is being handled. If the process group still exists, this function does
    not return but ends the process with the error's exit code: a regular exit of Python could wait
    for the others for ever. debug: print the traceback, too.
    """
    try:
        launched = find_rank()
    except ConfigError:
        return False  # probably the very error to report
    is_launched = LAUNCH_FOLDER in os.environ  # one process alone, too
    if launched is None and not is_launched:
        return False
    failure = failure_of(error, 0 if launched is None else launched.rank)
    if is_launched:
        with suppress(StorageError):  # a full disk; the exit code still tells
            write_record(report_path(Path(os.environ[LAUNCH_FOLDER]), failure.rank), failure)
    else:
        _print_after_others(error, failure, debug=debug)
    # Without an import: if a signal interrupted torch's import, parts of it are loaded, and a
    # second import would fail.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(failure.exit_code)
    return True


@contextmanager
def failure_ends_process() -> Iterator[None]:
    """Context manager for user scripts: report an exception once across ranks, and exit without
    waiting for the others. Put it around `joined_world`, as the command does.

    The exit code is the error's own (`explanation`). Without this context manager, an existing
    process group with unfinished work would make Python's exit wait for the others. In a process
    that runs alone the exception propagates unchanged.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if tell_failure(error):
            raise SystemExit(explanation(error)[1]) from error
        raise


def _print_after_others(error: BaseException, failure: Failure, *, debug: bool) -> None:
    """Print `failure`, whose exception is `error`, on stderr, or hand it to torchrun to print. Used
    under launchers that do not collect failures, where each rank prints its own: one that is
    probably a consequence waits first, so that the cause is printed before it. That is
    HOLD_BACK_SECONDS for an expected error on a rank other than 0, twice as long for a lost
    connection. With `debug`, print the traceback, too."""
    if failure.consequence:
        time.sleep(2 * HOLD_BACK_SECONDS)
    elif failure.expected and failure.rank:
        time.sleep(HOLD_BACK_SECONDS)
        if isinstance(error, (InterruptedRunError, KeyboardInterrupt)):
            return  # all have stopped, and rank 0 says so
    if (
        not failure.expected
        and isinstance(error, Exception)
        and "TORCHELASTIC_ERROR_FILE" in os.environ
    ):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun shows it
        return
    print_failure(failure, debug=debug)
