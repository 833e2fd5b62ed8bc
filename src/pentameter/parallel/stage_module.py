"""One pipeline stage's slice of the model: its precision, how it is run, what it recomputes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentameter.config.choices import refuse_unknown
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.model.compiled import with_own_code
from pentameter.model.gpt import GPT
from pentameter.model.loss import compiled_row_loss
from pentameter.parallel.precision import arithmetic

_SAVED_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_SAVED_NAMES = ("scaled_dot_product", "ring_attention", "summa", "product_3d")


class StageModule(nn.Module):
    """Runs one pipeline stage's slice of the model (plain, compiled or fused); DDP and FSDP wrap
    this module.

    `model` is the slice, whose parameters keep the names of the table. In training it runs as
    `run_compiled` or `run_fused` asked, in evaluation plainly.
    """

    def __init__(self, model: GPT, device: torch.device, precision: str) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.precision = precision
        self._train: Callable[..., Tensor] = self._plain
        self.replays = False
        """Whether a CUDA graph is replayed in training, which writes over what the replay before it
        returned: gradients are added to `.grad`, which stays."""

    def forward(
        self, x: Tensor, targets: Tensor | None = None, dropout_keys: Tensor | None = None
    ) -> Tensor:
        """What the slice returns of GPT's arguments: the last layers the summed loss (1,) of
        `targets`, or logits where there are none; other layers the residual stream.

        Without targets, which is to sample, products are in the weights' precision, as `generate`
        computes them; but weights that are gathered from shards come rounded.
        """
        run = self._train if self.training and targets is not None else self._plain
        rounds = targets is not None or isinstance(self, FSDPModule)
        with self.autocast() if rounds else contextlib.nullcontext():
            y = run(x, targets=targets, dropout_keys=dropout_keys)
        # Not a view, which FSDP's hook on what a module returns would be lost on.
        return torch.stack((y,)) if y.ndim == 0 else y

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The arithmetic of the run's precision, for a forward pass."""
        dtype = arithmetic(self.precision).autocast
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    def run_compiled(self, *, replays: bool = False) -> None:
        """Train by what `torch.compile` makes of the slice, from now on; its launches recorded once
        as CUDA graphs if it `replays` them. Then autograd must find each `.grad` there, or it would
        take the graph's own memory for it."""
        if self.model.is_last:
            self.model.head_loss.row_loss = compiled_row_loss
        self.replays = replays
        for parameter in self.model.parameters() if replays else ():
            if not parameter.requires_grad:  # beside adapters
                continue
            parameter.grad = torch.zeros_like(parameter)
        self._train = torch.compile(
            MethodType(with_own_code(GPT.forward), self.model),
            dynamic=False,
            options={"triton.cudagraphs": True} if replays else None,
        )

    def run_fused(self) -> None:
        """Train by the fused operations of `fused_cpu`, which know whole models, from now on."""
        dtype = arithmetic(self.precision).autocast or next(self.model.parameters()).dtype
        self._train = partial(_fused, self.model, dtype)

    def _plain(self, x: Tensor, **arguments: Any) -> Tensor:
        y: Tensor = self.model(x, **arguments)
        return y


def _fused(
    model: GPT, dtype: torch.dtype, tokens: Tensor, *, targets: Tensor, dropout_keys: Tensor | None
) -> Tensor:
    with torch.autocast(tokens.device.type, enabled=False):  # it chooses its dtypes itself
        return fused_loss_sum(model, tokens, targets, dropout_keys, dtype)


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
    """Whether to keep the result of an operation of a block. Attention has a name for each device:
    flash, efficient, cuDNN …; a ring's is ours, and so are products of divided matrices."""
    if op in _SAVED_PRODUCTS or any(name in str(op) for name in _SAVED_NAMES):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
