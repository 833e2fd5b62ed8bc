"""The training objective: from the last hidden states to the summed cross-entropy.

It is a sum, so that no mean of means can arise. For a large vocabulary it is computed in chunks of
token rows: the fp32 logits for 4 × 1024 tokens over GPT-2's vocabulary take 0.8 GB, and their
gradient as much again. With chunks, neither exists as a whole: a chunk's logits become their own
gradient in place, and only the gradients of the head's inputs are kept, so no matmul is computed
twice.

Shapes: B batch, T tokens, N token rows (B · T), R rows in a chunk, D d_model, V padded vocabulary
(or this rank's shard of it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.model.compiled import kernel, uncompiled_alone
from pentameter.model.matmul import PLAIN, matmul_dtype
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.buckets import MAX_LOGITS, row_chunks

RowLoss = Callable[[Tensor, Tensor | None, Tensor, int, bool, float | None], Tensor]
"""Type of `row_loss` and `compiled_row_loss`: (logits, bias, targets, vocab_size, differentiate,
softcap) → summed loss of a chunk of token rows."""
Reduce = Callable[[Tensor, Literal["max", "sum"]], None]
"""Type of a function that all-reduces a tensor in place, by maximum or sum, over the ranks that
shard a vocabulary. Collective."""


class HeadMatmul(Protocol):
    """Interface of the two matmuls that the head's loss needs. `Matmul` has them; so have the
    matmuls of a grid, whose matrices ranks shard along both dimensions, and which are
    collective."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's block of the logits x · weightᵀ + bias (R, V), from its blocks of x
        (R, D), of the weight (V, D) and of the bias (V,)."""

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        """Return the gradient for this rank's block of x (R, D), and add the weight's to
        `weight_grad` (V, D) in place, given the logits' gradient g (R, V)."""


def loss_sum(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dim: fp64 for fp64 logits, else fp32.

    `logits` are (B, T, V); columns from `vocab_size` on are padding and have no probability.
    `targets` are int64 (B, T), -1 for tokens that the loss mask excludes. The caller divides by the
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
    """Return softcap · tanh(logits / softcap), which lies within ±softcap, in the shape of
    `logits`; if `softcap` is None, `logits` unchanged."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class HeadLoss(nn.Module):
    """Module without parameters: the head's matmul and the loss in one, summed cross-entropy for
    logits x (B, T, D) · weightᵀ (V, D) + bias (V,) against targets (B, T). Weight and bias are the
    head's, passed at each call.

    It is a separate module, so that tensor parallelism can replace it by a sharded one.
    """

    def __init__(self, vocab_size: int, softcap: float | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.row_loss: RowLoss = row_loss
        """Function that computes the loss of one chunk of token rows, where logits come in
        chunks."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        matmul: HeadMatmul = PLAIN,
    ) -> Tensor:
        """Return the summed cross-entropy in nats, 0-dim, of the logits x · weightᵀ + bias
        against `targets`.

        x: (B, T, D). weight: (V, D), whose rows from `vocab_size` on are padding. bias: (V,)
        or None. targets: int64 (B, T), -1 for tokens that do not count. matmul: multiplies x
        and weight. Above MAX_LOGITS logits, they are computed in chunks, so that they never
        exist all at once.
        """
        if not exceeds_chunk(targets.numel(), len(weight)):
            logits = softcapped(matmul.linear(x, weight, bias), self.softcap)
            return loss_sum(logits, targets, self.vocab_size)
        inputs = (x, weight, bias, targets, self.vocab_size, self.row_loss)
        return chunked_loss_sum(*inputs, softcap=self.softcap, matmul=matmul)


