"""Trials of the battery: one of two ranks computes longer, shares its core with a program, or waits
for its disk. As a program this module trains with such a rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from trials.faults.launched_ranks import LAYOUTS, as_command, launch_and_wait, train_with

if TYPE_CHECKING:
    from trials.faults.trial import Trial

GRID = [
    ("data", "compute"), ("data", "disk"), ("data", "core"), ("pipeline", "compute"),
    ("zero", "compute"),
]  # fmt: skip
"""Layout, and what slows rank 1. Not with `tensor`: one more program on a core then takes more of a
step than EXTRA_SECONDS."""
STEPS = 80
EXTRA_SECONDS = 0.03
"""What rank 1 spends in each step beside its work."""


def busy_cores() -> str | None:
    """Why it cannot be told which rank is slow: a core that other programs use makes one of either.
    None on a machine with free cores."""
    load, n_cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"other programs use the cores (load {load:.0f})" if load > n_cores else None


def a_slow_rank(trial: Trial) -> str:
    """Rank 1 of two is slow: most records of the ranks name it, and so does a warning."""
    from trials.faults.oracle import events, tiny_config

    layout, how = GRID[trial.number % len(GRID)]
    overrides = {
        "train.steps": STEPS,
        "train.eval_interval": None,
        "train.sample_interval": None,
        "checkpoint.interval": STEPS,
        "log.interval": 5,
        "model.d_model": 64,
        "model.context_length": 64,
        **LAYOUTS[layout],
    }
    config = tiny_config(trial.folder, **overrides)
    code, said = launch_and_wait(__name__, config, trial.folder, how)
    assert code == 0, said
    ranks = events(trial.run, "ranks")
    slowest = [event["slowest"] for event in ranks]
    own, others = (
        median(event[key] for event in ranks) for key in ("own_seconds", "others_seconds")
    )
    told = f"{layout}, {how}: rank 1 in {slowest.count(1)} of {len(slowest)} records; medians of "
    told += f"the slowest and the other: {own:.3f} and {others:.3f} s"
    assert slowest.count(1) > len(slowest) / 2, told
    lines = (trial.run / "log.txt").read_text().splitlines()
    warnings = [line for line in lines if "of the others, for" in line]
    assert any("rank 1 on" in line for line in warnings), f"{told}; warnings: {warnings}"
    return told


# -- in the processes -----------------------------------------------------------------------------


def train(config: str, folder: str, how: str) -> None:
    """Train as one of two ranks, of which rank 1 is slow."""
    train_with(config, folder, _Slow(how))


class _Slow:
    """The hook that makes rank 1 slow: in its forward passes, or as it reads its batch; or that
    shares its core with another program."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._other: subprocess.Popen[bytes] | None = None

    def on_start(self, run: Any) -> None:
        if hasattr(os, "sched_setaffinity"):  # each rank has a core, as far as there are two
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[run.world.rank % len(cores)]})
        if run.world.rank != 1:
            return
        if self._how == "compute":
            run.engine.models[0].register_forward_pre_hook(lambda *_: _spin())
        if self._how == "disk":
            object.__setattr__(run.batches, "batch", _late(run.batches.batch))
        if self._how == "core":
            self._other = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def on_end(self, run: Any, end: Any) -> None:
        if self._other is not None:
            self._other.kill()
            self._other.wait()


def _late(batch: Callable[..., Any]) -> Callable[..., Any]:
    """Return `batch`, which reads a batch, from a slow disk."""

    def read(*arguments: Any) -> Any:
        time.sleep(EXTRA_SECONDS)
        return batch(*arguments)

    return read


def _spin() -> None:
    end = time.perf_counter() + EXTRA_SECONDS
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    raise SystemExit(as_command(train))
