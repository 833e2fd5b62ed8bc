"""The training objective: from the last hidden states to the summed cross-entropy.

It is a sum, so that no mean of means can arise. For a large vocabulary it is computed some rows at
a time: the fp32 logits of 4 × 1024 tokens over GPT-2's vocabulary are 0.8 GB, their gradient as
much again. By chunks neither exists as a whole: a chunk's logits become their own gradient in
place, and what is kept is only what the head's inputs need, so no product is computed twice.

Shapes: B batch, T time, N rows (B · T), R rows of a chunk, D d_model, V padded vocabulary (or this
process's part of it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.model.compiled import kernel
from pentameter.planning.costs import MAX_LOGITS, row_chunks

IGNORED_TARGET = -1

RowLoss = Callable[[Tensor, Tensor | None, Tensor, int, bool, float | None], Tensor]
"""`row_loss`, or `compiled_row_loss`."""
Reduce = Callable[[Tensor, Literal["max", "sum"]], None]
"""Replaces a tensor by the largest, or the sum, of what all processes that share a vocabulary
passed, in place."""


class DividedProduct(Protocol):
    """The product of a head whose matrix and inputs are divided among processes by more than rows.
    Collective: the processes that share them call it together."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this process's columns of the logits (R, V), of its parts of x (R, D) and of the
        weight (V, D)."""

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of its parts of x and of the weight, given that of the logits."""