class AuxiliaryLoss(nn.Module):
    """A further loss, such as one that balances a router, which a sub-layer adds to the objective.

    The sub-layer passes some tensor through this module that the main loss depends on. The module
    returns it unchanged, and in the backward pass adds the auxiliary loss's gradients. So blocks,
    pipeline stages and recomputation pass on one tensor, and need no second result.

    The loss is a sum over all tokens, those without a target too, since a router routes them all.
    `factor` is the loss scale ÷ the step's tokens: it makes the sum a mean per token, as the main
    loss is a mean per target, and is the same on every rank without asking the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()), persistent=False)
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.factor: Tensor
        self.total: Tensor
        """Sum of the losses, 0-dim, over the step's backward passes so far on this rank; for a
        log."""

    def start_step(self, factor: float | Tensor) -> None:
        """Set the gradient that the backward pass gives to this step's summed auxiliary losses,
        `factor`: the loss scale ÷ the step's tokens. Reset `total` to 0."""
        self.factor.fill_(factor)
        self.total.zero_()

    def forward(self, x: Tensor, loss: Tensor) -> Tensor:
        """Return x, of any shape, unchanged. The backward pass through it also differentiates
        `loss`, 0-dim, a sum over tokens."""
        return _JoinedLoss.apply(x, loss, self.factor, self.total)


class _JoinedLoss(Function):
    """Autograd function: identity on x. Its backward pass gives `loss` the gradient `factor`, and
    adds `loss` to `total`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: Tensor, total: Tensor) -> Tensor:
        """Return a view with the shape and values of x; keep `loss`, `factor` and `total` for
        backward."""
        ctx.save_for_backward(loss.detach(), factor)
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient g for x unchanged, and `factor` as the gradient for the loss."""
        loss, factor = ctx.saved_tensors
        ctx.total.add_(loss)  # here, as recomputation runs a forward pass twice
        return g, factor.to(loss.dtype), None, None


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
    """Return the summed cross-entropy in nats, 0-dim, of softcapped `logits` + `bias` against
    `targets`. If `differentiate`, overwrite `logits` (R, V) with that sum's gradient; else they are
    left meaningless.

    Args:
        logits: (R, V), before the bias; overwritten.
        bias: (V,) or None.
        targets: int64 (R,), token ids in the whole vocabulary, -1 for rows that do not count.
        vocab_size: number of tokens that exist; later columns are padding.
        softcap: bound on the logits; None for none.
        first_column, reduce: if ranks shard the vocabulary, the token of this rank's first
            column, and the all-reduce over the ranks. Each rank then returns the whole sum, and
            has the gradient for its own columns.

    A row's gradient is softmax - onehot, which is of order one, so fp16 holds it without a loss
    scale: entries that round to zero, below 2^-25, are 0.0015 of a row at most for GPT-2's
    vocabulary. Sums and exponentials are fp32, or fp64 for fp64 logits.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    n_seen = min(max(vocab_size - first_column, 0), logits.shape[1])  # the rest is padding
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
    column = targets[:, None] - first_column
    counted = (targets != IGNORED_TARGET)[:, None].to(precise)  # (R, 1)
    in_shard = counted if reduce is None else counted * ((column >= 0) & (column < n_seen))
    column = column.clamp(min=0, max=max(n_seen - 1, 0))
    scores = seen.gather(1, column) * in_shard if n_seen else torch.zeros_like(top)
    seen = seen.exp_()
    total = seen.sum(1, keepdim=True)
    if reduce is not None:
        both = torch.cat((total, scores), 1)
        reduce(both, "sum")
        total, scores = both.split(1, 1)
    if differentiate:
        seen = seen.mul_(counted / total)
        if n_seen:
            seen = seen.scatter_add_(1, column, -in_shard)
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
    """Return the same summed cross-entropy as `row_loss`, of the same arguments, in nats, 0-dim,
    written for a compiler, and for a vocabulary that no ranks shard. If `differentiate`, overwrite
    `logits` (R, V) with the sum's gradient; else they stay as they are.

    Every step covers whole rows and only the last one writes, so that a compiler keeps no
    intermediate in memory; run eagerly, it would hold three.
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
    target = targets.clamp(min=0)[:, None]
    top = seen.amax(1, keepdim=True)
    total = (seen - top).exp().sum(1, keepdim=True)
    loss = ((total.log() + top - seen.gather(1, target)) * counted).sum()
    if differentiate:
        probability = (seen - top).exp() / total
        probability = torch.where(column == target.to(torch.int32), probability - 1, probability)
        logits.copy_(probability * slope * counted)
    return loss


compiled_row_loss: RowLoss = kernel(elementwise_row_loss)
"""`elementwise_row_loss`, compiled at its first call for each kind of arguments."""


