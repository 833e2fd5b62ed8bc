"""The item `mixtures` of a GPU day: experts multiplied all at once beside one after another."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_day_cases import MIXTURE, MIXTURE_ROWS, plan_of
from gpu_turns import wait_for
from pentameter.config.model.attention import AttentionConfig
from pentameter.config.model.feed_forward import ExpertsConfig, FeedForwardConfig
from pentameter.config.schema import ModelConfig
from pentameter.data.batches.step import Batch
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model.experts import Experts
from pentameter.model.gpu.forms import GpuForms, obstacle_of
from pentameter.model.grouped_matmul import at_once_disagreement, at_once_obstacle, groups_of
from pentameter.model.matmul import PLAIN
from pentameter.model.positions import Positions
from pentameter.parallel.assemble import assemble

Tell = Callable[..., None]
CASES = {  # name → index after each group's last row
    "full": [100, 200, 300, 400],
    "empty": [0, 200, 200, 400],
    "behind": [0, 129, 129, 333],
    "nothing": [0, 0, 0, 0],
    "one": [0, 0, 400, 400],
}


def of_mixtures(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell whether experts multiplied at once are right, and the times of both forms."""
    for part in (trial, edges, layer, products, compiled_steps):
        began = time.perf_counter()
        try:
            part(tell, device)
        except Exception as error:
            traceback.print_exc()
            tell(fact=part.__name__, error=f"{type(error).__name__}: {error}"[:600])
        tell(took=part.__name__, seconds=round(time.perf_counter() - began, 1))


def sizes_of(device: torch.device) -> tuple[dict[str, int], int, int]:
    """Return `[model.experts]`, d_model and tokens: OLMoE's, or small ones on a CPU."""
    if device.type == "cuda":
        return {"count": 64, "per_token": 8, "width": 1024}, 2048, 16384
    return {"count": 8, "per_token": 2, "width": 64}, 64, 256


