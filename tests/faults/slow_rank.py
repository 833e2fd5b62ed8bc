"""A slow rank: one of two computes longer, shares its core with a program, or waits for its disk.

    python -m tests.faults.slow_rank [LAYOUT HOW]

`slow(seed)` draws a way, `slow_by` takes it; both return what the run recorded and said, for a test
or a battery of trials to judge.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("compute", "core", "disk", "none")
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
    "zero": {"parallel.zero": 3},
}
STEPS = 80
EXTRA_SECONDS = 0.03
"""What rank 1 spends in each step beside its work."""
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Recorded:
    """What a run with a slow rank recorded and said."""

    layout: str
    how: str
    exit_code: int
    ranks: list[dict[str, Any]]
    """The events `ranks` of metrics.jsonl."""
    warnings: list[str]
    """The lines of the log that speak of a rank that is slow."""


def slow(seed: int) -> Recorded:
    """Run a trial of this fault class, drawn by `seed`."""
    drawn = random.Random(seed)
    return slow_by(drawn.choice(WAYS), drawn.choice(list(LAYOUTS)))


def slow_by(how: str, layout: str = "data") -> Recorded:
    """Train on two ranks, of which rank 1 is slow in one of WAYS, and return what was recorded."""
    from oracle import tiny_config

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
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
        config = tiny_config(folder, **overrides)
        done = subprocess.run(
            [sys.executable, __file__, "launch", str(config), str(folder), how],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        said = (done.stdout + done.stderr).splitlines()
        return Recorded(
            layout,
            how,
            done.returncode,
            [event for event in events if event["event"] == "ranks"],
            [line for line in said if "of the others, for" in line],
        )


# -- in the processes -----------------------------------------------------------------------------


def launch(config: str, folder: str, how: str) -> None:
    """Start two workers as `--nproc 2` does."""
    from pentameter.processes.local_launch import run_local

    run_local([sys.executable, __file__, "train", config, folder, how], 2)


def train(config: str, folder: str, how: str) -> None:
    """Train as one of two ranks, of which rank 1 is slow."""
    from hangs import train_with

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
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] in (["launch"], ["train"]):
        from hangs import as_command

        raise SystemExit(as_command({"launch": launch, "train": train}))
    chosen = [sys.argv[1:]] if sys.argv[1:] else itertools.product(LAYOUTS, WAYS)
    for layout, how in chosen:
        found = slow_by(how, layout)
        print(f"{layout} {how}: exit code {found.exit_code}")
        for event in found.ranks[::3]:
            print("  ", {key: value for key, value in event.items() if key != "event"})
        print("  ", *found.warnings, flush=True)
