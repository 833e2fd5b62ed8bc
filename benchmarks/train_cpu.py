"""Training on a CPU: the character GPT, ours beside a plain one, nanoGPT and Hugging Face Trainer;
a modern decoder; and a mixture of experts beside a dense model of its active size.

    python benchmarks/train_cpu.py [--nanogpt DIR] [--sides ours nanogpt hf-bf16 …] [--turns 2]
                                   [--steps 5] [--least-steps 12] [--attention-dropout 0.2] [--json]

The sides take turns, each alone with the machine in a process of its own that is gone before the
next starts, and warm up until the time of their step has settled. Prints the median of the seconds
of a settled step, tokens/s and peak memory of each side, its share of what the machine's products
reach alone in the precision that a run would choose, the mean of its losses at the last ten steps
that all sides took, on the same batches; the ratio of each to ours, and which peer is the best.

`--nanogpt` names a checkout of https://github.com/karpathy/nanoGPT, whose model.py is then four
sides: fp32 and bf16 autocast, eager and compiled. `hf` has the same four, where `transformers` and
`accelerate` are installed. `dense` and `mixture` are the presets quickstart and stdlib-moe, whose
tokens meet about as many parameters: their ratio is printed in processor seconds, too, which other
programs on the cores change little.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from cpu_peers import HUGGING_FACE, NANOGPT, load_nanogpt, load_transformers
from cpu_turns import LEAST_STEPS, SETTLED, SIDES, Turn, measure_ceiling, take_turn
from pentameter.config.files.load import load_config
from pentameter.data.open_dataset import open_dataset
from pentameter.machine.capabilities import machine_capabilities
from pentameter.planning.plan import Plan, make_plan

MODERN = {
    **{"model.norm": "rmsnorm", "model.positions": "rotary", "model.attention.qk_norm": "head"},
    **{
        "model.attention.n_kv_heads": 2,
        "model.feed_forward.activation": "swiglu",
        "model.feed_forward.width": 1024,
    },
}
"""What a Llama or a Qwen has and the character GPT has not, at its width and depth."""
LAST = 10  # losses that are compared
PEERS = NANOGPT | HUGGING_FACE
PRESETS = {"dense": "quickstart", "mixture": "stdlib-moe"}
"""Side → preset, where it is not the character GPT's. Both have attention without dropout."""


def plan_of(side: str, attention_dropout: float) -> Plan:
    """What a side trains; `attention_dropout` is ours, the others drop weights as nanoGPT does."""
    if side in PRESETS:
        config = load_config(PRESETS[side], {"train.device": "cpu"})
    else:
        gpt = {"model.attention.dropout": attention_dropout, "train.device": "cpu"}
        config = load_config("shakespeare-char", gpt | (MODERN if side == "modern" else {}))
    return make_plan(config, open_dataset(config.data).vocab_size)


def side_summary(plan: Plan, turns: list[Turn], ceiling: float, last: int) -> dict[str, Any]:
    """One side's figures over its turns; `last` is the number of the last step of every turn."""
    seconds = median(second for turn in turns for second in turn.seconds)
    flops = plan.tokens_per_step * plan.least_flops_per_token / seconds
    return {
        "parameters": plan.n_parameters,
        "seconds": seconds,
        "cpu_seconds": median(second for turn in turns for second in turn.cpu_seconds),
        "tokens_per_second": plan.tokens_per_step / seconds,
        "share_of_ceiling": flops / ceiling,
        "peak_bytes": max(turn.peak_bytes for turn in turns),
        "loss": fmean(turns[0].losses[max(0, last - LAST) : last]),
        "turns": [asdict(turn) for turn in turns],
    }


