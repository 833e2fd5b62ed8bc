"""What a step of our own holds and how long it takes on this machine's CPU, beside the plan's word.

    PYTHONPATH=src:tests/parallel python benchmarks/plan_truth.py [--only NAME …] [--json]

First this machine is measured as `doctor --measure` does it, unless `--table FILE` names what that
wrote before; then every case is planned with that table, and trained as `train --nproc` trains it,
compiled where its name says so. Memory is the bytes of all tensors of the fullest process, at the
most, in the third step, which can be counted where nothing is compiled; `resident` is the growth of
its memory as the kernel counts it, with the transport of messages in it. Time is the fastest of
some steps: what others do on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from pentameter.calibrate.measured_machine import measure_machine
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.estimating.seconds.estimate import Estimate, make_estimate
from pentameter.planning.layouts.layout import parse_layout
from scaling_group import Group

VOCABULARY = 65
CHARACTERS: dict[str, Any] = {"model.dropout": 0.0, "model.attention.dropout": 0.0}
MODERN: dict[str, Any] = {
    **CHARACTERS,
    "model.attention.n_kv_heads": 2,
    "model.feed_forward.width": 1024,
    "model.norm": "rmsnorm",
    "model.feed_forward.activation": "swiglu",
    "model.positions": "rotary",
    "model.vocab_size": 8192,
}
FP32 = {"train.precision": "fp32"}
FULL = {"train.activation_checkpoint": "full"}
COMPILED = {"train.compile": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "characters": ("data=1", CHARACTERS),
    "characters, fp32": ("data=1", {**CHARACTERS, **FP32}),
    "characters, dropout": ("data=1", {}),
    "characters, recomputed": ("data=1", {**CHARACTERS, **FULL}),
    "characters, copies": ("data=2", CHARACTERS),
    "characters, ZeRO 2": ("data=2,zero=2", CHARACTERS),
    "characters, ZeRO 3": ("data=2,zero=3", CHARACTERS),
    "characters, tensor": ("tensor=2,sequence=true", CHARACTERS),
    "characters, pipeline": ("pipeline=2", CHARACTERS),
    "characters, ring": ("context=2", {**CHARACTERS, **FP32}),
    "modern": ("data=1", MODERN),
    "modern, ZeRO 3": ("data=2,zero=3", MODERN),
    "modern, tensor": ("tensor=2,sequence=true", MODERN),
    "modern, pipeline, fp32": ("pipeline=2", {**MODERN, **FP32}),
    "characters, fused": ("data=1", {**CHARACTERS, **COMPILED}),
    "characters, fused, fp32": ("data=1", {**CHARACTERS, **FP32, **COMPILED}),
    "characters, fused, dropout": ("data=1", COMPILED),
    "characters, fused, copies": ("data=2", {**CHARACTERS, **COMPILED}),
    "modern, fused": ("data=1", {**MODERN, **COMPILED}),
    "characters, tensor, compiled": ("tensor=2,sequence=true", {**CHARACTERS, **COMPILED}),
}
"""Layout, and what is changed of `shakespeare-char`."""


def configuration(changes: dict[str, Any]) -> Config:
    """A case in full: 16 sequences a step, in four micro-batches."""
    settings = {
        "model.vocab_size": VOCABULARY,
        "train.batch_size": 16,
        "train.micro_batch_size": 4,
        "train.device": "cpu",
        "train.precision": "bf16",
        "train.compile": False,
        **changes,
    }
    return load_config("shakespeare-char", settings)


def planned(name: str, table: Path) -> Estimate:
    """The plan of a case on the machine that a table describes."""
    layout, changes = CASES[name]
    cluster = parse_cluster(f"{table}:{parse_layout(layout).world_size}x1")
    return make_estimate(configuration(changes), cluster, layout=layout)


def compare(name: str, estimate: Estimate, n_steps: int) -> dict[str, Any]:
    """Planned and measured bytes and seconds of a case."""
    plan = estimate.plan
    n_processes = plan.layout.world_size
    most = grown = None
    with Group(n_processes) as group:  # what one run leaves behind is not the next's
        if not plan.config.train.compile:
            most, grown = (max(values) for values in zip(*group.ask("held", plan), strict=True))
        group.ask("build", name, plan)
        group.ask("turn", name, 0, 2, False)
        seconds = [
            max(turn.seconds for turn in group.ask("turn", name, step, 1, False))
            for step in range(2, 2 + n_steps)
        ]
    return {
        "case": name,
        "layout": str(plan.layout),
        "planned_bytes": estimate.memory.total_bytes,
        "measured_bytes": most,
        "resident_bytes": grown,
        "planned_seconds": estimate.time.seconds,
        "measured_seconds": min(seconds),
        "median_seconds": median(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--table", type=Path, help="what doctor --measure wrote; else it is now")
    given = parser.parse_args()
    table = given.table or measure_machine()
    if not given.json:
        print(table.read_text())
        print(f"{'case':28} planned MB  measured  ratio  resident  planned ms  measured  ratio")
    rows = []
    for name in given.only:
        rows.append(row := compare(name, planned(name, table), given.steps))
        if given.json:
            continue
        held, took = row["measured_bytes"], row["measured_seconds"]
        counted = f"{'–':>9}  {'–':>5} {'–':>9}"
        if held is not None:
            ratio = row["planned_bytes"] / held
            counted = f"{held / 1e6:9.1f}  {ratio:5.2f} {row['resident_bytes'] / 1e6:9.1f}"
        print(
            f"{name:28} {row['planned_bytes'] / 1e6:10.1f} {counted}"
            f"  {1e3 * row['planned_seconds']:10.1f} {1e3 * took:9.1f}"
            f"  {row['planned_seconds'] / took:5.2f}",
            flush=True,
        )
    if given.json:
        print(json.dumps({"table": table.read_text(), "rows": rows}))


if __name__ == "__main__":
    main()
