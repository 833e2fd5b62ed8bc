"""A linear layer's low-rank adapter (LoRA), for code that computes with the layer's matrix without
calling the layer.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pentameter.planning.adapters import A


def adapter_of(linear: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """Return the adapter's A (r, K) and B (N, r), and the factor alpha ÷ r of their product; None
    for a layer without an adapter."""
    if not hasattr(linear, A):
        return None
    adapted: Any = linear
    return adapted.lora_a, adapted.lora_b, adapted.lora_factor


def weight_terms(linear: nn.Linear) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield pairs (left, right) of matrices, whose products left · right sum to the matrix (N, K)
    by which the layer multiplies, its adapter (LoRA) included. The first pair is (weight (N, K),
    None), without a right factor; an adapter adds a pair of shapes (N, r) and (r, K).

    Code that computes with a layer's matrix, and does not call the layer, gets it here: `weight`
    alone leaves the adapter out.
    """
    yield linear.weight, None
    adapter = adapter_of(linear)
    if adapter is not None:
        a, b, factor = adapter
        yield factor * b, a
