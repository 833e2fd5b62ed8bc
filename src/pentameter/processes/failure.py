"""Failures of one process of several: reported once, by the process that failed first.

The processes of a run fail together: when one does, the others lose their connection to it. The
first failure is what a person wants to read. Under `--nproc` every process leaves a report and
the launcher tells the first; elsewhere a process that is likely not the first waits a little, as
torchrun and `srun --kill-on-bad-exit` end it while it does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pentameter.errors import (
    ConfigError,
    InterruptedRunError,
    PentameterError,
    StorageError,
    TrainingFailedError,
    printable,
    terminal_message,
)
from pentameter.processes.place import LAUNCH_FOLDER, find_place

EXPECTED = (PentameterError, OSError, KeyboardInterrupt)
"""Errors whose message says all a person needs, without the traceback."""

HOLD_BACK_SECONDS = 2.0
"""Delay before another rank than 0 tells an error that all ranks are likely to meet; one that only
follows from another process's error waits twice as long."""

# What gloo, nccl and the stores of torch say, each as one long line of C++.
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclRemoteError",
)
_LATE = (
    "Timed out waiting",
    "timed out waiting",
    "waiting for clients",
    "Wait timeout",
    "wait timeout",
    "socket has timed out",
    "Socket Timeout",
    "collective operation timeout",
)

_MOST_RANKS_NAMED = 8


class LostProcessError(TrainingFailedError):
    """Another process of the run ended or stopped answering. Why, that process knows."""


class WorkerFailedError(PentameterError):
    """The failure of a process that `--nproc` started, with that process's exit code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.exit_code = failure.exit_code
        self.failure = failure


@dataclass(frozen=True)
class Failure:
    """The report of a process that failed."""

    rank: int
    exit_code: int
    message: str
    """Empty where there is nothing to say: the reader of the output went away."""
    time: float
    """Seconds since the epoch."""
    traceback: str = ""
    expected: bool = True
    """True if the message says all a person needs, without the traceback."""
    consequence: bool = False
    """True if it only follows from the failure of another process."""
    agreed: bool = False
    """True if it is a stop that all processes have agreed on."""


def lost_process(error: BaseException) -> Literal["gone", "late"] | None:
    """`gone` or `late` if `error` only says that another process closed its connection or did not
    answer; None if it is a failure of this process's own."""
    each: BaseException | None = error
    while each is not None:
        text = str(each)
        if isinstance(each, RuntimeError):
            if any(sign in text for sign in _GONE):
                return "gone"
            if any(sign in text for sign in _LATE):
                return "late"
        each = each.__cause__ or each.__context__  # leaving a block may fail in a second way
    return None


def spelled(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5`, a few of many."""
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    if len(ranks) > _MOST_RANKS_NAMED:
        shown = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
        return f"ranks {shown} and {len(ranks) - _MOST_RANKS_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def first_failure(failures: list[Failure]) -> Failure:
    """The failure among `failures` that the others follow from.

    Where all processes met the same error it is that of the lowest rank.
    """
    stopped = InterruptedRunError.exit_code
    first = min(failures, key=lambda f: (f.consequence, f.exit_code == stopped, f.time))
    same = [f for f in failures if f.message == first.message and not f.consequence]
    return min(same, key=lambda f: f.rank, default=first)


def report_path(folder: Path, rank: int) -> Path:
    """The report of the process `rank` in the folder of a launch."""
    return folder / f"failure-{rank}.json"


def read_report(folder: Path, rank: int) -> Failure | None:
    """The report of the process `rank`; None where it left none, or only a part."""
    try:
        return Failure(**json.loads(report_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def explanation(error: BaseException) -> tuple[str, int]:
    """The message of an error for people, and its exit code."""
    if isinstance(error, BrokenPipeError):
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
    """The report of `error`, which the process `rank` has met; for a worker's failure its own."""
    if isinstance(error, WorkerFailedError):
        return error.failure
    message, exit_code = explanation(error)
    return Failure(
        rank=rank,
        exit_code=exit_code,
        message=message,
        time=time.time(),
        traceback="".join(traceback.format_exception(error)),
        expected=isinstance(error, EXPECTED),
        consequence=isinstance(error, LostProcessError),
        agreed=isinstance(error, InterruptedRunError) and error.agreed,
    )


def print_failure(failure: Failure, *, debug: bool) -> None:
    """Say on stderr what went wrong, with the traceback where that is asked for or needed."""
    if not failure.message:
        return
    if debug or not failure.expected:
        print(printable(failure.traceback, keep="\n\t"), end="", file=sys.stderr)
    rank = f"rank {failure.rank}: " if failure.rank else ""
    print(f"pentameter: {rank}{terminal_message(failure.message)}", file=sys.stderr)


def tell_failure(error: BaseException, *, debug: bool = False) -> bool:
    """Tell the failure of a process of several; False for one that runs alone.

    Call it while `error` is being handled. Where the process group still stands this does not
    return but ends the process: ending Python properly could wait for the others for ever.
    """
    try:
        place = find_place()
    except ConfigError:
        return False  # which is likely the error itself
    if place is None:
        return False
    failure = failure_of(error, place.rank)
    if place.source == "--nproc":
        path = report_path(Path(os.environ[LAUNCH_FOLDER]), place.rank)
        with suppress(OSError):  # a full disk; the exit code still tells
            path.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    else:
        _tell_here(error, failure, debug=debug)
    # Not by an import: where a signal has cut off that of torch, parts of it are there, and to
    # import it again would fail.
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

    The exit code is that of `explanation`. Without it a process group that stands, with work that
    is not done, would make the end of Python wait for the others. In a process that runs alone the
    exception goes on as it is.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if tell_failure(error):
            raise SystemExit(explanation(error)[1]) from error
        raise


def _tell_here(error: BaseException, failure: Failure, *, debug: bool) -> None:
    """Tell `failure` where nobody collects reports, after others had time to tell theirs."""
    if failure.consequence:
        time.sleep(2 * HOLD_BACK_SECONDS)
    elif failure.expected and failure.rank:
        time.sleep(HOLD_BACK_SECONDS)
        if isinstance(error, (InterruptedRunError, KeyboardInterrupt)):
            return  # all are stopped, and rank 0 says so
    if (
        not failure.expected
        and isinstance(error, Exception)
        and "TORCHELASTIC_ERROR_FILE" in os.environ
    ):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun shows it
        return
    print_failure(failure, debug=debug)
