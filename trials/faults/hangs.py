"""Trials of the battery: one rank stops in the middle of a run, and the others say which, and
where. As a program this module trains with such a rank."""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trials.faults import launched_ranks
from trials.faults.launched_ranks import as_command, launch_and_wait, train_with

if TYPE_CHECKING:
    from trials.faults.trial import Trial

LAYOUTS: dict[str, dict[str, Any]] = {
    **launched_ranks.LAYOUTS,
    "expert": {
        "parallel.expert": 2,
        "model.experts.count": 4,
        "model.experts.per_token": 2,
    },
    "data and tensor": {"parallel.tensor": 2},
}
N_RANKS = {"data and tensor": 4}
"""Layout → number of ranks; 2 for the others."""
PLACES = ("forward", "backward", "optimizer", "save", "load")
WAYS = ("stop", "sleep", "spin", "kill")
STEP = 7
"""The step in which rank 1 hangs; in a save it is the one before the checkpoint."""
TIMEOUT_SECONDS = 3.0
SLACK_SECONDS = 10.0
"""After the timeout, until all processes are gone."""
GRID = list(itertools.product(PLACES, WAYS, LAYOUTS))


@dataclass(frozen=True)
class Left:
    """How a run left after one of its ranks hung."""

    layout: str
    where: str
    how: str
    seconds: float
    """Seconds from the hang until the launcher and all its workers had ended."""
    exit_code: int
    said: str
    """What it printed on stderr."""

    @property
    def message(self) -> str:
        """The last line, which a person reads first."""
        return self.said.splitlines()[-1] if self.said else ""


def a_rank_that_hangs(trial: Trial) -> str:
    """Rank 1 hangs or is killed, in each place, way and layout: the others leave in time, and name
    it, the step, and the collective that it did not reach."""
    where, how, layout = GRID[31 * trial.number % len(GRID)]  # all of them, well mixed
    left = hang_at(layout, where, how)
    assert_named(left)
    return f"{layout}, {where}, {how}: {left.seconds:.1f} s"


def assert_named(left: Left) -> None:
    """How the run left says who hung and where, and was in time."""
    assert left.exit_code == 70, left.said
    # Of four ranks, another than rank 0 may have said so, and is named before it.
    assert re.match(r"(pentameter: )?(rank \d: )?rank 1\b", left.message), left.message
    assert "did not reach the" in left.message, left.message
    if left.where not in ("save", "load"):
        assert f"in step {STEP} (training)" in left.message, left.message
    if left.how != "kill":
        assert re.search(r"^ranks? \d.* waited at", left.said, re.MULTILINE), left.said
        assert "in _hang" in left.said, left.said  # of rank 1's stack
    assert left.seconds < TIMEOUT_SECONDS + SLACK_SECONDS, f"{left.seconds:.1f} s: {left.message}"


def hang_at(layout: str, where: str, how: str) -> Left:
    """Train in a layout until rank 1 hangs, and return how the run left."""
    from trials.faults.oracle import tiny_config

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        overrides = {
            "parallel.timeout_seconds": TIMEOUT_SECONDS,
            "checkpoint.interval": STEP,
            "train.steps": 2 * STEP,
            "train.eval_interval": None,
            "train.sample_interval": None,
            **LAYOUTS[layout],
        }
        config = tiny_config(folder, **overrides)
        if where == "load":
            _run(folder, config, layout, "nowhere", "stop")
        return Left(layout, where, how, *_run(folder, config, layout, where, how))


def _run(folder: Path, config: Path, layout: str, where: str, how: str) -> tuple[float, int, str]:
    """Start the ranks, and return seconds since the hang (0 without one), exit code, stderr."""
    code, said = launch_and_wait(
        __name__, config, folder, where, how, n_ranks=N_RANKS.get(layout, 2)
    )
    hung = folder / "hung"
    return time.time() - float(hung.read_text()) if hung.exists() else 0.0, code, said


# -- in the processes -----------------------------------------------------------------------------


def train(config: str, folder: str, where: str, how: str) -> None:
    """Train as one of the ranks, of which rank 1 hangs."""
    from pentameter.processes.group.rank import find_rank
    from pentameter.train import start

    planted, launched = _Planted(where, partial(_hang, how, Path(folder, "hung"))), find_rank()
    if where == "load" and launched is not None and launched.rank == 1:
        start.load_tensors = lambda *arguments: planted.hang()
    train_with(config, folder, planted)


class _Planted:
    """The hook that has rank 1 hang in step STEP, in a block's forward or backward pass, before the
    optimizer's step, or as it begins to save."""

    def __init__(self, where: str, hang: Callable[[], None]) -> None:
        self.where, self.hang = where, hang
        self._is_due = False

    def on_start(self, run: Any) -> None:
        if run.world.rank != 1:
            return
        note = run.world.activity.note

        def noted(doing: str, step: int, **options: Any) -> None:
            note(doing, step, **options)
            self._is_due = doing == "training" and step == STEP
            if doing == "saving" and self.where == "save":
                self.hang()

        run.world.activity.note = noted
        named = {name: each for model in run.engine.models for name, each in model.named_modules()}
        block = named["blocks.1"]
        if self.where == "forward":
            block.register_forward_pre_hook(lambda *_: self._if_due())
        if self.where == "backward":
            block.register_forward_hook(self._in_backward)
        if self.where == "optimizer":
            run.optimizer.register_step_pre_hook(lambda *_: self._if_due())

    def _in_backward(self, module: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._if_due())

    def _if_due(self) -> None:
        if self._is_due:
            self.hang()

    def on_step(self, run: Any, step: Any) -> None:
        if self.where == "nowhere" and step.step == STEP:
            run.stop("for a checkpoint to load")


def _hang(how: str, path: Path) -> None:
    path.write_text(str(time.time()))
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1.0)  # woken for its stack, which another thread may print
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin":
            sum(range(10**18))  # in C, with the interpreter's lock
        case "sleep":
            while True:
                time.sleep(600)


if __name__ == "__main__":
    raise SystemExit(as_command(train))
