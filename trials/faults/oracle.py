"""The oracle of every fault test: an interrupted run, run again, equals an undisturbed one."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.config.files.load import load_config
from pentameter.errors import PentameterError
from pentameter.machine.fastest_matmul import ceiling
from pentameter.machine.peaks import measure_matmul
from pentameter.processes.group.join import joined_world_of
from pentameter.processes.group.rank import LaunchedRank

STEPS = 40
TINY = {
    "name": "tiny",
    "model": {"context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 16, "dropout": 0.1},
    "data": {"corpus": "grammar", "grammar": {"n_characters": 3000}},
    "train": {
        "steps": STEPS,
        "batch_size": 8,
        "micro_batch_size": 4,
        "eval_interval": 10,
        "sample_interval": 20,
        "sample_tokens": 8,
        "sample_prompt": "a",
        "precision": "fp32",
        "compile": False,
    },
    "checkpoint": {"interval": 5},
    "log": {"interval": 1},
}

# A fork server that has imported torch starts a child in a tenth of the time of a new process.
_context = multiprocessing.get_context("forkserver")


def tiny_config(tmp_path: Path, **overrides: Any) -> Path:
    """A file of the tiny configuration, with dotted overrides applied."""
    from pentameter.config.files.write import to_toml

    path = tmp_path / "tiny.toml"
    base = tmp_path / "base.toml"
    base.write_text(_toml(TINY))
    path.write_text(to_toml(load_config(base, dict(overrides.items()))))
    return path


def _toml(tree: dict[str, Any], prefix: str = "") -> str:
    scalars = {k: v for k, v in tree.items() if not isinstance(v, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in scalars.items()]
    text = (f"[{prefix}]\n" if prefix else "") + "\n".join(lines) + "\n"
    for key, value in tree.items():
        if isinstance(value, dict):
            text += _toml(value, f"{prefix}.{key}" if prefix else key)
    return text


def train_in_child(
    config_path: Path,
    run_dir: Path,
    *,
    planted: Sequence[Callable[[], object]] = (),
    launched: LaunchedRank | None = None,
    **arguments: Any,
) -> Any:
    """A started process that trains; `.pid` to signal, `.join()`, `.exitcode`.

    planted: functions that it calls before it trains, to plant a fault in itself.
    launched: its rank among several that are started alike, None for one process.
    arguments: the Trainer's.
    """
    process = _context.Process(
        target=_train, args=(config_path, run_dir, planted, launched, arguments)
    )
    process.start()
    return process


def _train(
    config_path: Path,
    run_dir: Path,
    planted: Sequence[Callable[[], object]],
    launched: LaunchedRank | None,
    arguments: dict[str, Any],
) -> None:
    from pentameter.train import compute
    from pentameter.train.loop import Trainer

    gc.freeze()  # what the server has imported need not be searched for cycles
    # A run measures the machine when it starts, for longer than it trains here.
    compute.ceiling = partial(ceiling, measure=partial(measure_matmul, seconds=0.01))
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends with it
    for plant in planted:
        plant()
    try:
        config = load_config(config_path)
        with joined_world_of(config, launched) as world:
            Trainer(config, run_dir=run_dir, quiet=True, world=world, **arguments).fit()
    except BaseException as error:
        expected = isinstance(error, PentameterError)
        code = error.exit_code if isinstance(error, PentameterError) else 1
        with suppress(OSError):
            run_dir.mkdir(exist_ok=True)
            said = str(error) if expected else traceback.format_exc()
            error_path(run_dir, 0 if launched is None else launched.rank).write_text(said)
        raise SystemExit(code) from None


def error_path(run_dir: Path, rank: int = 0) -> Path:
    """Where a rank leaves the message with which it failed, or its traceback."""
    return run_dir / ("error.txt" if rank == 0 else f"error-{rank}.txt")


def finish(config_path: Path, run_dir: Path) -> None:
    """Run to the end, as the same command line would."""
    process = train_in_child(config_path, run_dir)
    process.join(60)
    assert process.exitcode == 0, (run_dir / "error.txt").read_text()


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with that event."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == kind]


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step, in the order written."""
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events(run_dir, "train")]


def final_tensors(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the last checkpoint."""
    checkpoint = open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")
    return {
        f"{group}/{name}": tensor[...]  # whole, also of several processes
        for group in ("model", "optimizer")
        for name, tensor in checkpoint.tensors(group).items()
    }


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Losses at every step without gap or repeat, evaluations, samples and weights: bit-equal."""
    assert curve(run_dir) == curve(reference)
    assert [(e["step"], e["loss"], e["best"]) for e in events(run_dir, "eval")] == [
        (e["step"], e["loss"], e["best"]) for e in events(reference, "eval")
    ]
    saved = [e["step"] for e in events(run_dir, "checkpoint")]  # a signal saves one more
    assert saved == sorted(set(saved) | {e["step"] for e in events(reference, "checkpoint")})
    ours, theirs = final_tensors(run_dir), final_tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert samples(run_dir) == samples(reference)


def samples(run_dir: Path) -> dict[str, str]:
    """Name and text of every sample."""
    return {path.name: path.read_text() for path in (run_dir / "samples").iterdir()}


def launched(config: Path, run: Path) -> subprocess.Popen[str]:
    """A started `train --nproc 2`, the leader of a process group with all its children."""
    command = [sys.executable, "-m", "pentameter", "train", str(config), "--nproc", "2"]
    return subprocess.Popen(
        [*command, "--run-dir", str(run)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
