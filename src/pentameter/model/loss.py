"""The training objective: cross-entropy, summed, so that no mean of means can arise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_TARGET = -1


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
