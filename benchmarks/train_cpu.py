"""Training on a CPU: the character GPT, plain and ours, and a modern decoder of its size.

    python benchmarks/train_cpu.py [--attention-dropout 0.2] [--rounds 5] [--json]

The sides alternate in one run. Prints seconds per step, tokens/s and peak memory of each, its share
of the measured bf16 product ceiling of the machine, its losses on the same batches, and
the ratios of the medians. Each side runs in a process of its own: an allocator's settings and its
peak memory belong to a process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from pentameter.config.load import load_config
from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.machine.peaks import product_ceiling
from pentameter.optim.build import build_optimizer, set_learning_rate
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.parallel.compute import choose_compute
from pentameter.planning.plan import Plan, make_plan
from plain_gpt import PlainGPT, cosine_learning_rate, make_optimizer, train_step

MODERN = {
    **{"model.norm": "rmsnorm", "model.positions": "rotary", "model.qk_norm": "head"},
    **{"model.n_kv_heads": 2, "model.activation": "swiglu", "model.d_ff": 1024},
}
"""What a Llama or a Qwen has and the character GPT has not, at its width and depth."""
WARM_UP_STEPS = 3  # ours compiles, and both grow their heaps


def batches(plan: Plan) -> Any:
    """The step's batch of the run itself, so that both sides learn from the same text."""
    split = open_dataset(plan.config.data).split("train")
    return training_batches(plan.config, split).batch


def serve_ours(pipe: Connection, plan: Plan) -> None:
    """Run the steps that the parent asks for, as the trainer runs them."""
    engine = choose_compute(plan)  # as the trainer does it: AMX kernels, memory allocator
    stage = assemble(plan, engine.device, engine.precision, compiled=engine.compiled)
    config = plan.config.optimizer
    optimizer = build_optimizer(stage.named_parameters(), plan.table, config)
    batch = batches(plan)

    def step(number: int) -> float:
        loss = stage.forward_backward(batch(number), number).mean
        stage.clip_gradients(stage.gradient_norm(), config.clip_norm)
        set_learning_rate(optimizer, learning_rate(number, config, plan.config.schedule))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    serve(pipe, step)


def serve_plain(pipe: Connection, plan: Plan) -> None:
    """The same steps by the plain GPT."""
    torch.manual_seed(plan.config.seed)
    model_config, schedule = plan.config.model, plan.config.schedule
    model = PlainGPT(
        model_config.vocab_size,
        model_config.context_length,
        model_config.n_layers,
        model_config.n_heads,
        model_config.d_model,
        model_config.dropout,
        model_config.dropout,  # as nanoGPT: one rate, on attention weights too
    )
    model.train()
    optimizer = make_optimizer(model)
    batch = batches(plan)

    def step(number: int) -> float:
        current = batch(number)
        tensors = (torch.from_numpy(current.inputs), torch.from_numpy(current.targets))
        rate = cosine_learning_rate(
            number,
            peak=plan.config.optimizer.learning_rate,
            floor=schedule.min_learning_rate,
            warmup_steps=schedule.warmup_steps,
            decay_steps=schedule.decay_steps,
        )
        return train_step(model, optimizer, [tensors], learning_rate=rate)

    serve(pipe, step)


def serve(pipe: Connection, step: Any) -> None:
    """Answer each step's number with (loss, seconds, peak bytes) until told to stop."""
    while (number := pipe.recv()) is not None:
        start = time.perf_counter()
        loss = step(number)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pipe.send((loss, seconds, peak))


def measure(plans: dict[str, Plan], rounds: int) -> dict[str, Any]:
    """Losses, seconds and peak memory of each side, alternating step by step."""
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Any] = {}
    for name, plan in plans.items():
        pipe, other = context.Pipe()
        target = serve_plain if name == "plain" else serve_ours
        process = context.Process(target=target, args=(other, plan), daemon=True)
        process.start()
        sides[name] = {"pipe": pipe, "process": process, "losses": [], "seconds": [], "peak": 0}
    for number in range(WARM_UP_STEPS + rounds):
        for side in sides.values():
            side["pipe"].send(number)
            loss, seconds, side["peak"] = side["pipe"].recv()
            side["losses"].append(loss)
            if number >= WARM_UP_STEPS:
                side["seconds"].append(seconds)
    for side in sides.values():
        side["pipe"].send(None)
        side["process"].join()
    return sides


def summary(plans: dict[str, Plan], rounds: int) -> dict[str, Any]:
    """Everything the benchmark prints."""
    ceiling = product_ceiling(torch.device("cpu"), torch.bfloat16)
    result: dict[str, Any] = {"rounds": rounds, "bf16_ceiling_flops": ceiling, "sides": {}}
    for name, side in measure(plans, rounds).items():
        plan, seconds = plans[name], median(side["seconds"])
        flops = plan.tokens_per_step * plan.flops_per_token / seconds
        result["sides"][name] = {
            "parameters": plan.n_parameters,
            "seconds": seconds,
            "tokens_per_second": plan.tokens_per_step / seconds,
            "share_of_ceiling": flops / ceiling,
            "peak_bytes": side["peak"],
            "losses": side["losses"],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    gpt = {"model.attention_dropout": asked.attention_dropout, "train.device": "cpu"}
    plans = {}
    for name, overrides in (("plain", gpt), ("ours", gpt), ("modern", gpt | MODERN)):
        config = load_config("shakespeare-char", overrides)
        plans[name] = make_plan(config, open_dataset(config.data).vocab_size)
    result = summary(plans, asked.rounds)
    if asked.json:
        print(json.dumps(result))
        return
    sides = result["sides"]
    for name, side in sides.items():
        print(
            f"{name:<6} {side['parameters']:>10,} parameters {side['seconds']:7.3f} s/step "
            f"{side['tokens_per_second']:9,.0f} tok/s   peak {side['peak_bytes'] / 1e9:.2f} GB   "
            f"{100 * side['share_of_ceiling']:.0f} % of the ceiling   losses "
            + " ".join(f"{loss:.3f}" for loss in side["losses"])
        )
    ours = sides["ours"]
    print(
        f"ours {sides['plain']['seconds'] / ours['seconds']:.2f} × plain; modern per FLOP "
        f"{sides['modern']['share_of_ceiling'] / ours['share_of_ceiling']:.2f} × ours; ceiling of "
        f"bf16 products {result['bf16_ceiling_flops'] / 1e12:.2f} TFLOP/s"
    )


if __name__ == "__main__":
    main()
