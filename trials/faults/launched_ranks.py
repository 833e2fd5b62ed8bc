"""Ranks that the launcher starts in a program other than the command, which plants a fault.

Such a program is the command itself with two verbs replaced, `launch` and `train`, so that failures
take their real way. It imports what it needs late: each rank starts it anew.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trials import programs

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
    "zero": {"parallel.zero": 3},
}
"""Layouts of two ranks: name → overrides."""
PATIENCE_SECONDS = 300.0
"""Longest wait for ranks that should end by themselves, on a busy machine."""


def launch_and_wait(
    program: str, config: Path, folder: Path, *arguments: str, n_ranks: int = 2
) -> tuple[int, str]:
    """Have the module `program` launch its ranks, which train `config` in `folder`/run; return the
    launcher's exit code and what it printed on stderr."""
    launcher = subprocess.Popen(
        programs.program(
            program, "launch", program, str(n_ranks), str(config), str(folder), *arguments
        ),
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=programs.environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    try:
        _, said = launcher.communicate(timeout=PATIENCE_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
    return launcher.returncode, said


def as_command(train: Callable[..., None]) -> int:
    """Be the command itself, with `launch` and this `train` as its verbs; return the exit code."""
    from pentameter.cli import main as cli

    def act(verb: str, arguments: list[str]) -> int:
        {"launch": _launch, "train": train}[verb](*arguments)
        return 0

    cli._run_verb = act
    return cli.main()


def _launch(program: str, n_ranks: str, *arguments: str) -> None:
    """Start the ranks as `--nproc` does."""
    from pentameter.processes.launch.local_launch import run_local
    from pentameter.processes.launch.program import Command

    run_local(Command(programs.program(program, "train", *arguments)), int(n_ranks))


def train_with(config: str, folder: str, hook: object) -> None:
    """Train a configuration file as one of the ranks that were started, in FOLDER/run, with a
    hook."""
    from pentameter.config.files.load import load_config
    from pentameter.machine.fastest_matmul import ceiling
    from pentameter.machine.peaks import measure_matmul
    from pentameter.processes.group.join import joined_world_of
    from pentameter.processes.group.rank import find_rank
    from pentameter.processes.launch.worker import watch_launcher
    from pentameter.train import compute
    from pentameter.train.loop import Trainer

    watch_launcher()
    compute.ceiling = partial(ceiling, measure=partial(measure_matmul, seconds=0.01))
    settings, launched = load_config(Path(config)), find_rank()
    assert launched is not None
    _meet(Path(folder), launched.rank, launched.world_size)
    with joined_world_of(settings, launched) as world:
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
