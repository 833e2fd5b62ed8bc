"""The cost of idle OpenMP threads: spinning as the runtime does, for a while, or not at all.

    python benchmarks/wait_policy.py [--rounds 3] [--steps 60]

Each case trains the quickstart's model by the command line, in turn under each policy, on a machine
that does nothing else, beside one program for each core, and beside two. It prints tokens per
second, the median over the rounds of each run's median step, and each as a ratio of the runtime's
default.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

POLICIES = {
    "default": {"GOMP_SPINCOUNT": "300000"},
    "bounded": {"GOMP_SPINCOUNT": "60000"},  # pentameter's on a quiet machine
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},  # and on a busy one
}

CASES = {
    "one process, compiled": ["--train.compile", "true"],
    "one process, eager": ["--train.compile", "false"],
    "data=2": ["--nproc", "2"],
    "tensor=2": ["--nproc", "2", "--parallel.tensor", "2", "--train.compile", "false"],
    "pipeline=2": ["--nproc", "2", "--parallel.pipeline", "2", "--train.compile", "false"],
}
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Programs beside the run, each of which wants a core for itself."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tokens_per_second(arguments: list[str], policy: dict[str, str], n_steps: int) -> float:
    """The median over the second half of a run's steps."""
    environment = {key: value for key, value in os.environ.items() if key not in _CHOSEN}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "pentameter", "train", "quickstart", "--run-dir", str(run)]
        command += ["--train.steps", str(n_steps), "--train.eval-interval", "none"]
        command += ["--train.sample-interval", "none", "--log.interval", "1", *arguments]
        subprocess.run(
            command, env={**environment, **policy}, check=True, stdout=subprocess.DEVNULL
        )
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [event["tokens_per_second"] for event in events if event["event"] == "train"]
    return median(speeds[len(speeds) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    n_cores = len(os.sched_getaffinity(0))
    print(f"{n_cores} cores; tokens/s")
    print(f"{'':24}{'machine':10}", *(f"{name:>16}" for name in POLICIES))
    for case in options.cases:
        for n_busy, machine in ((0, "quiet"), (n_cores, "busy"), (2 * n_cores, "crowded")):
            found: dict[str, list[float]] = {name: [] for name in POLICIES}
            for _ in range(options.rounds):
                for name, policy in POLICIES.items():
                    with busy_cores(n_busy):
                        found[name].append(tokens_per_second(CASES[case], policy, options.steps))
            default = median(found["default"])
            speeds = (f"{median(s):9,.0f} {median(s) / default:4.2f} ×" for s in found.values())
            print(f"{case:24}{machine:10}", *speeds, flush=True)


if __name__ == "__main__":
    main()