class ChunkedLoss(Function):
    """Autograd function: summed cross-entropy for x (N, D) · weightᵀ (V, D) + bias (V,). It
    computes the gradients in the forward pass, chunk by chunk, and backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        of_rows: Callable[[Tensor, Tensor | None, Tensor], Tensor],
        chunks: list[slice],
        matmul: HeadMatmul,
    ) -> Tensor:
        """Return the loss in nats, 0-dim. Matmuls are in x's dtype, sums over chunks in the
        weight's.

        targets: int64 (N,). of_rows: a chunk's (logits, bias, targets) → its loss; it overwrites
        the logits with their gradient. chunks: slices into the N rows.
        """
        with torch.autocast(x.device.type, enabled=False):
            low = weight.to(x.dtype)
            g_x, g_weight = torch.empty_like(x), torch.zeros_like(weight)
            g_bias = None if bias is None else torch.zeros_like(bias)
            losses = []
            for rows in chunks:
                g = matmul.linear(x[rows], low)  # the next line turns it into its gradient
                losses.append(of_rows(g, bias, targets[rows]))
                g_x[rows] = matmul.differentiate(g, x[rows], low, g_weight)
                if g_bias is not None:
                    g_bias.add_(g.sum(0, dtype=g_bias.dtype))
        ctx.save_for_backward(g_x, g_weight, g_bias)
        ctx.is_scaled = False
        """True once backward has scaled the saved gradients. A pipeline schedule that splits
        backward in two calls it twice with the same g, and the second call must not scale again."""
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x, weight and bias: the saved ones times the loss's gradient g
        (0-dim), scaled in place to avoid a copy."""
        kept = ctx.saved_tensors
        if not ctx.is_scaled:
            for each in kept:
                if each is not None:
                    each.data.mul_(g)  # hidden from autograd, which would forbid a second call
            ctx.is_scaled = True
        return *kept, None, None, None, None


@uncompiled_alone  # it compiles what pays by itself, and counts its chunks
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
    matmul: HeadMatmul = PLAIN,
) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dim, for the logits x · weightᵀ + bias, computed
    in chunks of token rows so that they never exist all at once. Collective if `reduce` is given.

    Args:
        x: the head's input (…, D); under autocast, matmuls are in autocast's dtype.
        weight: (V, D). Rows from `vocab_size` on are padding: no probability, no gradient.
        bias: (V,) or None.
        targets: int64 (…), -1 for tokens that do not count.
        vocab_size: number of tokens that exist.
        of_chunk: computes a chunk's loss: `row_loss` or `compiled_row_loss`. Ignored if `reduce` is
            given: then it is `row_loss`.
        softcap: bound on the logits; None for none.
        first_column, reduce: if ranks shard the vocabulary, the token of this rank's first row in
            `weight`, and the all-reduce over the ranks. The loss is the whole one on each rank; the
            gradient of x is this shard's, to be summed by the caller.
        widest: rows in the largest shard of the weight, so that ranks that reduce together use the
            same chunks; None if it is not sharded.
        matmul: multiplies x and weight.
    """
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    x = x.to(matmul_dtype(x))
    differentiate = torch.is_grad_enabled()
    chunks = row_chunks(len(x), widest or len(weight), MAX_LOGITS)

    def of_rows(logits: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        if reduce is None:
            return of_chunk(logits, bias, targets, vocab_size, differentiate, softcap)
        options = (vocab_size, differentiate, softcap, first_column, reduce)
        return row_loss(logits, bias, targets, *options)

    if differentiate:
        return ChunkedLoss.apply(x, weight, bias, targets, of_rows, chunks, matmul)
    with torch.autocast(x.device.type, enabled=False):
        low = weight.to(x.dtype)
        losses = [of_rows(matmul.linear(x[rows], low), bias, targets[rows]) for rows in chunks]
    return torch.stack(losses).sum()


def exceeds_chunk(n_rows: int, width: int) -> bool:
    """Return True if a micro-batch's logits (n_rows, width) are more than MAX_LOGITS numbers, above
    which the loss is computed in chunks. n_rows: token rows. width: the padded vocabulary."""
    return n_rows * width > MAX_LOGITS
