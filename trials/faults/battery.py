"""The battery: a table of fault classes, their trials run one after another, and what was seen."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path

from trials.faults.existing_tests import Case, run_cases
from trials.faults.trial import NotTriedError, Planted, Trial

LONGEST_SECONDS = 900.0
"""Longest time of a trial."""


@dataclass(frozen=True)
class FaultClass:
    """A kind of fault, and how a run is tried against it.

    trial: from a Trial to what was seen, in words; it raises if what must hold does not.
    tests: instead of it, pytest's names of existing tests, each of whose cases is a trial.
    """

    id: str
    fault: str
    must_hold: str
    n_trials: int = 0
    """In full; 0 for a class of tests, of which all cases are trials."""
    trial: Callable[[Trial], str] | None = None
    tests: Sequence[str] = ()
    obstacle: Callable[[], str | None] = lambda: None
    """Why this machine cannot run it; None where it can."""
    n_cases: int = 1
    """Cases in each trial."""


@dataclass(frozen=True)
class Result:
    """A trial, and how it ended. `seen` says what was seen, or how it failed."""

    id: str
    number: int
    held: bool
    seen: str
    seconds: float


def failure_bound(n_trials: int, n_failures: int, confidence: float = 0.95) -> float:
    """The one-sided upper bound of a failure rate (Clopper and Pearson, 1934): the rate at which so
    few failures, or fewer, would be seen in 5 % of all batteries."""
    if n_failures >= n_trials:
        return 1.0
    low, high = n_failures / n_trials, 1.0
    for _ in range(60):  # the probability falls as the rate grows
        rate = (low + high) / 2
        seen = sum(
            math.comb(n_trials, k) * rate**k * (1 - rate) ** (n_trials - k)
            for k in range(n_failures + 1)
        )
        low, high = (rate, high) if seen > 1 - confidence else (low, rate)
    return high


def run_trials(
    fault_class: FaultClass,
    seed: int,
    numbers: Sequence[int] | None,
    shared: Path,
    mistakes: Sequence[Planted] = (),
) -> Iterator[Result]:
    """Run trials of a class one after another, and yield each result as it ends; what could not be
    tried has none.

    seed: of the battery; what a trial draws follows from it, the class and the trial's number.
    numbers: of the trials, None for all.
    shared: folder of the undisturbed runs. mistakes: planted in every process that a trial starts.
    """
    if fault_class.trial is None:
        with suppress(NotTriedError):
            yield from _run_tests(fault_class, numbers)
        return
    for number in range(fault_class.n_trials) if numbers is None else numbers:
        with suppress(NotTriedError):
            yield _run_trial(fault_class, seed, number, shared, tuple(mistakes))


def _run_trial(
    fault_class: FaultClass, seed: int, number: int, shared: Path, mistakes: tuple[Planted, ...]
) -> Result:
    """A trial, which ends in time, and with all that it started."""
    assert fault_class.trial is not None
    forkserver.ensure_running()
    before = descendants()
    draw = random.Random(f"{seed} {fault_class.id} {number}")
    start, held = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="pentameter-fault-") as folder:
        try:
            with _time_limit():
                seen = fault_class.trial(Trial(number, draw, Path(folder), shared, mistakes))
        except NotTriedError:
            end_orphans(before, 0.0)
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__} in {where.name}, at `{where.line}`: {error}"
            held, seen = False, told[:2000]
        seconds = time.monotonic() - start
        left = end_orphans(before, GRACE_SECONDS if held else 0.0)
    if left and held:
        held, seen = False, f"{seen}; processes are left: {', '.join(left)}"
    return Result(fault_class.id, number, held, seen, seconds)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError in this, the main thread after LONGEST_SECONDS."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {LONGEST_SECONDS:g} s")

    earlier = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, earlier)


def _run_tests(fault_class: FaultClass, numbers: Sequence[int] | None) -> Iterator[Result]:
    """The cases of existing tests, in one call of pytest; those of `numbers` count, None for all.
    A process that is left fails them all, and tests that cannot be run are a failure, too."""
    before = descendants()
    try:
        cases = run_cases(fault_class.tests)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        cases = [Case("", str(error)[:2000], 0.0)]
    left = end_orphans(before, GRACE_SECONDS)
    told = f"; processes are left: {', '.join(left)}" if left else ""
    for number, case in enumerate(cases):
        if numbers is None or number in numbers:
            seen = case.name if case.wrong is None else f"{case.name}: {case.wrong}"
            held = case.wrong is None and not left
            yield Result(fault_class.id, number, held, seen + told, case.seconds)


# -- processes that are left ----------------------------------------------------------------------

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 30.0
"""Longest wait for processes to end by themselves, on a busy machine."""


def adopt_orphans() -> None:
    """From now on a process whose parent has ended becomes a child of this one, where it is seen
    (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, str]:
    """Process id → command of all children of this process, and theirs, that still run."""
    parents, commands = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if state != "Z":
                parents[pid] = int(parent)
                command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                commands[pid] = command.decode(errors="replace")[:80]
    found: dict[int, str] = {}
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found |= {pid: commands[pid] for pid in below}
    return found


def end_orphans(before: dict[int, str], grace_seconds: float) -> list[str]:
    """Wait for all processes that were not there `before`, and kill what stays; its commands."""
    deadline = time.monotonic() + grace_seconds
    while left := descendants().keys() - before.keys():
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    commands = descendants()
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        for pid in left:
            os.waitpid(pid, 0)
    return [commands[pid] for pid in left if pid in commands]


# -- what was seen --------------------------------------------------------------------------------


class Record:
    """Results in a file, a line each, so that a battery that was stopped goes on."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.results: list[Result] = []
        if path.exists():
            lines = map(json.loads, path.read_text().splitlines())
            self.results = [Result(**line["result"]) for line in lines if line["seed"] == seed]

    def add(self, result: Result) -> None:
        """Append a result, also to the file."""
        self.results.append(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"seed": self.seed, "result": asdict(result)}) + "\n")

    def of(self, fault_class: FaultClass) -> list[Result]:
        """The results of a class so far."""
        return [result for result in self.results if result.id == fault_class.id]


def markdown(classes: Sequence[FaultClass], record: Record) -> str:
    """The table of trials, failures and bounds."""
    lines = [
        "| id | fault | must hold | in full | trials | failures | rate ≤ (95 %) | s a trial |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in classes:
        results = record.of(each)
        if not results:
            continue
        n_trials = len(results) * each.n_cases
        n_failures = sum(not result.held for result in results)
        percent = 100 * failure_bound(n_trials, n_failures)
        bound = f"{percent:.0f} %" if percent > 10 else f"{percent:.2g} %"
        seconds = sorted(result.seconds for result in results)[len(results) // 2]
        n_full = each.n_trials * each.n_cases or n_trials
        cells = [each.id, each.fault, each.must_hold, f"{n_full:,}"]
        cells += [f"{n_trials:,}", str(n_failures), bound, f"{seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Seed {record.seed}."])
