"""A long context divided over processes: bytes, time and losses of n ÷ those of one.

    PYTHONPATH=tests/parallel python benchmarks/long_context.py [--json] [--context-length 32768]

A narrow model trains some steps on one sequence of that many tokens, so that nearly all memory is
activations. Counted are the bytes of all tensors, at the most, in the last step; the Plan's figure
stands beside them. The losses are those of one process up to rounding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from live_bytes import LiveBytes

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.optim.build import build_optimizer
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World
from pentameter.train.update import update_weights

MODEL: dict[str, Any] = {
    "vocab_size": 128,
    "n_layers": 2,
    "d_model": 64,
    "attention": {"n_heads": 4},
}
WAYS = [(1, "ring"), (2, "ring"), (4, "ring"), (2, "all-to-all"), (4, "all-to-all")]


def configuration(n: int, mode: str, context_length: int) -> Config:
    return Config.model_validate(
        {
            "model": {**MODEL, "context_length": context_length},
            "data": {"corpus": "grammar"},
            "train": {"batch_size": 1, "precision": "fp32", "compile": False},
            "parallel": {"context": n, "context_mode": mode},
        }
    )


def measure(file: str, rank: int, config: Config, n_steps: int) -> tuple[int, float, list[float]]:
    """Bytes of tensors at the most, and of the steps the seconds of the fastest and the losses."""
    torch.set_num_threads(1)
    size = config.parallel.context
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    plan = make_plan(config, world_size=size)
    losses, seconds = [], []
    generator = np.random.default_rng(0)
    with LiveBytes() as live:
        world = World(rank, size, rank, size, timeout_seconds=600)
        engine = assemble(plan, torch.device("cpu"), "fp32", compiled=False, world=world)
        optimizer = build_optimizer(engine.named_parameters(), plan.table, config.optimizer)
        for step in range(n_steps):
            steps = generator.integers(-1, 2, (1, config.model.context_length + 1))
            tokens = (
                np.cumsum(steps, axis=1) % MODEL["vocab_size"]
            )  # a walk: there is what to learn
            live.most = 0
            start = time.perf_counter()
            loss = engine.forward_backward(Batch(tokens[:, :-1], tokens[:, 1:], engine.rows), step)
            update_weights(engine, optimizer, loss, 3e-3, 1.0, 1.0)
            seconds.append(time.perf_counter() - start)
            losses.append(loss.mean)
    dist.destroy_process_group()
    return live.most, min(seconds), losses


def compare(n: int, mode: str, context_length: int, n_steps: int) -> dict[str, Any]:
    config = configuration(n, mode, context_length)
    planned = plan_memory(make_plan(config, world_size=n))
    context = multiprocessing.get_context("spawn")  # what one run leaves behind is not the next's
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(n, context) as pool:
        file = str(Path(folder) / "meeting")
        asked = [pool.submit(measure, file, rank, config, n_steps) for rank in range(n)]
        most, seconds, losses = zip(*(each.result() for each in asked), strict=True)
    return {
        "context": n,
        "mode": mode if n > 1 else "one process",
        "planned_bytes": planned.total_bytes,
        "measured_bytes": max(most),
        "step_seconds": max(seconds),
        "losses": losses[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--context-length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    rows = [compare(n, mode, given.context_length, given.steps) for n, mode in WAYS]
    if given.json:
        print(json.dumps(rows))
        return
    one = rows[0]
    print("context  mode         MB  ÷ planned  ÷ one process  step ÷ one  largest loss difference")
    for row in rows:
        off = max(abs(a - b) for a, b in zip(row["losses"], one["losses"], strict=True))
        print(
            f"{row['context']:7}  {row['mode']:11}{row['measured_bytes'] / 1e6:6.1f}"
            f"  {row['measured_bytes'] / row['planned_bytes']:9.3f}"
            f"  {row['measured_bytes'] / one['measured_bytes']:13.3f}"
            f"  {row['step_seconds'] / one['step_seconds']:10.2f}  {off:.1e}"
        )
    print("losses of one process:", " ".join(f"{loss:.5f}" for loss in one["losses"]))


if __name__ == "__main__":
    main()