def loss_sum(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dimensional: fp64 for fp64 logits, else fp32.

    `logits` are (B, T, V), where columns from `vocab_size` on only pad and have no probability;
    `targets` are int64 (B, T), with -1 for places that do not count. The caller divides by the
    step's global number of target tokens.
    """
    logits = logits[..., :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.reshape(-1, vocab_size),
        targets.reshape(-1),
        ignore_index=IGNORED_TARGET,
        reduction="sum",
    )


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(logits / softcap), or the logits as they are where there is none."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class HeadLoss(nn.Module):
    """Σ cross-entropy of x (B, T, D) · weightᵀ (V, D) + bias (V,) against targets (B, T).

    It is a module of its own, so that what surrounds it can be applied from outside: a head whose
    vocabulary is shared out among processes passes its part of the weight, says where its part
    begins and how partial results become whole.
    """

    def __init__(self, vocab_size: int, softcap: float | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.row_loss: RowLoss = row_loss
        """How a chunk's loss is computed, where logits come in chunks."""
        self.first_column = 0
        """The token that the first row of the weight stands for."""
        self.widest: int | None = None
        """Rows of the largest part's weight, where the vocabulary is shared out."""
        self.reduce: Reduce | None = None
        """Makes the whole vocabulary's figures out of those of its parts, where it has parts."""
        self.product: DividedProduct | None = None
        """How inputs and weight are multiplied, where both are divided."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum in nats, 0-dim; targets of -1 do not count, rows from vocab_size on only
        pad. Where the logits would be many, they never exist all at once."""
        if self.reduce is None and not exceeds_chunk(targets.numel(), len(weight)):
            logits = softcapped(F.linear(x, weight, bias), self.softcap)
            return loss_sum(logits, targets, self.vocab_size)
        return chunked_loss_sum(
            x,
            weight,
            bias,
            targets,
            self.vocab_size,
            self.row_loss,
            softcap=self.softcap,
            first_column=self.first_column,
            widest=self.widest,
            reduce=self.reduce,
            product=self.product,
        )


def row_loss(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    differentiate: bool,
    softcap: float | None = None,
    first_column: int = 0,
    reduce: Reduce | None = None,
) -> Tensor:
    """Return the summed cross-entropy of `logits` + `bias`, softcapped where there is a cap, and
    turn `logits` (R, V) in place into the gradient of that sum (into nothing useful without
    `differentiate`).

    Where processes share out the vocabulary, `logits` are the columns from `first_column` on, and
    `reduce` brings in the others': the sum is the same in each process, the gradient its own part.

    The gradient of a row is softmax - onehot, of order one, so that fp16 holds it without a loss
    scale: what rounds to zero, below 2^-25, is 0.0015 of a row at most for GPT-2's vocabulary.
    Sums and exponentials are fp32, or fp64 for fp64 logits. `targets` is (R,), -1 where none
    counts.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    n_seen = min(max(vocab_size - first_column, 0), logits.shape[1])  # the rest only pads
    seen = logits[:, :n_seen].to(precise)  # a view of an fp32 tensor: changed in place
    if bias is not None:
        seen = seen.add_(bias[:n_seen])
    capped: Tensor | None = None
    if softcap is not None:
        capped = torch.tanh(seen.div_(softcap))
        seen = seen.copy_(capped).mul_(softcap)
    top = seen.amax(1, keepdim=True) if n_seen else seen.new_full((len(seen), 1), -torch.inf)
    if reduce is not None:
        reduce(top, "max")
    seen = seen.sub_(top)
    place = targets[:, None] - first_column
    counted = (targets != IGNORED_TARGET)[:, None].to(precise)  # (R, 1)
    here = counted if reduce is None else counted * ((place >= 0) & (place < n_seen))
    place = place.clamp(min=0, max=max(n_seen - 1, 0))
    scores = seen.gather(1, place) * here if n_seen else torch.zeros_like(top)
    seen = seen.exp_()
    total = seen.sum(1, keepdim=True)
    if reduce is not None:
        both = torch.cat((total, scores), 1)
        reduce(both, "sum")
        total, scores = both.split(1, 1)
    if differentiate:
        seen = seen.mul_(counted / total)
        if n_seen:
            seen = seen.scatter_add_(1, place, -here)
        if capped is not None:
            seen = seen.mul_(1 - capped.square())
        if logits.dtype != precise:
            logits[:, :n_seen] = seen
        logits[:, n_seen:] = 0
    return (total.log() * counted - scores).sum()


def elementwise_row_loss(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    differentiate: bool,
    softcap: float | None = None,
) -> Tensor:
    """Return what `row_loss` returns, with the same effect on `logits`, in the form to compile.

    Every step covers whole rows and only the last one writes, so that a compiler keeps no
    intermediate in memory; eagerly it would hold three.
    """
    column = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    seen = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        seen = seen + bias
    slope: Tensor | float = 1.0
    if softcap is not None:
        capped = torch.tanh(seen / softcap)
        seen, slope = softcap * capped, 1 - capped.square()
    seen = torch.where(column < vocab_size, seen, float("-inf"))
    counted = (targets != IGNORED_TARGET)[:, None].to(seen.dtype)  # (R, 1)
    place = targets.clamp(min=0)[:, None]
    top = seen.amax(1, keepdim=True)
    total = (seen - top).exp().sum(1, keepdim=True)
    loss = ((total.log() + top - seen.gather(1, place)) * counted).sum()
    if differentiate:
        share = (seen - top).exp() / total
        share = torch.where(column == place.to(torch.int32), share - 1, share)
        logits.copy_(share * slope * counted)
    return loss


compiled_row_loss: RowLoss = kernel(elementwise_row_loss)
"""`elementwise_row_loss`, compiled at its first call."""


class ChunkedLoss(Function):
    """Σ cross-entropy of x (N, D) · weightᵀ (V, D) + bias (V,), whose gradients are computed on
    the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        of_rows: Callable[[Tensor, Tensor | None, Tensor], Tensor],
        chunks: list[slice],
        product: DividedProduct | None,
    ) -> Tensor:
        """The loss, 0-dimensional; products in x's dtype, sums over chunks in the weight's."""
        with torch.autocast(x.device.type, enabled=False):
            low = weight.to(x.dtype)
            g_x, g_weight = torch.empty_like(x), torch.zeros_like(weight)
            g_bias = None if bias is None else torch.zeros_like(bias)
            losses = []
            for rows in chunks:
                g = _logits(x[rows], low, product)  # and after the next line their gradient
                losses.append(of_rows(g, bias, targets[rows]))
                if product is None:
                    torch.mm(g, low, out=g_x[rows])
                    _add_product(g_weight, g, x[rows])
                else:
                    g_x[rows], g_low = product.differentiate(g, x[rows], low)
                    g_weight.add_(g_low)
                if g_bias is not None:
                    g_bias.add_(g.sum(0, dtype=g_bias.dtype))
        ctx.save_for_backward(g_x, g_weight, g_bias)
        ctx.is_scaled = False
        """Whether backward has been here: schedules that split it come twice, with the same g."""
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, times that of the loss: in place, since no copy of them need exist."""
        kept = ctx.saved_tensors
        if not ctx.is_scaled:
            for each in kept:
                if each is not None:
                    each.data.mul_(g)  # unseen by autograd, which would forbid a second time
            ctx.is_scaled = True
        return *kept, None, None, None, None


@torch.compiler.disable(recursive=False)  # it compiles what pays, and counts its chunks
def chunked_loss_sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    of_chunk: RowLoss = row_loss,
    *,
    softcap: float | None = None,
    first_column: int = 0,
    widest: int | None = None,
    reduce: Reduce | None = None,
    product: DividedProduct | None = None,
) -> Tensor:
    """Return what `loss_sum` returns for the logits of a head, without ever holding them all.

    Args:
        x: the head's input (…, D); under autocast products are in its dtype.
        weight: (V, D). Rows from `vocab_size` on only pad: no probability, no gradient.
        bias: (V,) or None.
        targets: int64 (…), -1 where none counts.
        vocab_size: tokens that exist.
        of_chunk: `row_loss`, or `compiled_row_loss`; with `reduce` the former.
        softcap: bounds logits before the loss; None does not.
        first_column, reduce: of a part of the vocabulary (see `row_loss`). The loss is the whole
            one in each process; the gradient of x is this part's, to be summed by the caller.
        widest: rows of the largest part's weight: whoever reduces together takes the same chunks.
        product: multiplies x and weight, where processes divide both.
    """
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    differentiate = torch.is_grad_enabled()
    chunks = row_chunks(len(x), widest or len(weight), MAX_LOGITS)

    def of_rows(logits: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        if reduce is None:
            return of_chunk(logits, bias, targets, vocab_size, differentiate, softcap)
        part = (vocab_size, differentiate, softcap, first_column, reduce)
        return row_loss(logits, bias, targets, *part)

    if differentiate:
        return ChunkedLoss.apply(x, weight, bias, targets, of_rows, chunks, product)
    with torch.autocast(x.device.type, enabled=False):
        low = weight.to(x.dtype)
        losses = [of_rows(_logits(x[rows], low, product), bias, targets[rows]) for rows in chunks]
    return torch.stack(losses).sum()


def exceeds_chunk(n_rows: int, width: int) -> bool:
    """True if that many logits are worth `chunked_loss_sum`."""
    return n_rows * width > MAX_LOGITS


def _logits(x: Tensor, weight: Tensor, product: DividedProduct | None) -> Tensor:
    return x @ weight.t() if product is None else product.multiply(x, weight)


def _add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """Add gᵀ · x, of g (R, V) and x (R, D), to `total` (V, D)."""
    if total.dtype == x.dtype:
        total.addmm_(g.t(), x)
    else:
        total.add_(precise_product(g, x))


def precise_product(g: Tensor, x: Tensor) -> Tensor:
    """Return gᵀ · x (V, D), of g (R, V) and x (R, D), in float32 at least."""
    precise = torch.promote_types(x.dtype, torch.float32)
    if x.dtype != torch.float16:
        return (g.t() @ x).to(precise)
    # A token in every row sums R entries of x: beyond 65,504, and no loss scale would help.
    scale = 2.0 ** -(len(x) // 256).bit_length()
    return (g.t() @ (x * scale)).to(precise).div_(scale)
