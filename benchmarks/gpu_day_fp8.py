"""The item `fp8` of a GPU day: linear layers that multiply in 8 bits (`train.matmuls = "fp8"`).

Milliseconds of an up projection, forward and backward, compiled, in bf16 and fp8 in turns, and of
the matmul alone by PyTorch's ways to scale it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpu_day_pieces import SMALL, drawn, error_of
from gpu_day_times import in_turns
from pentameter.model.fp8_matmul import Fp8Matmul, fp8_obstacle, results
from pentameter.model.gpu.forms import obstacle_of
from pentameter.model.matmul import PLAIN, Matmul

Tell = Callable[..., None]
ROWS, WIDTHS = (64, (48,)) if SMALL else (32 * 1024, (768, 1600, 4096))
BF16 = torch.bfloat16


def of_fp8(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell the trial's verdict, errors against fp64, and times."""
    capability = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    tell(trial=obstacle_of(lambda: fp8_obstacle(BF16, device, capability)))
    torch.manual_seed(0)
    errors(tell, device)
    if device.type == "cuda":
        for width in WIDTHS:
            products(tell, device, width)
    for width in WIDTHS:
        layer(tell, device, width)


def errors(tell: Tell, device: torch.device) -> None:
    """Tell how far output and gradients are from those of plain matmuls in fp64, in 8 bits and in
    bf16, and how far the device's 8 bits are from those emulated in fp64."""
    K, N, R = WIDTHS[0], 4 * WIDTHS[0], 1024
    x, weight, g = (drawn(*shape, device=device) for shape in ((R, K), (N, K), (R, N)))
    wide = [each.double() for each in (x, weight, g)]
    exact = (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])
    plain = (x @ weight.t(), g @ weight, g.t() @ x)
    narrow = results(x, weight, g)
    emulated = results(*(each.cpu() for each in wide))
    for name, one, bf16, of_cpu, of_64 in zip(
        ("output", "input's gradient", "weight's gradient"),
        narrow,
        plain,
        emulated,
        exact,
        strict=True,
    ):
        same = error_of(one.cpu(), of_cpu)
        tell(of=name, fp8=error_of(one, of_64), bf16=error_of(bf16, of_64), emulation=same)


def layer(tell: Tell, device: torch.device, width: int) -> None:
    """Tell the ms of an up projection from `width`, with gelu and both gradients, compiled under
    autocast, as a run has it, with an fp32 weight."""
    x = drawn(ROWS, width, device=device).requires_grad_()
    weight = drawn(4 * width, width, device=device, dtype=torch.float32, scale=0.02)
    weight.requires_grad_()
    g = drawn(ROWS, 4 * width, device=device)

    def form(matmul: Matmul) -> Callable[[], Any]:
        forward = torch.compile(
            lambda x, weight: F.gelu(matmul.linear(x, weight)), dynamic=False, fullgraph=True
        )

        def work() -> None:
            x.grad = weight.grad = None
            with torch.autocast(device.type, BF16):
                y = forward(x, weight)
            y.backward(g)

        return work

    ms = in_turns({"bf16": form(PLAIN), "fp8": form(Fp8Matmul(BF16))}, device)
    tell(up_projection=width, rows=ROWS, ms=ms)


def products(tell: Tell, device: torch.device, width: int) -> None:
    """Tell the ms of the forward matmul alone, by PyTorch's scalings of whole matrices and rows."""
    a, b = (drawn(rows, width, device=device) for rows in (ROWS, 4 * width))
    a8, b8 = (each.to(torch.float8_e4m3fn) for each in (a, b))
    one = torch.ones((), device=device)
    rows, columns = (torch.ones(n, 1, device=device) for n in (ROWS, 4 * width))
    whole, by_row = F.ScalingType.TensorWise, F.ScalingType.RowWise

    def scaled(fast: bool, how: Any, one: torch.Tensor, other: torch.Tensor) -> Callable[[], Any]:
        options: dict[str, Any] = {"output_dtype": BF16, "use_fast_accum": fast}
        return lambda: F.scaled_mm(a8, b8.t(), one, how, other, how, **options)

    forms = {
        "bf16": lambda: a @ b.t(),
        "whole": scaled(False, whole, one, one),
        "whole, fast": scaled(True, whole, one, one),
        "rows": scaled(False, by_row, rows, columns.t()),
        "rows, fast": scaled(True, by_row, rows, columns.t()),
    }
    tell(product=width, rows=ROWS, ms=in_turns(forms, device))
