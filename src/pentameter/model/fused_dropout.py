"""Attention with dropout computed by kernels that never store its weights, on GPUs that pass a
check.

`dropout_kernels.py` holds the kernels and imports Triton, which comes only with a PyTorch built for
GPUs. A kernel that compiles need not be correct on a chip and a release on which it was never run.
So `kernel_obstacle` checks before a run begins. If there is an obstacle, the run computes attention
with its weights stored, which differs only in rounding, memory and time.

Shapes: B batch, T tokens, H heads, G KV heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits, make_key
from pentameter.machine.capabilities import GpuCapabilities
from pentameter.model.attention import attend_explicitly
from pentameter.model.dropout import AttentionDropout

LEAST_CAPABILITY = 80
"""Minimum compute capability × 10. Below 8.0, Triton (3.7) multiplies without tensor cores and
spills registers."""
AMD_CHIPS = ("gfx90a", "gfx94", "gfx95")
"""AMD chips for whose registers the kernels' tiles were chosen: MI200, MI300, MI350."""

CHECKED_TOKENS = 200  # at least two tiles and a partial one in each kernel
MOST_ROUNDINGS = 32.0
"""Maximum error in a checked result, in roundings of the largest number in its matrix row. Weights,
their gradients and results are each rounded once, and up to CHECKED_TOKENS such errors of either
sign are summed. In Triton's interpreter, the kernels are within 8 roundings of fp64 in bf16 and
fp16, stored weights within 4. A bound that drops 6 % more elements is off by 190 in bf16 and 1,500
in fp16."""
LEAST_BOUND = 2.0**-15
"""Minimum error bound, for fp32: a GPU's exponentials are off by more than one rounding."""


class Problem(NamedTuple):
    """Inputs and an output gradient for attention: q and g (B, H, T, K), k and v (B, G, T, K), the
    batch rows' keys (B, 1, 2), and the other arguments to `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    dropout: AttentionDropout
    dropout_keys: Tensor
    positions: Tensor
    window: int | None


def drop_in_kernel(model: nn.Module) -> None:
    """Switch a model's attention dropout to the kernels, for use after `kernel_obstacle` found
    none."""
    from pentameter.model.dropout_kernels import attend_in_kernel

    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.kernel = attend_in_kernel


def chip_obstacle(gpu: GpuCapabilities) -> str | None:
    """Return a phrase that says why the kernels cannot run on a GPU; None if its matrix units
    can."""
    capability = gpu.compute_capability
    if capability is None and not gpu.architecture.startswith(AMD_CHIPS):
        return f"they are for {', '.join(AMD_CHIPS)} of AMD's GPUs, not {gpu.architecture}"
    if capability is not None and capability < LEAST_CAPABILITY:
        needed, has = LEAST_CAPABILITY / 10, capability / 10
        return f"they need compute capability {needed}, and {gpu.name} has {has}"
    return None


def kernel_obstacle(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a phrase that says why the kernels cannot compute an architecture's attention on a
    device with matmuls in `dtype`. None means that they were compiled, run, and agreed with stored
    weights in fp64 on the same device, for each window in the model.

    A missing kernel costs memory, never a run, so nothing is raised.
    """
    try:
        for size in sorted({model.window(layer) or 0 for layer in range(model.n_layers)}):
            obstacle = _disagreement(_problem(model, dtype, device, size or None))
            if obstacle is not None:
                return obstacle
    except Exception as error:  # from an import, a compiler, a driver: whatever it is
        said = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    return None


def _problem(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, size: int | None
) -> Problem:
    """Build a check on the last tokens in a context: two batch rows, and one or two groups of heads
    with common keys, all numbers drawn from a key. With a window `size`, the window is at most a
    third of the tokens, so that no tile lies wholly inside it."""
    K, G = model.head_channels, min(2, model.kv_heads)
    H = G * (model.n_heads // model.kv_heads)
    T = min(CHECKED_TOKENS, model.context_length)
    dropout = AttentionDropout(0, model.attention_dropout, model.context_length)
    dropout.head_offset = model.n_heads - H

    def draw(name: str, n_heads: int) -> Tensor:
        index = torch.arange(2 * n_heads * T * K, dtype=torch.int32)
        drawn = bits(make_key("dropout kernel", name), index).view(2, n_heads, T, K)
        # Uniform with variance 1, in the memory layout that a projection gives.
        x = drawn.to(device, torch.float64) * (3**0.5 / 2**31)
        return x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype)

    q, k, v, g = (draw(name, n) for name, n in (("q", H), ("k", G), ("v", G), ("g", H)))
    keys = bits(make_key("dropout kernel", "keys"), torch.arange(4, dtype=torch.int32))
    positions = torch.arange(model.context_length - T, model.context_length, device=device)
    seen = None if size is None else min(size, T // 3)
    return Problem(q, k, v, g, dropout, keys.view(2, 1, 2).to(device), positions, seen)


def _disagreement(problem: Problem) -> str | None:
    """Describe the first result or gradient whose error against stored weights exceeds rounding;
    None if there is none."""
    dtype = problem.q.dtype
    precise = problem._replace(
        **{name: getattr(problem, name).double() for name in ("q", "k", "v", "g")}
    )
    found, expected = _computed(problem, in_kernel=True), _computed(precise, in_kernel=False)
    bound = rounding_bound(dtype)
    for name, one, other in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
        off = row_error(one, other)
        if not off <= bound:  # true for nan, too
            return f"their {name} is off by {off:.1e} in {dtype}, more than {bound:.1e}"
    return None


def _computed(problem: Problem, *, in_kernel: bool) -> tuple[Tensor, ...]:
    """Return a problem's result y and the gradients of q, k and v, each in the shape of its
    tensor."""
    q, k, v = (x.detach().requires_grad_() for x in problem[:3])
    attend: Callable[..., Tensor] = attend_explicitly
    if in_kernel:
        from pentameter.model.dropout_kernels import attend_in_kernel as attend
    with torch.enable_grad():
        y = attend(
            q,
            k,
            v,
            dropout=problem.dropout,
            dropout_keys=problem.dropout_keys,
            positions=problem.positions,
            window=problem.window,
        )
        return y, *torch.autograd.grad(y, (q, k, v), problem.g)


def rounding_bound(dtype: torch.dtype) -> float:
    """Return the error that rounding explains if matmuls are computed in `dtype`."""
    tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rounding = 2.0**-11 if tf32 else torch.finfo(dtype).eps / 2
    return max(MOST_ROUNDINGS * rounding, LEAST_BOUND)


def row_error(x: Tensor, expected: Tensor) -> float:
    """Return the largest error in x (…, K), each matrix row's relative to its scale. The scale is
    the largest number in that row of `expected`, at least that of a usual row, and at least a
    tenth, for inputs with variance 1: gradients for the first query, which sees one key, are 0
    except for rounding."""
    largest = expected.abs().amax(-1)
    scale = largest.clamp_min(largest.mean()).clamp_min(0.1)
    off: float = ((x.to(expected.dtype) - expected).abs().amax(-1) / scale).max().item()
    return off
