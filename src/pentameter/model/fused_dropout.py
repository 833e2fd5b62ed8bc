"""Attention that drops its weights without writing them out, on a GPU where that proves right.

The kernels are in `dropout_kernels.py`, which imports Triton. Nobody has Triton but whose PyTorch
is built for GPUs, and a kernel that compiles need not be right on a chip and a release that it was
never run on. So `kernel_obstacle` looks before a run begins, and where something is in the way, the
run computes with weights written out, which differs in rounding, memory and time alone.

Shapes: B batch, T time, H heads, G heads of keys and values, K head size.
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
from pentameter.planning.architecture import head_size, n_kv_heads, window

LEAST_CAPABILITY = 80
"""Below 8.0 Triton (3.7) multiplies without tensor cores, and spills registers."""
AMD_CHIPS = ("gfx90a", "gfx94", "gfx95")
"""The chips of AMD for whose registers the kernels' tiles were chosen: MI200, MI300, MI350."""

CHECKED_TOKENS = 200  # two tiles of each kernel and a part of one, at least
MOST_ROUNDINGS = 32.0
"""Roundings by which a number of a checked result may be off, in that of its largest in a row.
Weights, their gradients and results are each rounded once, and as many as CHECKED_TOKENS of either
sign are summed. As Triton interprets them the kernels are within 8 of fp64 in bf16 and fp16, the
weights written out within 4; where a bound drops 6 % more elements, 190 in bf16, 1,500 in fp16."""
LEAST_BOUND = 2.0**-15
"""The bound in fp32, where a GPU's exponentials are off by more than a rounding."""


class Problem(NamedTuple):
    """Inputs and a gradient of attention: q and g (B, H, T, K), k and v (B, G, T, K), the keys of
    rows (B, 1, 2), and the rest of what `attend` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    dropout: AttentionDropout
    dropout_keys: Tensor
    positions: Tensor
    window: int | None


def drop_in_kernel(model: nn.Module) -> None:
    """From now on compute the attention of a model that drops its weights by the kernels, where a
    `kernel_obstacle` was looked for and is not."""
    from pentameter.model.dropout_kernels import attend_in_kernel

    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.kernel = attend_in_kernel


def chip_obstacle(gpu: GpuCapabilities) -> str | None:
    """Return what keeps the kernels from a GPU, a phrase; None where its matrix units serve."""
    capability = gpu.compute_capability
    if capability is None and not gpu.architecture.startswith(AMD_CHIPS):
        return f"they are for {', '.join(AMD_CHIPS)} of AMD's GPUs, not {gpu.architecture}"
    if capability is not None and capability < LEAST_CAPABILITY:
        needed, has = LEAST_CAPABILITY / 10, capability / 10
        return f"they need compute capability {needed}, and {gpu.name} has {has}"
    return None


def kernel_obstacle(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what keeps the kernels from an architecture's attention on a device, products being in
    `dtype`: a phrase, or None once they were compiled, run, and found to agree with the weights
    written out, in fp64 on the same device, for each window that the model has.

    Their absence costs memory, never a run, so nothing is raised.
    """
    try:
        for size in sorted({window(model, layer) or 0 for layer in range(model.n_layers)}):
            obstacle = _disagreement(_problem(model, dtype, device, size or None))
            if obstacle is not None:
                return obstacle
    except Exception as error:  # of an import, a compiler, a driver: whatever it is
        said = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    return None


def _problem(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, size: int | None
) -> Problem:
    """Return the last tokens of a context of two rows, of one or two groups of heads that share
    keys, its numbers drawn from a key; of a `size` of window, of which no tile is whole, a part."""
    K, G = head_size(model), min(2, n_kv_heads(model))
    H = G * (model.n_heads // n_kv_heads(model))
    T = min(CHECKED_TOKENS, model.context_length)
    dropout = AttentionDropout(0, model.attention_dropout, model.context_length)
    dropout.head_offset = model.n_heads - H

    def draw(name: str, n_heads: int) -> Tensor:
        index = torch.arange(2 * n_heads * T * K, dtype=torch.int32)
        drawn = bits(make_key("dropout kernel", name), index).view(2, n_heads, T, K)
        # Uniform, of variance 1; laid out as a projection leaves it.
        x = drawn.to(device, torch.float64) * (3**0.5 / 2**31)
        return x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype)

    q, k, v, g = (draw(name, n) for name, n in (("q", H), ("k", G), ("v", G), ("g", H)))
    keys = bits(make_key("dropout kernel", "keys"), torch.arange(4, dtype=torch.int32))
    positions = torch.arange(model.context_length - T, model.context_length, device=device)
    seen = None if size is None else min(size, T // 3)
    return Problem(q, k, v, g, dropout, keys.view(2, 1, 2).to(device), positions, seen)


def _disagreement(problem: Problem) -> str | None:
    """Return how far the kernels' result or a gradient is from that of the weights written out,
    where it is more than rounding explains."""
    dtype = problem.q.dtype
    precise = problem._replace(
        **{name: getattr(problem, name).double() for name in ("q", "k", "v", "g")}
    )
    found, expected = _computed(problem, in_kernel=True), _computed(precise, in_kernel=False)
    bound = rounding_bound(dtype)
    for name, one, other in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
        off = row_error(one, other)
        if not off <= bound:  # nor is nan
            return f"their {name} is off by {off:.1e} in {dtype}, more than {bound:.1e}"
    return None


def _computed(problem: Problem, *, in_kernel: bool) -> tuple[Tensor, ...]:
    """Return the result of a problem, and the gradients of q, k and v."""
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
    """Return the error that rounding explains, where products are computed in `dtype`."""
    tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rounding = 2.0**-11 if tf32 else torch.finfo(dtype).eps / 2
    return max(MOST_ROUNDINGS * rounding, LEAST_BOUND)


def row_error(x: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row (…, K) ÷ the largest number of that row, or of a usual row
    where that is larger, or a tenth, as of inputs of variance 1: gradients of the first query,
    which sees one key, are 0 but for rounding."""
    largest = expected.abs().amax(-1)
    scale = largest.clamp_min(largest.mean()).clamp_min(0.1)
    off: float = ((x.to(expected.dtype) - expected).abs().amax(-1) / scale).max().item()
    return off
