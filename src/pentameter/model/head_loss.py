"""The end of the model in training: from the last hidden states to the summed loss.

It is a module of its own, so that what surrounds it can be applied from outside: a head whose
vocabulary is shared out among processes passes its part of the weight, says where its part begins
and how partial results become whole.

Shapes: B batch, T time, D d_model, V padded vocabulary (or this process's part of it).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.model.chunked_loss import (
    Reduce,
    RowLoss,
    chunked_loss_sum,
    exceeds_chunk,
    row_loss,
)
from pentameter.model.loss import loss_sum


class HeadLoss(nn.Module):
    """Σ cross-entropy of x (B, T, D) · weightᵀ (V, D) + bias (V,) against targets (B, T)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.row_loss: RowLoss = row_loss
        """How a chunk's loss is computed, where logits come in chunks."""
        self.first_column = 0
        """The token that the first row of the weight stands for."""
        self.widest: int | None = None
        """Rows of the largest part's weight, where the vocabulary is shared out."""
        self.reduce: Reduce | None = None
        """Makes the whole vocabulary's figures out of those of its parts, where it has parts."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum in nats, 0-dim; targets of -1 do not count, rows from vocab_size on only
        pad. Where the logits would be many, they never exist all at once."""
        if self.reduce is None and not exceeds_chunk(targets.numel(), len(weight)):
            return loss_sum(F.linear(x, weight, bias), targets, self.vocab_size)
        return chunked_loss_sum(
            x,
            weight,
            bias,
            targets,
            self.vocab_size,
            self.row_loss,
            first_column=self.first_column,
            widest=self.widest,
            reduce=self.reduce,
        )
