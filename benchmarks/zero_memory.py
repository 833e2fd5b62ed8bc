"""What each process holds under every ZeRO stage, measured ÷ planned.

    python benchmarks/zero_memory.py [--json] [--nproc 2] [--precision fp32]

A model of 57 MB of weights trains three steps on few tokens, so that nearly all memory is the
training's state. Counted are the bytes of all tensors, at the most, in the third step; `÷ copies`
says what of the memory of whole copies (zero 0) is left. `resident` is the growth of the process's
memory as the kernel counts it, which has the transport of messages in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
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
    "vocab_size": 4000,
    "context_length": 8,
    "n_layers": 4,
    "d_model": 512,
    "attention": {"n_heads": 8},
}


def configuration(zero: int, nproc: int, micro_batches: int, precision: str) -> Config:
    return Config.model_validate(
        {
            "model": MODEL,
            "data": {"corpus": "grammar"},
            "train": {
                "batch_size": nproc * micro_batches,
                "micro_batch_size": 1,
                "precision": precision,
            },
            "parallel": {"data": nproc, "zero": zero},
        }
    )


def peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(file: str, rank: int, config: Config) -> tuple[int, int]:
    """Bytes of tensors at the most, and by how much the process has grown."""
    torch.set_num_threads(1)
    size = config.parallel.data
    assert size is not None
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    world = World(rank, size, rank, size, timeout_seconds=600)
    plan = make_plan(config, world_size=size)
    before = peak_resident()
    with LiveBytes() as live:
        precision = config.train.precision
        engine = assemble(plan, torch.device("cpu"), precision, compiled=False, world=world)
        optimizer = build_optimizer(engine.named_parameters(), plan.table, config.optimizer)
        for step in range(3):
            tokens = np.random.default_rng(step).integers(0, MODEL["vocab_size"], (size * 4, 9))
            tokens = tokens[engine.rows]
            batch = Batch(tokens[:, :-1], tokens[:, 1:], engine.rows)
            live.most = 0
            loss = engine.forward_backward(batch, step)
            update_weights(engine, optimizer, loss, 1e-3, 1.0, 1.0)
    grown = peak_resident() - before
    dist.destroy_process_group()
    return live.most, grown


def compare(zero: int, nproc: int, micro_batches: int, precision: str) -> dict[str, Any]:
    config = configuration(zero, nproc, micro_batches, precision)
    planned = plan_memory(make_plan(config, world_size=nproc))
    context = multiprocessing.get_context("spawn")  # what one run leaves behind is not the next's
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(nproc, context) as pool:
        file = str(Path(folder) / "meeting")
        asked = [pool.submit(measure, file, rank, config) for rank in range(nproc)]
        most, grown = (
            max(values) for values in zip(*(each.result() for each in asked), strict=True)
        )
    return {
        "zero": zero,
        "micro_batches": micro_batches,
        "planned_bytes": planned.total_bytes,
        "measured_bytes": most,
        "resident_bytes": grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    given = parser.parse_args()
    rows = [
        compare(zero, given.nproc, micro_batches, given.precision)
        for micro_batches in (1, 4)
        for zero in range(4)
    ]
    if given.json:
        print(json.dumps(rows))
        return
    print("zero  micro-batches  planned MB  measured ÷ planned  ÷ copies  resident ÷ planned")
    copies = {r["micro_batches"]: r["measured_bytes"] for r in rows if r["zero"] == 0}
    for row in rows:
        planned, measured = row["planned_bytes"], row["measured_bytes"]
        print(
            f"{row['zero']:4}  {row['micro_batches']:13}  {planned / 1e6:10.1f}"
            f"  {measured / planned:18.3f}  {measured / copies[row['micro_batches']]:8.3f}"
            f"  {row['resident_bytes'] / planned:18.2f}"
        )


if __name__ == "__main__":
    main()
