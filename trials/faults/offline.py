"""A trial of the battery: everything that needs no network, without one."""

from __future__ import annotations

import os
import subprocess
import sys

from trials.faults.trial import Trial

OFFLINE = ["unshare", "--net"]


def no_namespace() -> str | None:
    """Why this machine cannot take a process's network away; None where it can."""
    done = subprocess.run([*OFFLINE, "true"], check=False, capture_output=True, text=True)
    return done.stderr.strip() or None if done.returncode else None


def without_a_network(trial: Trial) -> str:
    """Train a preset, extend it, sample it, export it in two ways, and sample one of them."""
    run, model, hub = (str(trial.folder / name) for name in ("run", "model", "hub"))
    small = ["--model.n-layers=1", "--model.d-model=32", "--model.attention.n-heads=2"]
    small += ["--model.context-length=32", "--train.batch-size=2", "--data.corpus=grammar"]
    steps = 2 + trial.draw.randrange(4)
    commands = [
        ["train", "quickstart", *small, f"--train.steps={steps}", "--run-dir", run],
        ["train", "quickstart", *small, f"--train.steps={steps + 2}", "--run-dir", run,
         "--resume", "extend"],
        ["export", run, "--to", "safetensors", "--out", model],
        ["sample", run, "--max-new-tokens", "4"],
        ["export", run, "--to", "hf", "--out", hub],
        ["sample", hub, "--max-new-tokens", "4"],
    ]  # fmt: skip
    for command in commands:
        done = subprocess.run(
            [*OFFLINE, sys.executable, "-m", "pentameter", *command],
            check=False, capture_output=True, text=True, timeout=200,
            cwd=trial.folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-800:]}"
        assert "Traceback" not in done.stderr, done.stderr[-800:]
    return f"{len(commands)} commands"