@contextmanager
def waits(device: torch.device) -> Iterator[Counter[str]]:
    """Count the waits of the host for the device within, by their places."""
    found: Counter[str] = Counter()
    wait_for(device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            found.update(
                f"{each.filename.rpartition('/')[2]}:{each.lineno}"
                for each in seen
                if "synchroniz" in str(each.message)
            )


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number of the other."""
    largest = other.double().abs().max().clamp_min(1e-9)
    return ((one.double() - other.double()).abs().max() / largest).item()


def trial(tell: Tell, device: torch.device) -> None:
    """Look as a run looks before it begins: None everywhere on H100, H200, B200."""
    experts, D, _ = sizes_of(device)
    for n, n_in, n_out in ((8, 128, 256), (64, D, experts["width"]), (1, 64, 64), (3, 72, 40)):
        began = time.perf_counter()
        said = obstacle_of(partial(at_once_disagreement, n, n_in, n_out, device))
        tell(trial=(n, n_in, n_out), disagreement=said, seconds=time.perf_counter() - began)
    if device.type == "cuda":
        gpu = machine_capabilities().gpu(device)
        heads = AttentionConfig(n_heads=2)
        model = ModelConfig(vocab_size=9, d_model=D, attention=heads, n_layers=1)
        obstacle = at_once_obstacle(model, 64, 1024, torch.bfloat16, gpu)
        tell(choice=gpu.architecture, obstacle=obstacle)


def edges(tell: Tell, device: torch.device) -> None:
    """Compare the forms with empty groups, rows behind the last end, no rows at all, and a view
    that begins at an odd place."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    for name, ends in CASES.items():
        x, weight, g = draw(401, 256)[1:], draw(4, 128, 256), draw(400, 128)
        x[ends[-1] :], g[ends[-1] :] = torch.inf, torch.nan
        found = []
        for at_once in (True, False):
            torch.full((1 << 22,), torch.nan, device=device)  # memory for results, not of zeros
            inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            last = torch.tensor(ends, device=device)
            groups = groups_of(x, last, at_once=at_once, holds_all=ends[-1] == 400)
            y = PLAIN.grouped_linear(inputs[0], inputs[1], None, groups)
            found.append([y, *torch.autograd.grad(y, inputs, g)])
        names = zip(("y", "dx", "dW"), *found, strict=True)
        is_zero = not any(each[ends[-1] :].any().item() for each in found[0][:2])
        tell(edges=name, **{key: off(a, b) for key, a, b in names}, zero_behind=is_zero)


def layer(tell: Tell, device: torch.device) -> None:
    """Compare a layer like OLMoE's in both forms: numbers, waits, times, peak memory."""
    experts, D, n_tokens = sizes_of(device)
    config = ModelConfig(
        vocab_size=9,
        context_length=n_tokens // 4,
        n_layers=1,
        d_model=D,
        attention=AttentionConfig(n_heads=2),
        feed_forward=FeedForwardConfig(activation="swiglu"),
        experts=ExpertsConfig.model_validate(experts),
    )
    with torch.device("meta"):
        module = Experts(config, 0)
    module = module.to_empty(device=device).train()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, device=device).mul_(0.02))
        for buffer in module.buffers():
            buffer.zero_()
    x = torch.randn(4, n_tokens // 4, D, generator=generator, device=device)
    g, where = torch.randn_like(x), torch.arange(n_tokens // 4, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = x.clone().requires_grad_()
        module.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            y = module(inputs, Positions(where, where, {}))
        y.backward(g)
        return y.detach(), inputs.grad

    results: dict[bool, dict[str, Any]] = {}
    for at_once in (True, False):
        module.at_once = at_once
        y, dx = step()
        wait_for(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with waits(device) as counted:
            step()
        began = time.perf_counter()
        for _ in range(3):
            step()
        host = (time.perf_counter() - began) / 3
        wait_for(device)
        seconds = (time.perf_counter() - began) / 3
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        of = {"dW": module.up.weight.grad, "dW down": module.down.weight.grad}
        gradients = {name: each.clone() for name, each in of.items() if each is not None}
        results[at_once] = {"y": y, "dx": dx, **gradients}
        tell(
            layer_at_once=at_once,
            waits=counted.total(),
            at=dict(counted),
            ms=1e3 * seconds,
            host_ms=1e3 * host,
            peak_gb=peak / 1e9,
        )
        if at_once and device.type == "cuda":
            with torch.profiler.profile() as profile:
                step()
                wait_for(device)
            events = [each for each in profile.key_averages() if each.self_device_time_total]
            events.sort(key=lambda each: -each.self_device_time_total)
            top = [(e.key[:70], e.count, e.self_device_time_total / 1e3) for e in events[:24]]
            tell(layer="operations and kernels", name_count_ms=top)
    tell(layer="equality", **{k: off(results[True][k], results[False][k]) for k in results[True]})


def products(tell: Tell, device: torch.device) -> None:
    """Time the three matmuls of a layer alone, at once beside one group after another."""
    experts, D, n_tokens = sizes_of(device)
    R, E, F = n_tokens * experts["per_token"], experts["count"], experts["width"]
    drawn = torch.multinomial(torch.rand(E) + 0.5, R, replacement=True)
    ends = drawn.bincount(minlength=E).cumsum(0).to(device)
    x = torch.randn(R, D, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(E, F, D, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(R, F, device=device, dtype=torch.bfloat16)
    for at_once, holds_all in ((True, True), (True, False), (False, False)):
        groups = groups_of(x.detach(), ends, at_once=at_once, holds_all=holds_all)
        for n in (1, 5):
            wait_for(device)
            began = time.perf_counter()
            for _ in range(n):
                y = PLAIN.grouped_linear(x, weight, None, groups)
                torch.autograd.grad(y, (x, weight), g)
            wait_for(device)
            seconds = (time.perf_counter() - began) / n
        tflops = 6 * R * D * F / seconds / 1e12
        tell(products_at_once=at_once, holds_all=holds_all, ms=1e3 * seconds, tflops=tflops)


def compiled_steps(tell: Tell, device: torch.device) -> None:
    """Compare steps of a small mixture, eager and compiled with CUDA graphs, in both forms."""
    plan = plan_of({"model": MIXTURE, "train": MIXTURE_ROWS})
    right: list[tuple[float, float]] = []
    for compiled in (False, True) if device.type == "cuda" else (False,):
        for at_once in (True, False):
            row: dict[str, Any] = {"steps_at_once": at_once, "compiled": compiled}
            began = time.perf_counter()
            try:
                found, facts = _steps(plan, device, at_once=at_once, compiled=compiled)
                right = right or found
                row["off"] = max(
                    abs(a - b) / abs(b)
                    for one, other in zip(found, right, strict=True)
                    for a, b in zip(one, other, strict=True)
                )
                row |= facts
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            tell(**row, seconds=round(time.perf_counter() - began, 1))


def _steps(
    plan: Any, device: torch.device, *, at_once: bool, compiled: bool, n: int = 6
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Return (loss, norm) of n steps, and facts of the last."""
    tokens = np.random.default_rng(0).integers(0, 102, (16, 129))
    engine = assemble(
        plan, device, "bf16", compiled=compiled, forms=GpuForms(experts_at_once=at_once)
    )
    (module,) = engine.stage_modules
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), engine.rows)
    found, seconds = [], []
    for step in range(n):
        with waits(device) as counted:
            began = time.perf_counter()
            engine.zero_gradients()
            loss = engine.forward_backward(batch, step)
            norm = engine.gradient_norm()
        wait_for(device)
        seconds.append(time.perf_counter() - began)
        found.append((float(loss.total), float(norm)))
        with torch.no_grad():
            for _, parameter in engine.named_parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
    facts: dict[str, Any] = {"replays": module.replays, "obstacle": module.graph_obstacle}
    facts |= {"ms": 1e3 * min(seconds), "waits": counted.total(), "at": dict(counted)}
    if device.type == "cuda":
        with torch.profiler.profile() as profile:
            engine.forward_backward(batch, n)
            wait_for(device)
        counts = {each.key: each.count for each in profile.key_averages()}
        names = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaStreamSynchronize")
        facts["launches"] = {name: counts[name] for name in names if name in counts}
    return found, facts
