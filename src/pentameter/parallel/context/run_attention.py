"""The choice of a run's attention: how its model attends to keys and values, on these ranks and on
this device."""

from __future__ import annotations

import torch

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.machine.capabilities import GpuCapabilities
from pentameter.model.attention.checked_attention import CHECKED_TOKENS, disagreement
from pentameter.model.attention.dot_product import (
    PLAIN_ATTENTION,
    DotProductAttention,
    cuda_capability,
)
from pentameter.parallel.context.block_kernels import block_kernel
from pentameter.parallel.context.context_parallel import HeadsAttention
from pentameter.parallel.context.ring_attention import RingAttention
from pentameter.parallel.mesh import Mesh
from pentameter.planning.layouts.layout import Layout

LEAST_CAPABILITY = 80
"""Minimum CUDA compute capability for the kernels that drop attention weights, times ten. Below
8.0, Triton (3.7) multiplies without tensor cores and spills registers."""
AMD_CHIPS = ("gfx90a", "gfx94", "gfx95")
"""AMD chips for whose registers the kernels' tiles were chosen: MI200, MI300, MI350."""


def run_attention(
    layout: Layout,
    context_length: int,
    mesh: Mesh,
    *,
    in_kernels: bool = False,
    ring_dtype: torch.dtype | None = None,
) -> DotProductAttention:
    """Return the object that computes attention on a rank of `mesh`, as the layout's context
    parallelism requires, for sequences of `context_length` tokens. Raises ConfigError for an
    unknown `parallel.context_mode`.

    in_kernels: True to apply attention dropout inside GPU kernels, where a rank has whole
        sequences.
    ring_dtype: in ring mode on a GPU, the dtype in which PyTorch's fused attention computes each
        block; None to do without it.
    """
    alone = _kernel_attention() if in_kernels else PLAIN_ATTENTION
    if layout.context == 1:
        return alone
    group = mesh.groups["context"]
    match layout.context_mode:
        case "ring":
            ranks = (layout.positions(rank, context_length) for rank in range(layout.context))
            starts = [chunk.start for chunks in ranks for chunk in chunks]
            return RingAttention(group, starts, ring_dtype)
        case "all-to-all":
            return HeadsAttention(group, mesh.coordinates["context"], alone)
        case unknown:
            refuse_unknown(unknown, "parallel.context_mode", "the engine")


def chip_obstacle(gpu: GpuCapabilities) -> str | None:
    """Return a phrase that says why the kernels that drop attention weights cannot run on `gpu`,
    judged by its chip alone; None if they can."""
    capability = gpu.compute_capability
    if capability is None and not gpu.architecture.startswith(AMD_CHIPS):
        return f"they are for {', '.join(AMD_CHIPS)} of AMD's GPUs, not {gpu.architecture}"
    if capability is not None and capability < LEAST_CAPABILITY:
        needed, has = LEAST_CAPABILITY / 10, capability / 10
        return f"they need compute capability {needed}, and {gpu.name} has {has}"
    return None


def kernel_obstacle(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a phrase that says why the GPU kernels that apply attention dropout cannot compute a
    model's attention on `device`, with matmuls in `dtype`. None means that they were compiled, run,
    and agreed with attention that stores its weights, in fp64. What Triton or a kernel raises is
    raised.
    """
    return disagreement(_kernel_attention(), model, dtype, device)


def ring_obstacle(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a phrase that says why PyTorch's fused attention cannot compute the blocks of a ring
    on the GPU `device` in `dtype`. None means that it ran there, on the chunks of one rank, and
    agreed with stored weights in fp64. What a kernel raises is raised."""
    channels = model.query_channels
    if block_kernel(device.type, cuda_capability(device), dtype, channels) is None:
        return f"none gives log-sum-exps in {dtype} for heads of {channels} channels"
    T = min(CHECKED_TOKENS, model.context_length)
    ring = RingAttention(None, [0, T // 2], dtype)
    return disagreement(ring, model, dtype, device, drops=False)


def _kernel_attention() -> DotProductAttention:
    """Return the attention that applies dropout inside Triton kernels. Imports Triton."""
    from pentameter.model.attention.dropout_kernels import KernelAttention

    return KernelAttention()
