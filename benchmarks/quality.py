"""Time to quality: seconds and steps to a validation loss on tiny Shakespeare, whole split.

    python benchmarks/quality.py [--presets NAME …] [--seeds 3] [--target 1.4697] [--json]

Each preset trains once with each seed, in a process of its own, and stops at the first evaluation
at or below the target. Seconds count from the start of the process, so loading, compiling and every
evaluation are in them. Where `shakespeare-char` is among the presets, steps of the plain GPT
(`plain_gpt.py`, the same recipe in fp32, eager) are timed too, and the seconds it would need are
its step's median × the steps that the recipe took: it does the same arithmetic, four hours of it.
The machine must do nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = 1.4697  # nanoGPT's published best for its character preset
RECIPE = "shakespeare-char"  # whose arithmetic the plain GPT does


class Race:
    """A hook that stops a run at the target, and remembers where that was."""

    def __init__(self, target: float) -> None:
        self.start = time.perf_counter()
        self.target = target
        self.losses: dict[int, float] = {}
        self.steps: int | None = None
        self.seconds: float | None = None

    def on_eval(self, run: Any, metrics: Any) -> None:
        self.losses[metrics.step] = metrics.loss
        if metrics.split == "val" and metrics.loss <= self.target and self.steps is None:
            self.steps, self.seconds = metrics.step, time.perf_counter() - self.start
            run.stop("target reached")


def run_one(preset: str, seed: int, target: float) -> None:
    """Train one run, and print its result as JSON."""
    race = Race(target)  # before anything is imported
    import pentameter as pm
    from pentameter.config.files.load import load_config

    # What only shows progress would cost time that is not the recipe's.
    shown = {"train.eval_train_tokens": None, "train.sample_interval": None}
    config = load_config(preset, {"seed": seed, "train.device": "cpu", **shown})
    with tempfile.TemporaryDirectory() as folder:
        pm.Trainer(config, run_dir=Path(folder) / "run", hooks=[race], quiet=True).fit()
    print(json.dumps({"steps": race.steps, "seconds": race.seconds, "losses": race.losses}))


def plain_seconds_per_step(n_steps: int) -> float:
    """The median time of a step of the plain GPT, once it has settled."""
    from cpu_turns import take_turn
    from train_cpu import plan_of

    return statistics.median(take_turn("plain", plan_of("plain", 0.0), n_steps).seconds)


def race_of(preset: str, seed: int, target: float) -> dict[str, Any]:
    """The result of `run_one` in a process of its own."""
    command = [sys.executable, __file__, "--one", preset, str(seed), "--target", str(target)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.0f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.0f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=[RECIPE, "shakespeare-fast"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--plain-steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("PRESET", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        run_one(asked.one[0], int(asked.one[1]), asked.target)
        return
    result: dict[str, Any] = {"target": asked.target}
    for preset in asked.presets:
        races = [race_of(preset, 1 + number, asked.target) for number in range(asked.seeds)]
        result[preset] = races
        reached = [race for race in races if race["steps"] is not None]
        if not asked.json:
            print(f"{preset}: {len(reached)} of {len(races)} reached {asked.target}", end="")
            for key in ("steps", "seconds"):
                if reached:
                    print(f"; {key} {spread([race[key] for race in reached])}", end="")
            print(flush=True)
    if RECIPE in asked.presets:
        per_step = result["plain_seconds_per_step"] = plain_seconds_per_step(asked.plain_steps)
        steps = [race["steps"] for race in result[RECIPE] if race["steps"] is not None]
        if steps and not asked.json:
            seconds = statistics.fmean(steps) * per_step
            print(f"plain: {per_step:.2f} s/step, so {seconds:.0f} s for the steps of {RECIPE}")
    if asked.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
