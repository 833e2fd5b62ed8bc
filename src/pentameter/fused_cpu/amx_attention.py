"""Causal bf16 attention on a CPU with AMX (Intel's matrix tiles), computed by the C++ kernels in
`cpp/attention.cpp`.

Shapes: B batch, T sequence, H query heads, G KV heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu.heads import Heads, HeadShape
from pentameter.fused_cpu.native import Struct, call, fields, serves
from pentameter.model.dropout import keep_bound, rows_per_block

MAX_HEAD = 256
"""Largest head size, in channels, that the kernels' buffers hold."""


def attention_obstacle(config: ModelConfig) -> str | None:
    """Return a phrase that says why the kernels cannot compute this model's attention; None if they
    can. The head size must be divisible by 32 and at most MAX_HEAD, query and key norms must act
    on each head by itself, and dropout must number the weights of a batch row in one block."""
    size = config.head_channels
    if size % 32 or size > MAX_HEAD:
        return f"the AMX kernels want heads of a multiple of 32 up to {MAX_HEAD}, not {size}"
    if config.attention.qk_norm == "width":
        return "the AMX kernels norm queries and keys head by head, not all heads together"
    H, T = config.attention.n_heads, config.context_length
    if config.attention.dropout and rows_per_block(H * T, T) is not None:
        return f"the AMX kernels drop up to 2^32 attention weights in a row, not {H} · {T}²"
    return None


def can_attend(config: ModelConfig, parameters: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether the AMX library is loaded and can compute the attention that `config`
    describes, with matmuls in `dtype`, and biases and norm weights in the dtype `parameters`."""
    return serves("AMX", parameters, dtype) and attention_obstacle(config) is None


class _Part(Struct):
    """ctypes form of the C++ struct `Part` in cpp/heads.h: where the queries, keys or values lie,
    and what is to be applied to them."""

    _fields_ = fields("data bias norm", int64="row head turns")


class _Job(Struct):
    """ctypes form of the C++ struct `Job` in cpp/heads.h: all arguments of one call of the
    attention kernels."""

    _fields_ = (
        *((name, _Part) for name in ("q", "k", "v")),
        *fields(
            "cosine sine keys",
            int64="B T H G K half stride",
            int32="bound",
            float32="dropout_scale norm_eps",
        ),
    )


def attention_forward(heads: Heads, shape: HeadShape, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention's output y (B, T, H·K) in bf16, and each row's log-sum-exp in fp32,
    (B, H, T rounded up to 32), which backward needs.

    heads: queries, keys and values before bias, norm and rotation, which the kernel applies. shape:
    the layer's sizes and dropout probability. keys: dropout's, int32 (B, 2), two random words per
    batch row.
    """
    B, T, H, K = heads.q.data.shape
    y = heads.q.data.new_empty(B, T, H * K)
    logs = torch.empty(B, H, -(-T // 32) * 32, dtype=torch.float32)
    call("AMX", "attention_forward", _job(heads, shape, keys), y, logs)
    return y, logs


def attention_backward(
    to: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    y: Tensor,
    logs: Tensor,
    heads: Heads,
    shape: HeadShape,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the gradients for queries, keys and values into the tensors `to`, which have the shapes
    and strides of `heads`' data. Return the gradients for the query norm's and the key norm's
    weight, (K,) each; they mean nothing for a layer without norms.

    g: y's gradient (B, T, H·K). y and logs: `attention_forward`'s results; heads, shape and keys:
    its arguments.
    """
    B, _, H, K = heads.q.data.shape
    norms = [g.new_zeros(B * n, K, dtype=torch.float32) for n in (H, heads.k.data.shape[2])]
    call("AMX", "attention_backward", _job(heads, shape, keys), (*to, *norms), g, y, logs)
    return norms[0].sum(0), norms[1].sum(0)


def _job(heads: Heads, shape: HeadShape, keys: Tensor) -> _Job:
    """Return the C++ call's arguments for these heads, sizes and dropout keys, int32 (B, 2). It
    holds addresses only: the caller keeps the tensors alive."""
    B, T, H, K = heads.q.data.shape
    rotation = heads.rotation
    turns = rotation is not None or heads.q.norm is not None
    parts = [
        _Part(
            *part,
            part.data.stride(1 if T > 1 else 0),  # views of one row lie at any stride
            part.data.stride(2),
            turns and part is not heads.v,
        )
        for part in (heads.q, heads.k, heads.v)
    ]
    angles = (None, None) if rotation is None else rotation
    half = 0 if rotation is None else rotation.cosine.shape[1]
    sizes = (B, T, H, shape.n_kv_heads, K, half, shape.context_length)
    scale = 1 / (1 - shape.p) if shape.p else 0.0
    return _Job(*parts, *angles, keys, *sizes, keep_bound(shape.p), scale, heads.eps)
