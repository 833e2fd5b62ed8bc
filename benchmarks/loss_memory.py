"""Memory and time of the head with its loss, and of blocks, with and without what saves memory.

    python benchmarks/loss_memory.py [--device cpu|cuda] [--precision bf16|fp32] [--rounds 3]

Head: logits and loss of 4 × 1024 tokens over 50,304 tokens, width 768, forward and backward; the
logits whole, or in chunks (`pentameter.model.loss`). Activations: 6 layers of that width
and a tiny head; all kept, or recomputed (`train.activation_checkpoint`). Bytes are
what a warm pass holds beyond what was there before it, between forward and backward, and at its
peak, gradients of weights included: of a process of its own on a CPU (Linux: `VmRSS`, `VmHWM`),
of the device's allocator on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROWS, CONTEXT, VOCABULARY, WIDTH, LAYERS = 4, 1024, 50_304, 768, 6
VARIANTS = {
    "head": ("whole", "chunked", "chunked, compiled"),
    "activations": ("kept", "selective", "full"),
}

Pass = Callable[[Callable[[], None]], float]
"""Runs forward, its argument, and backward; the mean loss."""


def head_pass(variant: str, device: Any, dtype: Any) -> Pass:
    """One forward and backward pass of head and loss."""
    import torch
    import torch.nn.functional as F

    from pentameter.model.loss import chunked_loss_sum, compiled_row_loss, loss_sum, row_loss

    torch.manual_seed(0)
    x = torch.randn(ROWS, CONTEXT, WIDTH, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(VOCABULARY, WIDTH, device=device)).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS, CONTEXT), device=device)
    per_chunk = compiled_row_loss if variant == "chunked, compiled" else row_loss

    def run(between: Callable[[], None]) -> float:
        if variant == "whole":
            loss = loss_sum(F.linear(x, weight.to(dtype)), targets, VOCABULARY)
        else:
            loss = chunked_loss_sum(x, weight, None, targets, VOCABULARY, per_chunk)
        between()
        (loss / targets.numel()).backward()
        x.grad = weight.grad = None
        return loss.item() / targets.numel()

    return run


def activations_pass(variant: str, device: Any, dtype: Any) -> Pass:
    """One forward and backward pass of the blocks."""
    import torch

    from pentameter.config.model.attention import AttentionConfig
    from pentameter.config.schema import ModelConfig
    from pentameter.model.gpt import build_model
    from pentameter.model.loss import loss_sum
    from pentameter.model.matmul import PLAIN
    from pentameter.parallel.linear import install_forwards
    from pentameter.parallel.memory.recomputation import recomputed

    config = ModelConfig(
        vocab_size=64,
        context_length=CONTEXT,
        n_layers=LAYERS,
        d_model=WIDTH,
        attention=AttentionConfig(n_heads=12),
    )
    model = build_model(config, 0, device=device).train()
    if variant != "kept":
        install_forwards(model, PLAIN, recomputed(model.blocks.values(), variant))  # type: ignore[arg-type]
    torch.manual_seed(0)
    tokens = torch.randint(64, (ROWS, CONTEXT), device=device)

    def run(between: Callable[[], None]) -> float:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_sum(model(tokens), tokens, 64) / tokens.numel()
        between()
        loss.backward()
        model.zero_grad()
        return loss.item()

    return run


def measure(what: str, variant: str, device_name: str, precision: str, rounds: int) -> None:
    """Print what one variant took, as JSON."""
    import torch

    device = torch.device(device_name)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    make = head_pass if what == "head" else activations_pass
    print(json.dumps(_timed(make(variant, device, dtype), device, rounds)))


def _timed(run: Pass, device: Any, rounds: int) -> dict[str, float]:
    import torch

    run(lambda: None)  # compiles, and fills caches
    before = _held_bytes(device)
    _forget_peak(device)
    held: list[int] = []
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        loss = run(lambda: held.append(_held_bytes(device)))  # `item` waits for the device
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _status_bytes("VmHWM")
    return {
        "held_bytes": max(held) - before,
        "peak_bytes": peak - before,
        "seconds": median(seconds),
        "loss": loss,
    }


def _held_bytes(device: Any) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later is not held
    return _status_bytes("VmRSS")


def _forget_peak(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident size


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(VARIANTS), help="one of the two parts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        measure(options.only, options.variant, options.device, options.precision, options.rounds)
        return
    results = []
    for what in (options.only,) if options.only else VARIANTS:
        for variant in VARIANTS[what]:
            command = [sys.executable, __file__, "--only", what, "--variant", variant]
            command += ["--device", options.device, "--precision", options.precision]
            command += ["--rounds", str(options.rounds)]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results.append({"what": what, "variant": variant, **json.loads(answer)})
            first = next(result for result in results if result["what"] == what)
            if not options.json:
                _print(results[-1], first)
    if options.json:
        print(json.dumps(results))


def _print(result: dict[str, Any], first: dict[str, Any]) -> None:
    numbers = (
        f"{name} {result[key] / scale:6.{digits}f} {unit} ({result[key] / first[key]:.2f} ×)"
        for name, key, scale, digits, unit in (
            ("held", "held_bytes", 1e6, 0, "MB"),
            ("peak", "peak_bytes", 1e6, 0, "MB"),
            ("", "seconds", 1, 3, "s"),
        )
    )
    print(f"{result['what']:<12}{result['variant']:<18}", *numbers, f"loss {result['loss']:.5f}")


if __name__ == "__main__":
    main()
