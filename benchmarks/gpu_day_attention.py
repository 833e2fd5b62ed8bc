"""The item `attention` of a GPU day: which kernel runs for which case, and what it takes.

Lines: `case`: our own attention, milliseconds forward and backward, peak; beside it `raw`, what
grouped heads would run where they are not repeated. `ring`: blocks of two ranks by fused kernels
against weights written out. `trial`: what the ring's trial at the start says. `compiled`: a window
with grouped heads compiles whole. `mla`: values as wide as keys against values of their own width.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpu_day_times import milliseconds

Tell = Callable[..., None]


def _measured(
    device: torch.device, attend: Callable[..., Any], inputs: Any, n: int = 5
) -> dict[str, Any]:
    """Kernel's name, ms forward, ms forward and backward, and peak GB beyond the inputs."""

    def both():
        y = attend(*inputs)
        torch.autograd.grad(y, inputs, y.detach())

    both()
    row: dict[str, Any] = {}
    with torch.profiler.profile() as prof:
        both()
        if device.type == "cuda":
            torch.cuda.synchronize()
    keys = [each.key.removeprefix("aten::") for each in prof.key_averages()]
    names = {each for each in keys if "_scaled_dot" in each}
    row["kernel"] = sorted(
        name for name in names if "backward" not in name and "fused_attention" not in name
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        row["peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)
    with torch.no_grad():
        row["forward_ms"] = milliseconds(lambda: attend(*inputs), device, n)
    row["both_ms"] = milliseconds(both, device, n)
    return row


def _raw(how: Any) -> Callable[..., Any]:
    """Attention as it was: grouped heads passed on, whatever takes them."""
    from pentameter.model.attention import dot_product as D

    def attend(q, k, v):
        asked = D.repeats_kv_heads
        D.repeats_kv_heads = lambda *a, **b: False
        try:
            return D.PLAIN_ATTENTION(q, k, v, how)
        finally:
            D.repeats_kv_heads = asked

    return attend


def _cases(tell: Tell, device: torch.device, small: bool) -> None:
    from pentameter.model.attention.dot_product import PLAIN_ATTENTION, Weighting

    B, T, H, K = (1, 64, 4, 16) if small else (4, 4096, 16, 64)
    G, window = H // 4, T // 4
    for dtype in (torch.bfloat16, torch.float32):
        for kv in (H, G):
            q, k, v = (
                torch.randn(B, T, n, K, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
                for n in (H, kv, kv)
            )
            sinks = torch.zeros(H, device=device)
            for name, how in (
                ("causal", Weighting()),
                ("windows", Weighting(window)),
                ("odd window", Weighting(window + 1)),
                ("sinks", Weighting(None, sinks)),
            ):
                row = {"case": name, "heads": "mha" if kv == H else "gqa", "dtype": str(dtype)[6:]}
                for kind, attend in (("", partial(PLAIN_ATTENTION, how=how)), ("raw", _raw(how))):
                    if kind and kv == H:
                        continue
                    try:
                        found = _measured(device, attend, (q, k, v), 3)
                    except Exception as error:  # memory, perhaps
                        found = {"error": f"{type(error).__name__}: {error}"[:200]}
                    row.update({f"{kind}_{key}".strip("_"): value for key, value in found.items()})
                tell(**row)


def _ring(tell: Tell, device: torch.device, small: bool) -> None:
    from pentameter.model.attention.dot_product import attend_explicitly
    from pentameter.parallel.context.ring_attention import RingAttention

    def drawn(B, T, H, G, K, dtype):
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.randn(B, T, n, K, device=device, dtype=torch.float32, generator=generator)
            .to(dtype)
            .transpose(1, 2)
            .requires_grad_()
            for n in (H, G, G)
        ]

    def result(attend, inputs):
        y = attend(*inputs)
        g = (
            torch.cos(torch.arange(y.numel(), device=device, dtype=torch.float32))
            .view(y.shape)
            .to(y.dtype)
        )
        return [y.detach(), *torch.autograd.grad(y, inputs, g)]

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for T, G in ((80, 1), (64, 2)) if small else ((2048, 4), (1000, 4), (2048, 16)):
            H, K = (2, 16) if small else (16, 64)
            inputs = drawn(2, T, H, min(G, H), K, dtype)
            starts = [i * T // 4 for i in range(4)]  # the chunks of two ranks
            exact = result(
                attend_explicitly, [x.detach().double().requires_grad_() for x in inputs]
            )
            row = {"ring": "error", "dtype": str(dtype)[6:], "T": T, "kv_heads": G}
            for name, fused in (("fused", dtype), ("explicit", None)):
                try:
                    found = result(RingAttention(None, starts, fused), inputs)
                    row[name] = [
                        float(f"{(a.double() - b).abs().max() / b.abs().max():.2e}")
                        for a, b in zip(found, exact, strict=True)
                    ]
                except Exception as error:
                    row[name] = f"{type(error).__name__}: {error}"[:200]
            tell(**row)
            del exact
    T = 128 if small else 8192
    for dtype in (torch.bfloat16, torch.float32):
        for H, G in ((4, 4), (4, 1)) if small else ((16, 16), (16, 4)):
            inputs = drawn(1, T, H, G, 64, dtype)
            row = {"ring": "time", "dtype": str(dtype)[6:], "T": T, "kv_heads": G}
            for name, fused in (("fused", dtype), ("explicit", None)):
                attend = RingAttention(None, [i * T // 4 for i in range(4)], fused)
                try:
                    row[name] = _measured(device, attend, inputs, 3)
                except Exception as error:
                    row[name] = f"{type(error).__name__}: {error}"[:200]
            tell(**row)


def _trial(tell: Tell, device: torch.device) -> None:
    from pentameter.config.schema import ModelConfig
    from pentameter.model.gpu.forms import obstacle_of
    from pentameter.parallel.context.run_attention import ring_obstacle

    base: dict[str, Any] = {"vocab_size": 64, "context_length": 1024, "n_layers": 2, "d_model": 256}
    for name, more in (
        ("64", {"n_heads": 4}),
        ("64 gqa", {"n_heads": 4, "n_kv_heads": 2}),
        ("128", {"n_heads": 2}),
        ("256", {"n_heads": 1}),
        ("20", {"n_heads": 4, "head_size": 20}),
        ("208", {"n_heads": 1, "head_size": 208}),
        ("window", {"n_heads": 4, "sliding_window": 128}),
        ("sinks", {"n_heads": 4, "attention_sinks": True}),
    ):
        row = {"trial": name}
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            start = time.perf_counter()
            model = ModelConfig.model_validate({**base, **more})
            said = obstacle_of(partial(ring_obstacle, model, dtype, device))
            row[str(dtype)[6:]] = said or f"right ({time.perf_counter() - start:.2f} s)"
        tell(**row)


def _compiled(tell: Tell, device: torch.device) -> None:
    from pentameter.model.attention.dot_product import PLAIN_ATTENTION, Weighting, cuda_capability

    q = torch.randn(2, 8, 64, 32, device=device, requires_grad=True)
    k = torch.randn(2, 2, 64, 32, device=device, requires_grad=True)
    row: dict[str, Any] = {"compiled": "gqa", "capability": cuda_capability(q.device)}
    for name, how in (("causal", Weighting()), ("window", Weighting(16))):
        attend = torch.compile(
            partial(PLAIN_ATTENTION, how=how), fullgraph=True, backend="aot_eager"
        )
        row[name] = float((attend(q, k, k) - PLAIN_ATTENTION(q, k, k, how)).abs().max())
    tell(**row)


def _mla(tell: Tell, device: torch.device, small: bool) -> None:
    """DeepSeek's widths: 192 channels of a key, 128 of a value."""
    from pentameter.model.attention.dot_product import cuda_capability, wants_equal_widths

    B, T, H = (1, 64, 2) if small else (4, 4096, 16)

    def padded(q, k, v):
        return F.scaled_dot_product_attention(q, k, F.pad(v, (0, 64)), is_causal=True)[..., :128]

    def own(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (
            torch.randn(B, T, H, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for width in (192, 192, 128)
        )
        pads = wants_equal_widths(cuda_capability(q.device), dtype, (192, 128))
        row = {"mla": "192/128", "dtype": str(dtype), "pads": pads}
        for name, attend in (("padded", padded), ("own", own)):
            try:
                row[name] = _measured(device, attend, (q, k, v), 3)
            except Exception as error:
                row[name] = f"{type(error).__name__}: {error}"[:200]
        tell(**row)


def of_attention(tell: Tell, device: torch.device, folder: Path) -> None:
    """Run all parts, each by itself, so that one that fails hides no other."""
    small = device.type != "cuda"
    parts = {
        "compiled": partial(_compiled, tell, device),
        "trial": partial(_trial, tell, device),
        "ring": partial(_ring, tell, device, small),
        "cases": partial(_cases, tell, device, small),
        "mla": partial(_mla, tell, device, small),
    }
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            tell(part=name, error=f"{type(error).__name__}: {error}"[:400])
        tell(took=name, seconds=round(time.perf_counter() - start, 1))
