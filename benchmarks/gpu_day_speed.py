"""Items of a GPU day that measure: whole steps beside plain ones, and kernels beside what they
replace. Times are medians of turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_day_cases import plan_of, steps
from gpu_day_times import in_turns, milliseconds

Tell = Callable[..., None]


def of_kernels(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell whether the kernels that drop attention weights agree with stored weights, and the time
    and memory of both."""
    from pentameter.config.model.attention import AttentionConfig
    from pentameter.config.schema import ModelConfig
    from pentameter.model.attention.dot_product import PLAIN_ATTENTION, DotProductAttention
    from pentameter.model.gpu.forms import obstacle_of
    from pentameter.parallel.context.run_attention import kernel_obstacle

    for K in (64, 128):
        heads = AttentionConfig(n_heads=4, dropout=0.2, head_size=K, n_kv_heads=2)
        config = ModelConfig(
            vocab_size=64, context_length=256, n_layers=1, d_model=256, attention=heads
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            trial = partial(kernel_obstacle, config, dtype, device)
            tell(channels=K, dtype=str(dtype), obstacle=obstacle_of(trial))
    if device.type != "cuda":
        return
    from pentameter.model.attention.dropout_kernels import KernelAttention

    forms: dict[str, DotProductAttention] = {
        "kernels": KernelAttention(),
        "written out": PLAIN_ATTENTION,
    }
    for B, H, T in ((64, 6, 256), (16, 12, 1024), (4, 16, 4096)):
        row: dict[str, Any] = {"shape": (B, H, T, 64)}
        for name, attention in forms.items():
            torch.cuda.reset_peak_memory_stats()
            row[f"{name} ms"] = milliseconds(_dropping(attention, B, H, T, device), device)
            row[f"{name} peak MB"] = round(torch.cuda.max_memory_allocated() / 1e6)
        tell(**row)


def _dropping(attention: Any, B: int, H: int, T: int, device: torch.device) -> Callable[[], Any]:
    """Return a forward and backward pass of attention with dropout."""
    from pentameter.keyed import bits, make_key
    from pentameter.model.attention.dot_product import Weighting
    from pentameter.model.dropout import WeightsDropout

    shape = (B, H, T, 64)
    q, k, v, g = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [each.requires_grad_() for each in (q, k, v)]
    index = torch.arange(2 * B, dtype=torch.int32)
    keys = bits(make_key("day", "kernels"), index).view(B, 2).to(device)
    how = Weighting(dropout=WeightsDropout(keys, 0.2, 0, T))
    return lambda: torch.autograd.grad(attention(*inputs, how), inputs, g)


def _beside_plain(tell: Tell, device: torch.device, folder: Path, size: str, *more: str) -> None:
    path = folder / f"{size}.json"
    script = Path(__file__).with_name("train_gpu.py")
    options = ["--sizes", size if device.type == "cuda" else "tiny", "--json", str(path), *more]
    if device.type != "cuda":
        options += ["--device", device.type, "--rounds", "1", "--seconds", "1", "--eager"]
    subprocess.run([sys.executable, str(script), *options], check=True)
    tell(figures=json.loads(path.read_text()))


def of_gpt2(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell the step of GPT-2 (124M) beside a plain compiled one, by turns."""
    _beside_plain(tell, device, folder, "gpt2-124m", "--rounds", "3", "--seconds", "5")


def of_char(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell the step of the character GPT beside a plain compiled one, and of a loop that reads
    every number at once."""
    if device.type != "cuda":
        tell(skipped="on a CPU it is the item 124m once more")
        return
    _beside_plain(tell, device, folder, "char", "--rounds", "3", "--seconds", "2")
    model = {"vocab_size": 65, "context_length": 256, "n_layers": 6, "d_model": 384, "dropout": 0.2}
    sections = {
        "model": {**model, "attention": {"n_heads": 6}},
        "train": {"batch_size": 64, "micro_batch_size": 64},
    }
    for late in (True, False):
        seconds: list[float] = []
        steps(plan_of(sections), device, "bf16", compiled=True, n=60, late=late, seconds=seconds)
        tell(late=late, step_ms=1000 * statistics.median(seconds[20:]))


def of_stream(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell what forward and backward of GPT-2 (124M) take with the residual stream in fp32 and in
    bf16, by turns, and the loss and gradient norm of both."""
    from gpu_day_cases import keyed_batch
    from pentameter.model.gpu.forms import GpuForms
    from pentameter.parallel.assemble import assemble

    is_gpu = device.type == "cuda"
    model: dict[str, Any] = {"dropout": 0.0, "bias": True}
    if is_gpu:
        model |= {"vocab_size": 50257, "vocab_multiple": 128, "context_length": 1024}
        model |= {"n_layers": 12, "d_model": 768, "attention": {"n_heads": 12}}
    rows = 64 if is_gpu else 2
    forms: dict[str, Callable[[], Any]] = {}
    for stream in ("weights", "bf16"):
        train = {"batch_size": rows, "micro_batch_size": rows, "precision": "bf16"}
        plan = plan_of({"model": model, "train": {**train, "stream": stream}})
        faster = GpuForms(precise_sums=is_gpu, one_pass_loss=is_gpu)
        engine = assemble(plan, device, "bf16", compiled=is_gpu, forms=faster)
        batch = keyed_batch(plan, 0, engine.rows)

        def work(engine: Any = engine, batch: Any = batch) -> Any:
            loss = engine.forward_backward(batch, 0)
            norm = engine.gradient_norm()
            engine.zero_gradients()
            return loss, norm

        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        loss, norm = work()
        peak = torch.cuda.max_memory_allocated() / 1e6 if is_gpu else 0
        graph = [module.graph_obstacle for module in engine.stage_modules]
        tell(stream=stream, loss=float(loss.mean), norm=float(norm), peak_MB=peak, graph=graph)
        forms[stream] = work
    tell(ms=in_turns(forms, device))
