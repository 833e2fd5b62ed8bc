"""A slice of the model as a step runs it: in its precision, plain, compiled or by fused kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.model.compiled import with_own_code
from pentameter.model.gpt import GPT
from pentameter.model.loss import compiled_row_loss
from pentameter.parallel.precision import arithmetic


class StageModule(nn.Module):
    """What this process computes of a forward pass; what is applied from outside wraps this.

    `model` is the slice, whose parameters keep the names of the table. In training it runs as
    `run_compiled` or `run_fused` asked, in evaluation plainly.
    """

    def __init__(self, model: GPT, device: torch.device, precision: str) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.precision = precision
        self._train: Callable[..., Tensor] = self._plain

    def forward(
        self, x: Tensor, targets: Tensor | None = None, dropout_keys: Tensor | None = None
    ) -> Tensor:
        """The slice's part of the pass: of the last layers the summed loss (1,) of `targets`, or
        logits; of others the stream. The arguments are GPT's.

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

    def run_compiled(self) -> None:
        """From now on train by what `torch.compile` makes of the slice."""
        if self.model.is_last:
            self.model.head_loss.row_loss = compiled_row_loss
        self._train = torch.compile(
            MethodType(with_own_code(GPT.forward), self.model), dynamic=False
        )

    def run_fused(self) -> None:
        """From now on train by the fused operations of `fused_cpu`, which know whole models."""
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
