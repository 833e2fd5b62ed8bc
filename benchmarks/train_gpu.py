"""Training on a GPU: ours against a plain compiled bf16 GPT, in one run, alternating.

    python benchmarks/train_gpu.py [--sizes gpt2-124m char] [--rounds 5] [--json FILE]

Prints, of both sides, milliseconds per step, tokens/s, MFU against the device's published peak,
the share of its measured matrix-product ceiling, and peak memory; then the ratio of the medians.
The sides take turns on the device (`gpu_turns.py`). A turn is timed from an idle device to an idle
device, without a wait between its steps but those the side itself makes.

`--device cpu --sizes tiny --rounds 1` tries the script out where there is no GPU; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu_sides import SIDES
from gpu_turns import Machine, OutOfDeviceMemoryError, Sides, Turn
from pentameter.config.schema import Config
from pentameter.machine.capabilities import machine_capabilities
from pentameter.machine.choices import choose_precision
from pentameter.machine.environment import device_name, environment, versions
from pentameter.machine.peaks import measure_matmul, peak_flops
from pentameter.parallel.precision import arithmetic
from pentameter.planning.flops import CONVENTION
from pentameter.planning.plan import Plan, make_plan

WARM_UP_STEPS = 3
MOST_STEPS_OF_A_TURN = 1000

GPT2_124M: dict[str, Any] = {
    "model": {
        "vocab_size": 50257,
        "vocab_multiple": 128,
        "context_length": 1024,
        "n_layers": 12,
        "d_model": 768,
        "residual_init_scale": True,
        "attention": {"n_heads": 12},
    },
    "optimizer": {"learning_rate": 6e-4, "betas": [0.9, 0.95]},
    "train": {"tokens_per_step": 524_288, "micro_batch_size": 64},  # 2**19 = 8 × 64 × 1,024
}
CHAR: dict[str, Any] = {
    "model": {
        "vocab_size": 65,
        "context_length": 256,
        "n_layers": 6,
        "d_model": 384,
        "dropout": 0.2,
        "residual_init_scale": True,
        "attention": {"n_heads": 6},
    },
    "train": {"batch_size": 64, "micro_batch_size": 64},
}
TINY: dict[str, Any] = {
    "model": {
        "vocab_size": 250,
        "vocab_multiple": 64,
        "context_length": 32,
        "n_layers": 2,
        "d_model": 32,
        "dropout": 0.1,
        "attention": {"n_heads": 2},
    },
    "train": {"batch_size": 8, "micro_batch_size": 4},
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2-124m": GPT2_124M,
    "char": CHAR,
    "char-attention-dropout": {**CHAR, "model": {**(CHAR["model"]), "attention": {"dropout": 0.2}}},
    "tiny": TINY,
}
AIMS = {
    "gpt2-124m": "65 % of the measured ceiling, 1.3 × plain",
    "char": "6 ms per step",
    "char-attention-dropout": "6 ms per step",
}


@dataclass
class Record:
    """All turns of one side."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    n_parameters: int = 0
    loss: float = math.nan
    profile: str | None = None

    def add(self, turn: Turn) -> None:
        """Take in a turn; a profiled one is not timed."""
        if turn.profile is None:
            self.seconds.append(turn.seconds)
        self.peak_bytes = max(self.peak_bytes, turn.peak_bytes)
        self.n_parameters, self.loss, self.profile = turn.n_parameters, turn.loss, turn.profile


def plans(size: str, micro_batch_size: int | None) -> Iterator[Plan]:
    """The plan of a size, then the same with ever smaller micro-batches."""
    tree = SIZES[size]
    micro = micro_batch_size or tree["train"]["micro_batch_size"]
    while micro >= 1:
        config = Config.model_validate(
            {
                "name": size,
                "data": {"corpus": "grammar"},  # named because one must be; never opened
                "schedule": {"name": "constant"},
                **tree,
                "train": {"steps": 1000, **tree["train"], "micro_batch_size": micro},
            }
        )
        yield make_plan(config)
        micro //= 2


def alternate(sides: Sides, rounds: int, seconds: float, profiled: bool) -> dict[str, Record]:
    """All rounds of both sides."""
    sides.warm_up(1)
    warm = [sides.turn(name, 2, WARM_UP_STEPS - 1).seconds for name in SIDES]
    n_steps = min(MOST_STEPS_OF_A_TURN, max(1, math.ceil(seconds / max(warm))))
    records = {name: Record() for name in SIDES}
    first = 1 + WARM_UP_STEPS
    for number in range(rounds):
        names = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))  # no one is always first
        for name in names:
            records[name].add(sides.turn(name, first, n_steps))
        first += 1 + n_steps
    if profiled:
        for name, record in records.items():
            record.add(sides.turn(name, first, 1, profiled=True))
    return records


