"""Activations that blocks forget in the forward pass, and compute again for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentameter.config.choices import refuse_unknown

_SAVED_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_SAVED_NAMES = (
    "scaled_dot_product",
    "dropped_attention",
    "ring_attention",
    "read_stream",
    "summa",
    "product_3d",
)


def recompute_activations(
    blocks: Iterable[nn.Module],
    how: Literal["selective", "full"],
    *,
    draws_from_generator: bool = False,
) -> None:
    """Have every block forget its activations, and compute them again for backward.

    `full` keeps a block's input only. `selective` keeps the results of its matrix products and
    of fused attention too, and computes again what is element-wise: norms, activations, dropout,
    and the weights of an attention that writes them out, which are the largest of all.

    Only the blocks' `forward` is replaced, so names in `state_dict()` stay. Keyed dropout needs no
    generator's state for the second pass; blocks that draw from PyTorch's generator do.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_from_generator}
    match how:
        case "full":
            pass
        case "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        case unknown:
            refuse_unknown(unknown, "train.activation_checkpoint", "the engine")
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, options)


def _recomputed(
    forward: Callable[..., Tensor], options: dict[str, Any], *arguments: Any, **named: Any
) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, **options, **named)


def _policy(ctx: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Whether to keep the result of an operation of a block. Attention has a name for each device:
    flash, efficient, cuDNN …; a ring's and what drops weights in kernels are ours, and so are
    products of divided matrices."""
    if op in _SAVED_PRODUCTS or any(name in str(op) for name in _SAVED_NAMES):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
