"""The cross-entropy of logits, by the C++ kernels in `cpp/loss.cpp`.

Shapes: B batch, T sequence, M = B · T token rows, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.fused_cpu.kernels import ROWS_PER_SUM
from pentameter.fused_cpu.native import Struct, call, fields, serves
from pentameter.model.loss import compiled_row_loss


class _Loss(Struct):
    """ctypes form of the C++ struct `Loss` in cpp/loss.cpp: the arguments of the kernels of the
    cross-entropy."""

    _fields_ = fields("bias targets", int64="M V vocabulary rows low")


def can_compute(logits: Tensor, bias: Tensor | None, softcap: float | None) -> bool:
    """Return whether the vector library is loaded and takes these logits (…, V), contiguous in fp32
    or bf16, the bias (V,) in fp32 or None, and no softcap."""
    parameters = torch.float32 if bias is None else bias.dtype
    given = logits.is_contiguous() and (bias is None or bias.is_contiguous())
    return softcap is None and given and serves("vector", parameters, logits.dtype)


class BiasedLoss(Function):
    """Autograd function: the summed cross-entropy of logits plus a bias. For what `can_compute`
    accepts."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int
    ) -> Tensor:
        """Return the loss in nats, 0-dim, for logits (B, T, V) + bias (V,). targets: int64 (B, T),
        -1 for tokens that do not count."""
        loss, kept = _loss_sum(logits, bias, targets.contiguous(), vocab_size)
        ctx.save_for_backward(logits, bias, targets.contiguous(), kept)
        ctx.vocab_size = vocab_size
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of logits and bias, given the loss's gradient g, 0-dim."""
        logits, bias, targets, kept = ctx.saved_tensors
        g_logits = torch.empty_like(logits)
        job = _job(logits, bias, targets, ctx.vocab_size)
        g_bias = _gradient(job, g_logits, g, kept, logits)
        return g_logits, None if bias is None else g_bias.sum(0), None, None


def row_loss(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    differentiate: bool,
    softcap: float | None = None,
) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dim, of a chunk's logits (R, V) + bias (V,), as
    `compiled_row_loss` does, which computes what these kernels do not take. If `differentiate`,
    overwrite the logits with the sum's gradient."""
    if not can_compute(logits, bias, softcap):
        return compiled_row_loss(logits, bias, targets, vocab_size, differentiate, softcap)
    targets = targets.contiguous()
    loss, kept = _loss_sum(logits, bias, targets, vocab_size)
    if differentiate:
        job = _job(logits, bias, targets, vocab_size)
        _gradient(job, logits, torch.ones((), dtype=torch.float32), kept, logits)
    return loss


def _loss_sum(
    logits: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, 0-dim, and what the gradient needs of each row, (M, 2), in fp32."""
    job = _job(logits, bias, targets, vocab_size)
    losses, kept = (logits.new_empty(job.M, *n, dtype=torch.float32) for n in ((), (2,)))
    call("vector", "loss", job, losses, kept, logits)
    return losses.sum(), kept


def _gradient(job: _Loss, g_logits: Tensor, g: Tensor, kept: Tensor, logits: Tensor) -> Tensor:
    """Write the logits' gradient to `g_logits`, and return the bias's in partial sums
    (⌈M / ROWS_PER_SUM⌉, V), which mean nothing without one. g: the loss's gradient, 0-dim."""
    sums = kept.new_empty(-(-job.M // job.rows) if job.bias else 0, job.V)
    call("vector", "loss_gradient", job, g_logits, sums, g.float().contiguous(), kept, logits)
    return sums


def _job(logits: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int) -> _Loss:
    """Return the C++ call's arguments, which hold addresses only."""
    V = logits.shape[-1]
    low = logits.dtype is torch.bfloat16
    return _Loss(bias, targets, logits.numel() // V, V, vocab_size, ROWS_PER_SUM, low)