def summary(sides: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """Everything the benchmark prints, as `asked` on its command line."""
    plans = {side: plan_of(side, asked.attention_dropout) for side in sides}
    any_plan = next(iter(plans.values()))
    precision, ceiling = measure_ceiling(any_plan)
    turns: dict[str, list[Turn]] = {side: [] for side in sides}
    for _ in range(asked.turns):
        for side, plan in plans.items():
            turn = take_turn(side, plan, asked.steps, asked.nanogpt, asked.least_steps)
            turns[side].append(turn)
        ceiling = max(ceiling, measure_ceiling(any_plan)[1])
    last = min(len(turn.losses) for of_side in turns.values() for turn in of_side)
    return {
        "cpu": machine_capabilities().cpu.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "precision": precision,
        "ceiling_flops": ceiling,
        "settled": SETTLED,
        "sides": {
            side: side_summary(plan, turns[side], ceiling, last) for side, plan in plans.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print a summary for people."""
    sides = result["sides"]
    print(
        f"{result['cpu']}, torch {result['torch']}; {result['precision']} products alone "
        f"{result['ceiling_flops'] / 1e12:.3f} TFLOP/s\n"
        f"warmed up until settled: {result['settled']}"
    )
    for name, side in sides.items():
        print(
            f"\n{name:<21} {side['parameters']:>10,} parameters {side['seconds']:7.3f} s/step "
            f"({side['cpu_seconds']:.3f} of processors) {side['tokens_per_second']:7,.0f} tok/s   "
            f"{100 * side['share_of_ceiling']:.0f} % of the products   "
            f"peak {side['peak_bytes'] / 1e9:.2f} GB   loss {side['loss']:.3f}\n"
            f"  {side['turns'][0]['how']}"
        )
        for turn in side["turns"]:
            warm_up = " ".join(f"{seconds:.2f}" for seconds in turn["warm_up_seconds"])
            state = "settled" if turn["settled"] else "NOT settled"
            print(
                f"  {warm_up} {state} | "
                + " ".join(f"{seconds:.2f}" for seconds in turn["seconds"])
                + f"   others {turn['other_cores']:.2f} cores"
            )
    if "dense" in sides and "mixture" in sides:
        dense, mixture = sides["dense"], sides["mixture"]
        print(
            f"\nmixture {mixture['seconds'] / dense['seconds']:.2f} × dense, "
            f"{mixture['cpu_seconds'] / dense['cpu_seconds']:.2f} × in processor seconds"
        )
    for line in ratio_lines(sides):
        print(line)


def ratio_lines(sides: dict[str, Any]) -> list[str]:
    """The ratio of each other side's seconds to ours, and the peer that comes closest."""
    ours = sides.get("ours")
    if ours is None:
        return []
    ratios = {
        name: (side["seconds"] / ours["seconds"], side["cpu_seconds"] / ours["cpu_seconds"])
        for name, side in sides.items()
        if name == "plain" or name in PEERS
    }
    lines = [
        f"{name:<21} {seconds:5.2f} × ours, {cpu_seconds:.2f} × in processor seconds"
        for name, (seconds, cpu_seconds) in ratios.items()
    ]
    peers = [name for name in ratios if name in PEERS]
    if peers:
        best = min(peers, key=ratios.__getitem__)
        lines.append(f"the best of the peers is {best}: ours is {ratios[best][0]:.2f} × as fast")
    if "modern" in sides:
        per_flop = sides["modern"]["share_of_ceiling"] / ours["share_of_ceiling"]
        lines.append(f"modern per FLOP {per_flop:.2f} × ours")
    return ["", *lines] if lines else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, metavar="DIR")
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--least-steps", type=int, default=LEAST_STEPS, metavar="N")
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    unasked = HUGGING_FACE if asked.nanogpt is not None else PEERS
    sides = asked.sides or [side for side in SIDES if side not in unasked]
    if asked.nanogpt is not None:
        load_nanogpt(asked.nanogpt)
    elif NANOGPT.keys() & set(sides):
        parser.error("--sides nanogpt needs --nanogpt DIR")
    if HUGGING_FACE.keys() & set(sides):
        load_transformers()
    result = summary(sides, asked)
    print(json.dumps(result)) if asked.json else show(result)


if __name__ == "__main__":
    main()
