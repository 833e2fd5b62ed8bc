"""What accumulation costs: a step of the same rows in one micro-batch and in several smaller ones.

    python benchmarks/accumulation.py [--preset shakespeare-char] [--rows 64] [--sizes 64,32,16,8]
                                      [--seconds 120] [--set KEY=VALUE …] [--json FILE]

One process has the model once for each size of a micro-batch, and takes a step with each in turn,
in one order and then in the other, until `--seconds` are over: what other programs take from the
machine hits all alike. Prints for each size the quartiles of a step's seconds, those of its
processor seconds, and the quartiles of both ratios to the first size's step of the same round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from cpu_turns import Step, step_of
from gpu_sides import random_batches
from pentameter.config.files.load import load_config
from pentameter.machine.capabilities import machine_capabilities
from pentameter.planning.plan import make_plan

WARM_UP_STEPS = 2  # of each size, in turns: kernels are compiled, heaps grow


def measure(steps: Sequence[Step], seconds: float) -> tuple[list[list[float]], list[list[float]]]:
    """The seconds of each side's steps, by round, and their processor seconds."""
    begun = time.perf_counter()
    for number in range(WARM_UP_STEPS):
        for step in steps:
            step(number)
    wall: list[list[float]] = [[] for _ in steps]
    processor: list[list[float]] = [[] for _ in steps]
    print(f"warm after {time.perf_counter() - begun:.0f} s", flush=True)
    deadline, number = time.perf_counter() + seconds, WARM_UP_STEPS
    while time.perf_counter() < deadline:
        sides = list(range(len(steps)))
        for side in sides if number % 2 else reversed(sides):
            start, used = time.perf_counter(), time.process_time()
            steps[side](number)
            wall[side].append(time.perf_counter() - start)
            processor[side].append(time.process_time() - used)
        number += 1
    return wall, processor


def spread(values: Sequence[float]) -> list[float]:
    """The quartiles."""
    return quantiles(values, n=4, method="inclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="shakespeare-char")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sizes", default="64,32,16,8")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    given: dict[str, Any] = {
        "model.vocab_size": 65,
        "train.device": "cpu",
        "train.batch_size": asked.rows,
    }
    given |= dict(pair.split("=", 1) for pair in asked.set)
    sizes = [int(size) for size in asked.sizes.split(",")]
    steps: list[Step] = []
    for size in sizes:
        plan = make_plan(load_config(asked.preset, given | {"train.micro_batch_size": size}))
        how, step = step_of(plan, random_batches(plan).batch)
        steps.append(step)
    print(
        f"{machine_capabilities().cpu.name}, torch {torch.__version__}; {asked.preset}, {how}",
        flush=True,
    )
    wall, processor = measure(steps, asked.seconds)
    print(f"{len(wall[0])} rounds; quartiles")
    for side, size in enumerate(sizes):
        ratios = [mine / first for mine, first in zip(wall[side], wall[0], strict=True)]
        used = [mine / first for mine, first in zip(processor[side], processor[0], strict=True)]
        shown = (
            " ".join(f"{value:.3f}" for value in spread(each))
            for each in (wall[side], processor[side], ratios, used)
        )
        print(
            "{} × {:<3}  {} s   {} s of processors   {} × the first   {} × in processor "
            "seconds".format(-(-asked.rows // size), size, *shown)
        )
    if asked.json is not None:
        record = {"sizes": sizes, "seconds": wall, "processor_seconds": processor}
        asked.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