def measure(
    size: str, machine: Machine, asked: argparse.Namespace
) -> tuple[Plan, dict[str, Record]]:
    """The plan that fits, and what both sides did of it."""
    for plan in plans(size, asked.micro_batch_size):
        try:
            with Sides(plan, machine) as sides:
                return plan, alternate(sides, asked.rounds, asked.seconds, asked.profile)
        except OutOfDeviceMemoryError as error:
            print(f"{size}: micro-batches of {plan.micro_batch_size} do not fit ({error})")
    raise SystemExit(f"{size} does not fit on this device even with micro-batches of 1")


def summary(
    plan: Plan, records: dict[str, Record], peak: float | None, ceiling: float
) -> dict[str, Any]:
    """The figures of one size."""
    tokens = plan.tokens_per_step
    result: dict[str, Any] = {
        "tokens_per_step": tokens,
        "micro_batch_size": plan.micro_batch_size,
        "n_micro_batches": plan.n_micro_batches,
        "context_length": plan.config.model.context_length,
        "flops_per_token": plan.least_flops_per_token,
    }
    for name, record in records.items():
        seconds = median(record.seconds)
        flops = tokens * plan.least_flops_per_token / seconds
        result[name] = {
            "n_parameters": record.n_parameters,
            "step_seconds": seconds,
            "step_seconds_of_rounds": record.seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": flops / peak if peak else None,
            "share_of_ceiling": flops / ceiling,
            "peak_memory_bytes": record.peak_bytes,
            "loss": record.loss,
        }
    result["ratio"] = result["plain"]["step_seconds"] / result["ours"]["step_seconds"]
    return result


def show(size: str, result: dict[str, Any]) -> None:
    """Print the figures of one size."""
    micro = f"{result['n_micro_batches']} × {result['micro_batch_size']}"
    print(
        f"\n{size}: {result['ours']['n_parameters']:,} parameters, {result['tokens_per_step']:,} "
        f"tokens per step = {micro} × {result['context_length']:,}, "
        f"{result['flops_per_token'] / 1e6:.1f} MFLOP per token"
    )
    print(
        f"{'':<6} {'ms/step':>9} {'slowest':>9} {'tok/s':>12} {'MFU':>7} {'of ceiling':>11} "
        f"{'peak GB':>8} {'loss':>7}"
    )
    for name in SIDES:
        row = result[name]
        mfu = "–" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        print(
            f"{name:<6} {1e3 * row['step_seconds']:>9.2f} "
            f"{1e3 * max(row['step_seconds_of_rounds']):>9.2f} {row['tokens_per_second']:>12,.0f} "
            f"{mfu:>7} {100 * row['share_of_ceiling']:>9.1f} % "
            f"{row['peak_memory_bytes'] / 1e9:>8.2f} {row['loss']:>7.3f}"
        )
    aim = f" (aim: {AIMS[size]})" if size in AIMS else ""
    print(f"ratio {result['ratio']:.2f} ×{aim}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu_sizes = [size for size in SIZES if size != "tiny"]
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=gpu_sizes)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a side's turn, about")
    parser.add_argument("--micro-batch-size", type=int, help="the largest to try")
    parser.add_argument("--eager", action="store_true", help="compile neither side")
    parser.add_argument("--profile", action="store_true", help="then one step of each, by kernel")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --device cpu --sizes tiny only tries the script out")
    if asked.rounds < 1 or (asked.micro_batch_size or 1) < 1:
        parser.error("--rounds and --micro-batch-size must be at least 1")
    return asked


def main() -> None:
    asked = parse()
    device = torch.device(asked.device)
    capabilities = machine_capabilities()
    precision, _reason = choose_precision("auto", device, capabilities)
    machine = Machine(device, precision, compiled=not asked.eager)
    name = device_name(device, capabilities)
    peak = peak_flops(name, precision)
    seconds = 1.0 if device.type == "cuda" else 0.1
    ceiling = measure_matmul(device, arithmetic(precision).products, seconds)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    facts = environment(device, capabilities)
    facts["versions"] |= {**versions(("triton",)), "cudnn": torch.backends.cudnn.version()}
    published = "no published peak" if peak is None else f"published peak {peak / 1e12:.1f} TFLOP/s"
    print(
        f"{name} · {capabilities.gpu_runtime or 'no GPU runtime'} · {precision} · {published}, "
        f"measured products {ceiling / 1e12:.1f} TFLOP/s\n"
        + " · ".join(f"{package} {version}" for package, version in facts["versions"].items())
        + f"\nFLOPs: {CONVENTION}; {asked.rounds} rounds"
    )
    results = {}
    for size in asked.sizes:
        plan, records = measure(size, machine, asked)
        results[size] = summary(plan, records, peak, ceiling)
        show(size, results[size])
        for side, record in records.items():
            if record.profile is not None:
                print(f"\n{size}, {side}, one step:\n{record.profile}")
    if asked.json is not None:
        document = {
            "device_name": name,
            "precision": precision,
            "compiled": machine.compiled,
            "rounds": asked.rounds,
            "peak_flops": peak,
            "ceiling_flops": ceiling,
            "flops_convention": CONVENTION,
            "environment": facts,
            "sizes": results,
        }
        asked.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
