"""What training waits for at a checkpoint, beside a save that is waited for and the disk itself.

    python benchmarks/checkpoint.py [--preset gpt2-124m] [--folder DIR] [--json]
    python benchmarks/checkpoint.py --saves 500 [--preset quickstart]

The first trains the preset for a few short steps in each way, with a checkpoint every sixth step,
and reads the times from the runs' own metrics.jsonl (`seconds`, `stall_seconds`). The checkpoint at
the end, which is always waited for, is left out, and the first one beside training is told apart:
it makes the buffer. A write that lasts six steps would be waited for by the next save. The disk's
own rate is that of the same bytes in one file, written and synced without a hash. `--saves` makes
so many saves in one process and prints its resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents, HostBuffers
from pentameter.config.files.load import load_config
from pentameter.planning.plan import make_plan

STEPS, INTERVAL = 22, 6
SHORT = {
    "model.context_length": 128,
    "data.corpus": "grammar",
    "data.tokenizer": "char",
    "train.steps": STEPS,
    "train.tokens_per_step": None,
    "train.batch_size": 1,
    "train.micro_batch_size": 1,
    "train.eval_interval": None,
    "train.sample_interval": None,
    "train.compile": False,
    "train.precision": "fp32",
    "checkpoint.interval": INTERVAL,
    "checkpoint.keep_last": 1,
    "log.interval": 1,
}


def times_of_run(preset: str, folder: Path, *, asynchronous: bool) -> dict[str, Any]:
    """The times of a short run's checkpoints, in seconds, and their size."""
    run = folder / f"asynchronous-{asynchronous}"
    settings = {**SHORT, "checkpoint.asynchronous": asynchronous}
    arguments = [f"--{key}={str(value).lower()}" for key, value in settings.items()]
    command = [sys.executable, "-m", "pentameter", "train", preset, "--run-dir", str(run)]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    saves = [e for e in events if e["event"] == "checkpoint"][:-1]
    steps = {e["step"]: e["step_seconds"] for e in events if e["event"] == "train"}
    after = [steps[save["step"] + 1] for save in saves]
    before = [steps[save["step"]] for save in saves]
    return {
        "bytes": saves[0]["bytes"],
        "first_stall_seconds": saves[0]["stall_seconds"],
        "stall_seconds": [save["stall_seconds"] for save in saves[1:]],
        "seconds": [save["seconds"] for save in saves[1:]],
        "step_before_seconds": statistics.median(before),
        "step_after_seconds": statistics.median(after),
    }


def disk_seconds(folder: Path, n_bytes: int) -> float:
    """Seconds to write and sync so many bytes in one file."""
    piece = os.urandom(4 * 2**20)
    path = folder / "plain"
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for first in range(0, n_bytes, len(piece)):
        os.write(fd, piece[: n_bytes - first])
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def compare(preset: str, folder: Path) -> dict[str, Any]:
    """Both ways, and the disk before and after."""
    waited = times_of_run(preset, folder, asynchronous=False)
    disk = [disk_seconds(folder, waited["bytes"]) for _ in range(3)]
    beside = times_of_run(preset, folder, asynchronous=True)
    synchronous = statistics.median(waited["seconds"])
    stall = statistics.median(beside["stall_seconds"])
    return {
        "bytes": waited["bytes"],
        "synchronous_seconds": synchronous,
        "stall_seconds": stall,
        "stall_of_synchronous": stall / synchronous,
        "first_stall_seconds": beside["first_stall_seconds"],
        "beside_seconds": statistics.median(beside["seconds"]),
        "step_seconds": beside["step_before_seconds"],
        "step_while_writing_seconds": beside["step_after_seconds"],
        "disk_seconds": statistics.median(disk),
    }


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_over_saves(preset: str, folder: Path, n_saves: int) -> list[tuple[int, int]]:
    """(Save, resident bytes) along many saves of a state of the preset's size."""
    config = load_config(preset, {"model.vocab_size": 256})
    shapes = {spec.name: spec.shape for spec in make_plan(config).table}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    slots = {f"{name}.{slot}": t.clone() for name, t in model.items() for slot in ("m", "v")}
    store = CheckpointStore(folder / "checkpoints", run_id="r", config_hash="c")
    buffers, found = HostBuffers(), []
    for step in range(1, n_saves + 1):
        save = store.plan(Contents(step, {"model": model, "optimizer": slots}, {"step": step}, {}))
        save.start_writing(buffers)
        for tensor in model.values():
            tensor.add_(1e-3)  # the next step
        store.commit(save)
        store.prune(1)
        if step in (1, 2, 5, 10) or step % 50 == 0:
            found.append((step, resident_bytes()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default=None)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--saves", type=int)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        if asked.saves:
            found = memory_over_saves(asked.preset or "quickstart", Path(name), asked.saves)
            for step, n_bytes in found:
                print(f"save {step:>5}  {n_bytes / 2**20:8.1f} MiB resident")
            return
        result = compare(asked.preset or "gpt2-124m", Path(name))
    if asked.json:
        print(json.dumps(result))
        return
    gigabytes = result["bytes"] / 1e9
    print(f"{gigabytes:.2f} GB")
    for key, seconds in result.items():
        if key.endswith("_seconds"):
            rate = f"{gigabytes / seconds:6.2f} GB/s" if "step" not in key else ""
            print(f"{key.removesuffix('_seconds'):<22} {seconds:7.3f} s {rate}")
    print(f"stall of the synchronous time {result['stall_of_synchronous']:.1%}")


if __name__ == "__main__":
    main()
