"""PyTorch's fused attention as the operations that it consists of, which give and take
log-sum-exps. `scaled_dot_product_attention`, the public way, keeps them to itself.

A block is attention without dropout of some queries to some keys: to all of them, or causal with as
many keys as queries.

Shapes: B batch rows, H heads, G key and value heads, K head size; Q queries and S keys in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.model.attention.dot_product import (
    FLASH_CAPABILITY,
    FLASH_CHANNELS,
    for_each_head,
)

_aten = torch.ops.aten
CPU_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout, is_causal) → output (B, H, Q, K), log-sum-exps (B, H, Q)."""
CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(grad, q, k, v, output, log-sum-exps, dropout, is_causal) → gradients for q, k and v."""
FLASH_FORWARD = _aten._scaled_dot_product_flash_attention
"""(q, k, v, dropout, is_causal) → output (B, H, Q, K), log-sum-exps (B, H, Q), …; takes grouped KV
heads."""
FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
"""(grad, q, k, v, output, log-sum-exps, None, None, Q, S, dropout, is_causal, seed, offset) →
gradients for q, k and v."""
EFFICIENT_FORWARD = _aten._scaled_dot_product_efficient_attention
"""(q, k, v, bias, True, dropout, is_causal) → output (B, H, Q, K), log-sum-exps, padded, …"""
EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward
"""(grad, q, k, v, bias, output, log-sum-exps, seed, offset, dropout, needed gradients, is_causal) →
gradients for q, k, v and the bias."""

PADDED_TO = 32
"""The efficient attention reads log-sum-exps in rows padded to a multiple of this many queries
(`kAlignLSE` in its kernels)."""
Grads = tuple[Tensor, Tensor, Tensor]


class BlockKernel(NamedTuple):
    """Fused attention between a block of queries and a block of keys: a record of two functions,
    the forward and the backward pass."""

    attend: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """(q (B, H, Q, K), k, v (B, G, S, K), is_causal) → output (B, H, Q, K), log-sum-exps
    (B, H, Q)."""
    differentiate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Grads]
    """(output's gradient, q, k, v, output, log-sum-exps, is_causal) → gradients for q, k and v, in
    their shapes. Output and log-sum-exps are those over all keys, of which the block has some."""


def block_kernel(
    device_type: str, capability: int | None, dtype: torch.dtype, channels: int
) -> BlockKernel | None:
    """Return PyTorch's fused attention for blocks of the sequence, or None if none of its kernels
    fits and attention weights must be materialized.

    device_type: `cpu` or `cuda`.
    capability: a GPU's compute capability times ten, as `cuda_capability` gives it.
    dtype: of queries, keys and values.
    channels: channels of a head.

    Flash attention is for 16 bits; its backward pass has no kernel for heads of 200 to 224 channels
    on GPUs for desktops. Efficient attention is for 16 and 32 bits; both read 16 bytes at once.
    """
    if device_type == "cpu":
        return BlockKernel(_attend_on_cpu, _differentiate_on_cpu)
    if device_type != "cuda" or capability is None or dtype.itemsize > 4:
        return None
    if channels % (16 // dtype.itemsize) or (dtype is torch.bfloat16 and capability < 80):
        return None
    is_odd = channels > FLASH_CHANNELS or 192 < channels <= 224
    if dtype.itemsize == 2 and capability >= FLASH_CAPABILITY and not is_odd:
        return BlockKernel(_attend_flash, _differentiate_flash)
    return BlockKernel(_attend_efficiently, _differentiate_efficiently)


def over_query_heads(gradient: Tensor, n_kv_heads: int) -> Tensor:
    """Sum the gradients for keys or values, computed for each of the H query heads (B, H, S, K),
    over the query heads that read the same one of the G KV heads. Returns (B, G, S, K); K is the
    head size."""
    return gradient.unflatten(1, (n_kv_heads, -1)).sum(2)


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, sums = CPU_FORWARD(q, for_each_head(k, q), for_each_head(v, q), 0.0, is_causal)
    return out, sums


def _differentiate_on_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool
) -> Grads:
    repeated = for_each_head(k, q), for_each_head(v, q)
    q_grad, k_grad, v_grad = CPU_BACKWARD(grad, q, *repeated, out, sums, 0.0, is_causal)
    n_kv_heads = k.shape[1]
    return q_grad, over_query_heads(k_grad, n_kv_heads), over_query_heads(v_grad, n_kv_heads)


def _attend_flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, sums, *_ = FLASH_FORWARD(q, k, v, 0.0, is_causal)
    return out, sums


def _differentiate_flash(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool
) -> Grads:
    # Read by the pointer, whatever the strides.
    kept = (out.contiguous(), sums.contiguous())
    n_queries, n_keys = q.shape[2], k.shape[2]
    lengths = (None, None, n_queries, n_keys)  # no sequences of different lengths
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # which no dropout reads
    q_grad, k_grad, v_grad = FLASH_BACKWARD(
        grad.contiguous(), q, k, v, *kept, *lengths, 0.0, is_causal, seed, seed[0]
    )
    return q_grad, k_grad, v_grad


def _attend_efficiently(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    k, v = for_each_head(k, q), for_each_head(v, q)
    out, sums, *_ = EFFICIENT_FORWARD(q, k, v, None, True, 0.0, is_causal)
    return out, sums[:, :, : q.shape[2]]


def _differentiate_efficiently(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool
) -> Grads:
    # As its forward pass pads them: exp(score - ∞) is 0.
    padded = F.pad(sums, (0, -sums.shape[2] % PADDED_TO), value=float("inf")).contiguous()
    repeated, n_kv_heads = (for_each_head(k, q), for_each_head(v, q)), k.shape[1]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # which no dropout reads
    q_grad, k_grad, v_grad, _ = EFFICIENT_BACKWARD(
        grad, q, *repeated, None, out, padded, seed, seed, 0.0, [True] * 3 + [False], is_causal
    )
    return q_grad, over_query_heads(k_grad, n_kv_heads), over_query_heads(v_grad, n_kv_heads)
