"""Training on a CPU: ours against the plain GPT, in one run, alternating.

    python benchmarks/train_cpu.py [--attention-dropout 0.2] [--rounds 5] [--json]

Prints seconds per step and tokens/s of both, the ratio of the medians, the share of the
machine's measured bf16 product ceiling, both peak memories, and both loss curves on the same
batches. Each side runs in a process of its own: an allocator's settings and its peak memory
belong to a process.
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
from pentameter.config.schema import Config
from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.machine.peaks import product_ceiling
from pentameter.optim.build import build_optimizer, set_learning_rate
from pentameter.optim.clip import clip_gradients, gradient_norm
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.parallel.compute import choose_compute
from pentameter.planning.plan import Plan, make_plan
from plain_gpt import PlainGPT, cosine_learning_rate, make_optimizer, train_step

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
        clip_gradients(stage.parameters(), gradient_norm(stage.parameters()), config.clip_norm)
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


def measure(plan: Plan, rounds: int) -> dict[str, Any]:
    """Losses, seconds and peak memory of both sides, alternating step by step."""
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Any] = {}
    for name, target in (("ours", serve_ours), ("plain", serve_plain)):
        pipe, other = context.Pipe()
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


def summary(config: Config, plan: Plan, rounds: int) -> dict[str, Any]:
    """Everything the benchmark prints."""
    ceiling = product_ceiling(torch.device("cpu"), torch.bfloat16)
    sides = measure(plan, rounds)
    tokens = plan.tokens_per_step
    ours, plain = (median(sides[name]["seconds"]) for name in ("ours", "plain"))
    return {
        "attention_dropout": config.model.attention_dropout,
        "rounds": rounds,
        "bf16_ceiling_flops": ceiling,
        "share_of_ceiling": tokens * plan.flops_per_token / ours / ceiling,
        "ours": {"seconds": ours, "tokens_per_second": tokens / ours},
        "plain": {"seconds": plain, "tokens_per_second": tokens / plain},
        "ratio": plain / ours,
        "peak_bytes": {name: side["peak"] for name, side in sides.items()},
        "losses": {name: side["losses"] for name, side in sides.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    overrides = {"model.attention_dropout": asked.attention_dropout, "train.device": "cpu"}
    config = load_config("shakespeare-char", overrides)
    plan = make_plan(config, open_dataset(config.data).vocab_size)
    result = summary(config, plan, asked.rounds)
    if asked.json:
        print(json.dumps(result))
        return
    for name in ("plain", "ours"):
        print(
            f"{name:<6} {result[name]['seconds']:7.3f} s/step "
            f"{result[name]['tokens_per_second']:9,.0f} tok/s   peak "
            f"{result['peak_bytes'][name] / 1e9:.2f} GB   losses "
            + " ".join(f"{loss:.3f}" for loss in result["losses"][name])
        )
    print(
        f"ratio {result['ratio']:.2f} ×; ours does {100 * result['share_of_ceiling']:.0f} % of the "
        f"measured bf16 product ceiling, {result['bf16_ceiling_flops'] / 1e12:.2f} TFLOP/s"
    )


if __name__ == "__main__":
    main()
