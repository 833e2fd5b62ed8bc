"""Sampling speed: tokens per second through the cache against a plain loop without one.

Both write `--new-tokens` tokens at temperature 1 from the same start, past the context length,
with a character GPT of 10.7M parameters. They take turns, and the ratio is that of the medians.

    python benchmarks/sample.py [--batch-sizes 1 16] [--new-tokens 512] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pentameter.config.model.attention import AttentionConfig
from pentameter.config.schema import ModelConfig
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.model.gpt import GPT
from pentameter.model.initial import initialize
from plain_gpt import PlainGPT

VOCAB_SIZE = 65
CHARACTER_GPT = ModelConfig(
    vocab_size=VOCAB_SIZE,
    context_length=256,
    n_layers=6,
    d_model=384,
    residual_init_scale=True,
    attention=AttentionConfig(n_heads=6),
)
TARGETS = {1: 10.0, 16: 20.0}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    plain: PlainGPT, model: GPT, batch_size: int, new_tokens: int, rounds: int
) -> dict[str, float]:
    """Return the median tokens per second of both, over all samples, and their ratio."""
    newline = torch.zeros((batch_size, 1), dtype=torch.int64)

    def ours(n: int = new_tokens) -> None:
        settings = Generation(max_new_tokens=n, num_samples=batch_size)
        prompt = np.zeros(1, dtype=np.int64)
        steps = sampled_tokens(model, prompt, VOCAB_SIZE, settings)
        deque(steps, maxlen=0)

    ours(16)
    plain.generate(newline, 4)
    plain_seconds, our_seconds = [], []
    for _ in range(rounds):
        plain_seconds.append(seconds(lambda: plain.generate(newline, new_tokens)))
        our_seconds.append(seconds(ours))
    n_tokens = batch_size * new_tokens
    result = {
        "plain_tokens_per_second": n_tokens / statistics.median(plain_seconds),
        "tokens_per_second": n_tokens / statistics.median(our_seconds),
    }
    result["ratio"] = result["tokens_per_second"] / result["plain_tokens_per_second"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    config = CHARACTER_GPT
    plain = PlainGPT(
        VOCAB_SIZE,
        config.context_length,
        config.n_layers,
        config.attention.n_heads,
        config.d_model,
        0.2,
        0.2,
    ).eval()
    model = GPT(config)
    initialize(model, config, seed=1)
    results = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "new_tokens": asked.new_tokens,
        "batch": {
            size: measure(plain, model, size, asked.new_tokens, asked.rounds)
            for size in asked.batch_sizes
        },
    }
    if asked.json:
        print(json.dumps(results))
        return
    print(f"torch {results['torch']}, {results['threads']} threads, {asked.new_tokens} new tokens")
    print(f"{'batch':>5} {'plain tok/s':>12} {'pentameter tok/s':>17} {'ratio':>7} {'target':>7}")
    for size, row in results["batch"].items():
        print(
            f"{size:>5} {row['plain_tokens_per_second']:>12.1f} {row['tokens_per_second']:>17.1f} "
            f"{row['ratio']:>6.1f}× {TARGETS.get(size, float('nan')):>6.0f}×"
        )


if __name__ == "__main__":
    main()
