"""The cross-entropy of a chunk of logits and its gradient in one Triton kernel, for GPUs.

`row_loss` written for a compiler reads the logits for their maximum, for the sum of exponentials
and for the gradient. Here one program takes one row: the first loop reads it and keeps a running
maximum and sum in every lane (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax", algorithm 3), the second finds the row in the cache and overwrites it with its gradient.
So a row comes from memory once and goes there once.

Importing this file imports Triton, which comes with a PyTorch built for GPUs. On a CPU, Triton
interprets the kernel if TRITON_INTERPRET=1 was set in the environment beforehand.

Shapes: R rows in a chunk, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentameter.model.compiled import uncompiled

MOST_COLUMNS = 4096
"""Logits of a row that a program reads at once. Rows that programs have begun, two on each
multiprocessor, must lie in a GPU's cache until their second reading: 26 MB of an H100's 50 for
GPT-2's vocabulary in bf16."""
COLUMNS_PER_WARP = 256
"""Of these 4096, so that a program of 16 warps takes at most 64 registers a thread: two programs
fit the registers of a multiprocessor. An H200 was fastest so: 0.38 ms for GPT-2's vocabulary and
4096 rows, and 0.44 by 8192 columns of 16 warps."""


@triton.jit
def _capped(x, softcap):
    """Return tanh(x / softcap), in a form that neither overflows nor needs a library."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0)


@triton.jit
def _logits(
    row_at, bias_at, column, width, HAS_BIAS: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """Triton function: load a row's logits in the given columns as fp32, plus the bias if HAS_BIAS;
    columns from `width` on give 0. `row_at` and `bias_at` are pointers."""
    inside = column < width
    x = tl.load(row_at + column, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _row_kernel(
    logits_at, bias_at, targets_at, losses_at, row_stride, width, vocab_size, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, DIFFERENTIATE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write the loss of one row of logits, and if DIFFERENTIATE overwrite the row
    with its gradient. Columns from `vocab_size` up to `width` are padding. A row whose target is
    negative does not count."""
    row = tl.program_id(0).to(tl.int64)
    row_at = logits_at + row * row_stride
    target = tl.load(targets_at + row)
    counted = tl.where(target >= 0, 1.0, 0.0)
    label = tl.maximum(target, 0).to(tl.int32)

    most = tl.full([COLUMNS], -3.0e38, tl.float32)  # finite, so that no difference is nan
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = _logits(row_at, bias_at, column, width, HAS_BIAS, "evict_last")
        if HAS_CAP:
            x = softcap * _capped(x, softcap)
        x = tl.where(column < vocab_size, x, float("-inf"))
        further = x - most
        shrink = tl.exp(-tl.abs(further))  # of the old sum, or of the new number
        total = tl.where(further > 0.0, total * shrink + 1.0, total + shrink)
        most = tl.maximum(most, x)
    top = tl.max(most, 0)
    total = tl.sum(total * tl.exp(most - top), 0)
    score = _logits(row_at, bias_at, label, width, HAS_BIAS, "")
    if HAS_CAP:
        score = softcap * _capped(score, softcap)
    tl.store(losses_at + row, (tl.log(total) + top - score) * counted)

    if DIFFERENTIATE:
        scale = 1.0 / total
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            x = _logits(row_at, bias_at, column, width, HAS_BIAS, "evict_first")
            slope = counted
            if HAS_CAP:
                capped = _capped(x, softcap)
                x = softcap * capped
                slope = (1.0 - capped * capped) * counted
            probability = tl.where(column < vocab_size, tl.exp(x - top) * scale, 0.0)
            g = tl.where(column == label, probability - 1.0, probability) * slope
            tl.store(row_at + column, g.to(logits_at.dtype.element_ty), mask=column < width)


@uncompiled  # launched as it is, like a kernel that is compiled on its own
def one_pass_row_loss(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    differentiate: bool,
    softcap: float | None = None,
) -> Tensor:
    """Return the same summed cross-entropy as `row_loss`, of the same arguments, in nats, 0-dim
    fp32, for a vocabulary that no ranks shard. If `differentiate`, overwrite `logits` (R, V),
    contiguous, of at most 32 bits, with the sum's gradient; else they stay as they are. Sums and
    exponentials are fp32."""
    R, V = logits.shape
    losses = torch.empty(R, dtype=torch.float32, device=logits.device)
    columns = min(MOST_COLUMNS, triton.next_power_of_2(V))
    widest = 32 if torch.version.hip is None else 16  # a warp on AMD GPUs is twice as wide
    options: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "HAS_CAP": softcap is not None,
        "DIFFERENTIATE": differentiate,
        "COLUMNS": columns,
        "num_warps": min(widest, max(1, columns // COLUMNS_PER_WARP)),
    }
    at = (logits, logits if bias is None else bias, targets, losses)
    numbers = (logits.stride(0), V, vocab_size, 1.0 if softcap is None else softcap)
    if R:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            _row_kernel[(R,)](*at, *numbers, **options)
    return losses.sum()
