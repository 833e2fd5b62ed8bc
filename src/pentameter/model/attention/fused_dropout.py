"""A check, before a run begins, whether a GPU may use the Triton kernels for attention with
dropout.

`dropout_kernels.py` holds the kernels, which never store the attention weights, and imports Triton,
which comes only with a PyTorch built for GPUs. A kernel that compiles need not be correct on a chip
and a release on which it was never run, so `kernel_obstacle` compares it with attention in fp64. If
there is an obstacle, the run computes attention with its weights stored, which differs only in
rounding, memory and time.

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
from pentameter.model.attention.attention import attend_explicitly
from pentameter.model.dropout import AttentionDropout

LEAST_CAPABILITY = 80
"""Minimum CUDA compute capability, times ten. Below 8.0, Triton (3.7) multiplies without tensor
cores and spills registers."""
AMD_CHIPS = ("gfx90a", "gfx94", "gfx95")
"""AMD chips for whose registers the kernels' tiles were chosen: MI200, MI300, MI350."""

CHECKED_TOKENS = 200  # at least two tiles and a partial one in each kernel
MOST_ROUNDINGS = 32.0
"""Maximum error in a checked result, in roundings of the largest number in its matrix row.

Weights, their gradients and results are each rounded once, and up to CHECKED_TOKENS such errors
of either sign are summed. In Triton's interpreter, the kernels are within 8 roundings of fp64 in
bf16 and fp16, stored weights within 4. A bound that drops 6 % more elements is off by 190 in bf16
and 1,500 in fp16.
"""
LEAST_BOUND = 2.0**-15
"""Minimum error bound, which fp32 needs: a GPU's exponentials are off by more than one rounding."""


class Problem(NamedTuple):
    """Inputs for one check on the attention kernels: q and the output's gradient g (B, H, T, K), k
    and v (B, G, T, K), dropout keys (B, 1, 2), and the other arguments to `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    dropout: AttentionDropout
    dropout_keys: Tensor
    positions: Tensor
    window: int | None


def drop_in_kernel(model: nn.Module) -> None:
    """Have every AttentionDropout in `model` use the Triton kernels from now on. Call it only if
    `kernel_obstacle` returned None."""
    from pentameter.model.attention.dropout_kernels import attend_in_kernel

    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.kernel = attend_in_kernel


def chip_obstacle(gpu: GpuCapabilities) -> str | None:
    """Return a phrase that says why the kernels cannot run on `gpu`, judged by its chip alone;
    None if they can."""
    capability = gpu.compute_capability
    if capability is None and not gpu.architecture.startswith(AMD_CHIPS):
        return f"they are for {', '.join(AMD_CHIPS)} of AMD's GPUs, not {gpu.architecture}"
    if capability is not None and capability < LEAST_CAPABILITY:
        needed, has = LEAST_CAPABILITY / 10, capability / 10
        return f"they need compute capability {needed}, and {gpu.name} has {has}"
    return None


def kernel_obstacle(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a phrase that says why the kernels cannot compute a model's attention on `device` with
    matmuls in `dtype`. None means that they were compiled, run, and agreed with stored weights in
    fp64 on the same device, for each window in the model.

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
    """Build a check's inputs on the last tokens in a context: two batch rows, and one or two KV
    heads with all their query heads, all numbers drawn from a key.

    size: the window to check, None for none. The window is at most a third of the tokens, so that
    no tile lies wholly inside it.
    """
    K, G = model.query_channels, min(2, model.kv_heads)
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
    """Compare the kernels with stored weights in fp64. Return a phrase about the first result or
    gradient whose error exceeds rounding; None if there is none."""
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
    """Return attention's output y (B, H, T, K) and the gradients for q, k and v, in their shapes:
    computed by the kernels if `in_kernel`, else with stored weights."""
    q, k, v = (x.detach().requires_grad_() for x in problem[:3])
    attend: Callable[..., Tensor] = attend_explicitly
    if in_kernel:
        from pentameter.model.attention.dropout_kernels import attend_in_kernel as attend
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
    """Return the largest error that rounding explains if matmuls are computed in `dtype`, relative
    to a matrix row's scale, as `row_error` measures it. With tf32 enabled, fp32 counts as tf32."""
    tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rounding = 2.0**-11 if tf32 else torch.finfo(dtype).eps / 2
    return max(MOST_ROUNDINGS * rounding, LEAST_BOUND)


def row_error(x: Tensor, expected: Tensor) -> float:
    """Return the largest error in x (…, K), relative to its matrix row's scale.

    The scale is the largest number in that row of `expected`, but at least a usual row's, and at
    least a tenth, for inputs with variance 1: gradients for the first query, which sees one key,
    are 0 except for rounding.
    """
    largest = expected.abs().amax(-1)
    scale = largest.clamp_min(largest.mean()).clamp_min(0.1)
    off: float = ((x.to(expected.dtype) - expected).abs().amax(-1) / scale).max().item()
    return off
