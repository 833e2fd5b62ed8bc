"""Activation checkpointing: memory for time, block by block, applied to a model from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentameter.config.choices import refuse_unknown
from pentameter.model.gpt import GPT

_SAVED_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def recompute_activations(model: GPT, how: Literal["selective", "full"]) -> None:
    """Have every block of `model` forget its activations, and compute them again for backward.

    `full` keeps a block's input only. `selective` keeps the results of its matrix products and
    of PyTorch's attention too, and computes again what is element-wise: norms, activations,
    dropout, and the weights of an attention that drops them, which are the largest of all.

    Only the blocks' `forward` is replaced, so names in `state_dict()` stay. Dropout masks are
    functions of their keys: no generator's state has to be kept for the second pass.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    match how:
        case "full":
            pass
        case "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        case unknown:
            refuse_unknown(unknown, "train.activation_checkpoint", "the engine")
    for block in model.blocks.values():
        block.forward = partial(_recomputed, block.forward, options)


def _recomputed(forward: Callable[..., Tensor], options: dict[str, Any], *arguments: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*arguments)
    return checkpoint(forward, *arguments, **options)


def _policy(ctx: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """What of a block to keep. Attention has a name for each device: flash, efficient, cuDNN …"""
    if op in _SAVED_PRODUCTS or "scaled_dot_product" in str(op):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
