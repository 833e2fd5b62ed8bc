"""How long a user waits: for help, for the first step, for evaluations.

    python benchmarks/startup.py [--json]

`--help` is the best of five starts. The first step is timed by the run itself (`step_seconds` of
step 1 in metrics.jsonl, with everything before it from the process's start), once with an empty
compilation cache and once more. Evaluation's share is that of a run at the preset's intervals,
from its own metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "pentameter"]


def seconds_of(arguments: list[str], environment: dict[str, str] | None = None) -> float:
    """Wall-clock seconds of one process."""
    start = time.perf_counter()
    subprocess.run(
        [*COMMAND, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    return time.perf_counter() - start


def first_step_seconds(preset: str, folder: Path, name: str, cache: Path) -> float:
    """From the command to the end of step 1, by a run of one step without evaluation."""
    arguments = ["train", preset, "--run-dir", str(folder / name), "--train.steps=1"]
    arguments += ["--train.eval-interval=none", "--train.sample-interval=none"]
    arguments += ["--train.compile=true"]
    return seconds_of(arguments, {"TORCHINDUCTOR_CACHE_DIR": str(cache)})


def evaluation_share(metrics: Path) -> float:
    """Seconds of evaluation per second of training in a run's metrics."""
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [e for e in events if e["event"] == "eval" and e["step"] > 0]
    steps = [e["step_seconds"] for e in events if e["event"] == "train"]
    typical = sorted(steps)[len(steps) // 2]
    trained = typical * evaluations[-1]["step"]
    return sum(e["seconds"] for e in evaluations) / trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument(
        "--metrics", type=Path, help="metrics.jsonl of a run, for evaluation's share"
    )
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "help_seconds": min(seconds_of(["--help"]) for _ in range(5)),
        "train_help_seconds": min(seconds_of(["train", "--help"]) for _ in range(5)),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        result["first_step_cold_seconds"] = first_step_seconds(asked.preset, folder, "a", cache)
        result["first_step_warm_seconds"] = first_step_seconds(asked.preset, folder, "b", cache)
    if asked.metrics:
        result["evaluation_share"] = evaluation_share(asked.metrics)
    if asked.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<26} {value:.3f}")


if __name__ == "__main__":
    main()
