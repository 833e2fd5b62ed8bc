"""A trial: a fault in a run of its own, and the undisturbed run that it is compared with."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.checkpoint.folders.opening import find_checkpoint, list_checkpoints, open_checkpoint
from pentameter.processes.group.rank import LaunchedRank
from trials.faults.oracle import assert_same_run, error_path, events, tiny_config, train_in_child

PATIENCE_SECONDS = 300.0
"""Longest wait for processes that should end by themselves, on a busy machine."""
TIMEOUT_SECONDS = 120.0
"""`parallel.timeout_seconds` of runs in several processes."""

Planted = Callable[[], object]
"""What a process does to itself before it trains."""


class NotTriedError(Exception):
    """There is no run to compare with, so the trial says nothing."""


@dataclass(frozen=True)
class Undisturbed:
    """A whole run, its configuration file, and the seconds from its first process to its end."""

    config: Path
    run: Path
    seconds: float


@dataclass(frozen=True)
class Trial:
    """One trial of a class. `draw` follows from the battery's seed, the class and `number`."""

    number: int
    draw: random.Random
    folder: Path
    """Empty, and this trial's own."""
    shared: Path
    """Holds the undisturbed runs, which all trials share."""
    mistakes: tuple[Planted, ...] = ()
    """Known mistakes, planted in every process that is not undisturbed."""

    @property
    def run(self) -> Path:
        """The run folder that the fault strikes."""
        return self.folder / "run"

    def undisturbed(self, n_ranks: int = 1, **overrides: Any) -> Undisturbed:
        """The run of the tiny configuration with `overrides`, dotted, as nothing disturbs it."""
        if n_ranks > 1:
            overrides = {"parallel.timeout_seconds": TIMEOUT_SECONDS, **overrides}
        key = hashlib.sha256(json.dumps([n_ranks, overrides], sort_keys=True).encode()).hexdigest()
        folder = self.shared / key[:16]
        record = folder / "seconds.json"
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a first attempt may have failed
            folder.mkdir(parents=True)
            config = tiny_config(folder, **overrides)
            for run in ("warmed", "run"):  # the first one also waits for the fork server
                start = time.monotonic()
                codes = join(start_ranks(config, folder / run, n_ranks))
                if codes != [0] * n_ranks:
                    raise NotTriedError(
                        f"undisturbed, a run ends with {codes}: {said(folder / run)}"
                    )
            record.write_text(json.dumps(time.monotonic() - start))
        seconds = json.loads(record.read_text())
        return Undisturbed(folder / "tiny.toml", folder / "run", seconds)

    def start(
        self,
        config: Path,
        n_ranks: int = 1,
        planted: Sequence[Planted] = (),
        victim: int | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Start the run's processes; those in which `planted` is called are all, or `victim`."""
        return start_ranks(
            config, self.run, n_ranks, [*self.mistakes], planted, victim, **arguments
        )

    def finish(self, whole: Undisturbed, n_ranks: int = 1, config: Path | None = None) -> None:
        """Run the same command again to its end; the run then equals the undisturbed one."""
        codes = join(self.start(config or whole.config, n_ranks))
        assert codes == [0] * n_ranks, f"exit codes {codes}: {said(self.run)}"
        assert_same_run(self.run, whole.run)

    def moment(self, whole: Undisturbed, first: float = 0.0, last: float = 1.0) -> float:
        """Seconds until a random moment of a run, `first` to `last` of its duration."""
        return self.draw.uniform(first, last) * whole.seconds


def start_ranks(
    config: Path,
    run: Path,
    n_ranks: int = 1,
    everywhere: Sequence[Planted] = (),
    planted: Sequence[Planted] = (),
    victim: int | None = None,
    **arguments: Any,
) -> list[Any]:
    """Start the processes of a run, which meet by a file; `planted` is called in all, or `victim`
    alone, after what is called `everywhere`."""
    meeting = run.with_name(f"{run.name}-meeting-{time.monotonic_ns()}")
    return [
        train_in_child(
            config,
            run,
            planted=[*everywhere, *(planted if victim in (None, rank) else ())],
            launched=None
            if n_ranks == 1
            else LaunchedRank(rank, n_ranks, rank, n_ranks, f"file://{meeting}", "environment"),
            **arguments,
        )
        for rank in range(n_ranks)
    ]


def join(processes: Sequence[Any], seconds: float = PATIENCE_SECONDS) -> list[int | None]:
    """Exit codes by rank, once all have ended; what outlasts `seconds` is killed, and its code is
    None."""
    deadline = time.monotonic() + seconds
    codes = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        codes.append(process.exitcode)
    kill(processes)
    return codes


def kill(processes: Sequence[Any]) -> None:
    """SIGKILL to all at once; they are gone on return."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def said(run: Path) -> str:
    """The messages, or tracebacks, with which the ranks of a run failed."""
    paths = [path for rank in range(8) if (path := error_path(run, rank)).exists()]
    return "\n".join(path.read_text() for path in paths)


def assert_checkpoints_whole(run: Path) -> None:
    """Each finished folder of a checkpoint verifies, and there is one if any was ever committed."""
    folder = run / "checkpoints"
    for candidate in list_checkpoints(folder):
        open_checkpoint(candidate.path)
    if (run / "metrics.jsonl").exists() and whole_events(run, "checkpoint"):
        assert find_checkpoint(folder, []) is not None, "a checkpoint was committed, and none is"


def whole_events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a run that was killed: the last line of metrics.jsonl may be half a line."""
    try:
        return events(run, kind)
    except json.JSONDecodeError:
        lines = (run / "metrics.jsonl").read_text().splitlines()[:-1]
        return [record for line in lines if (record := json.loads(line))["event"] == kind]


def last_step(run: Path) -> int:
    """The newest step of metrics.jsonl; 0 if there is none yet."""
    if not (run / "metrics.jsonl").exists():
        return 0
    return max((event["step"] for event in whole_events(run, "train")), default=0)


def wait_for_step(run: Path, step: int, processes: Sequence[Any] = ()) -> None:
    """Return once a run has made a step, or ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while last_step(run) < step:
        if processes and all(each.exitcode is not None for each in processes):
            return
        assert time.monotonic() < deadline, f"step {step} is not reached"
        time.sleep(0.003)
