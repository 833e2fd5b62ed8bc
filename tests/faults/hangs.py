"""Hangs: one rank stops in the middle of a run, and the others say which, and where.

    python -m tests.faults.hangs [LAYOUT WHERE HOW]

`hang(seed)` draws a layout, a place and a way, and `hang_at` takes them; both return how the run
left, for a test or a battery of trials to judge. Started with `launch` or `train` this file is the
command itself with those two verbs replaced, so that failures take their real way.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
    "zero": {"parallel.zero": 3},
    "expert": {
        "parallel.expert": 2,
        "model.n_experts": 4,
        "model.experts_per_token": 2,
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
PATIENCE_SECONDS = 240.0


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


def hang(seed: int) -> Left:
    """Run a trial of this fault class, drawn by `seed`."""
    grid = list(itertools.product(LAYOUTS, PLACES, WAYS))
    return hang_at(*random.Random(seed).choice(grid))


def hang_at(layout: str, where: str, how: str) -> Left:
    """Train in a layout until rank 1 hangs, and return how the run left."""
    from oracle import tiny_config

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
            _run(folder, config, layout, "nowhere", "stop", {"PENTAMETER_TEST_END": str(STEP)})
        return Left(layout, where, how, *_run(folder, config, layout, where, how))


def _run(
    folder: Path,
    config: Path,
    layout: str,
    where: str,
    how: str,
    variables: dict[str, str] | None = None,
) -> tuple[float, int, str]:
    """Start the workers, and return seconds since the hang (0 without one), exit code, stderr."""
    arguments = [str(config), str(folder), where, how]
    launcher = subprocess.Popen(
        [sys.executable, __file__, "launch", str(N_RANKS.get(layout, 2)), *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
    )
    try:
        _, said = launcher.communicate(timeout=PATIENCE_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
    hung = folder / "hung"
    seconds = time.time() - float(hung.read_text()) if hung.exists() else 0.0
    return seconds, launcher.returncode, said


# -- in the processes -----------------------------------------------------------------------------


def launch(n_ranks: str, config: str, folder: str, where: str, how: str) -> None:
    """Start the workers as `--nproc` does."""
    from pentameter.processes.local_launch import run_local

    command = [sys.executable, __file__, "train", config, folder, where, how]
    run_local(command, int(n_ranks))


def train(config: str, folder: str, where: str, how: str) -> None:
    """Train as one of the ranks, of which rank 1 hangs."""
    from pentameter.processes.place import find_place
    from pentameter.train import start

    planted, place = _Planted(where, partial(_hang, how, Path(folder, "hung"))), find_place()
    if where == "load" and place is not None and place.rank == 1:
        start.load_tensors = lambda *arguments: planted.hang()
    train_with(config, folder, planted)


def train_with(config: str, folder: str, hook: object) -> None:
    """Train a configuration file as one of the ranks that were started, in FOLDER/run, with a
    hook."""
    from pentameter.config.load import load_config
    from pentameter.machine.ceilings import ceiling
    from pentameter.machine.peaks import measure_matmul
    from pentameter.processes.join import joined_world_of
    from pentameter.processes.place import find_place
    from pentameter.processes.worker import watch_launcher
    from pentameter.train import compute
    from pentameter.train.loop import Trainer

    watch_launcher()
    compute.ceiling = partial(ceiling, measure=partial(measure_matmul, seconds=0.01))
    settings, place = load_config(Path(config)), find_place()
    assert place is not None
    _meet(Path(folder), place.rank, place.world_size)
    with joined_world_of(settings, place) as world:
        Trainer(settings, run_dir=Path(folder, "run"), hooks=[hook], world=world).fit()


def _meet(folder: Path, rank: int, n_ranks: int) -> None:
    """Return once all ranks have called this: on a busy machine imports may take longer than the
    timeout that is on trial."""
    attempt = os.getppid()  # the launcher: a run that resumes has another one
    (folder / f"came-{attempt}-{rank}").touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(folder.glob(f"came-{attempt}-*"))) < n_ranks:
        assert time.monotonic() < deadline, "the other ranks do not start"
        time.sleep(0.02)


class _Planted:
    """The hook that has rank 1 hang in step STEP, in a block's forward or backward pass, before the
    optimizer's step, or as it begins to save."""

    def __init__(self, where: str, hang: Callable[[], None]) -> None:
        self.where, self.hang = where, hang
        self._is_due = False

    def on_start(self, run: Any) -> None:
        if end := os.environ.get("PENTAMETER_TEST_END"):
            self._end = int(end)
        if run.world.rank != 1:
            return
        note = run.world.progress.note

        def noted(doing: str, step: int, **options: Any) -> None:
            note(doing, step, **options)
            self._is_due = doing == "training" and step == STEP
            if doing == "saving" and self.where == "save":
                self.hang()

        run.world.progress.note = noted
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
        if step.step == getattr(self, "_end", None):
            run.stop("for a checkpoint to load")


def _hang(how: str, path: Path) -> None:
    path.write_text(str(time.time()))
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin":
            sum(range(10**18))  # in C, with the interpreter's lock
        case "sleep":
            while True:
                time.sleep(600)


def as_command(verbs: dict[str, Callable[..., None]]) -> int:
    """Be the command itself, with other verbs, so that failures take their real way; return the
    exit code."""
    from pentameter.cli import main as cli

    def act(verb: str, arguments: list[str]) -> int:
        verbs[verb](*arguments)
        return 0

    cli._run_verb = act
    return cli.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] in (["launch"], ["train"]):
        raise SystemExit(as_command({"launch": launch, "train": train}))
    chosen = [sys.argv[1:]] if sys.argv[1:] else itertools.product(LAYOUTS, PLACES, WAYS)
    for each in chosen:
        left = hang_at(*each)
        print(f"{left.layout} {left.where} {left.how}: {left.seconds:.1f} s, {left.exit_code}")
        print(left.said if sys.argv[1:] else left.message, flush=True)
