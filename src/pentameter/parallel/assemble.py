"""The meeting place of model and devices: `assemble` returns the Stage a trainer drives.

The trainer asks a Stage for one thing, `forward_backward(batch, step)`, and never how many
devices, micro-batches or pipeline stages answer. Layouts of several processes will be added
here and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from pentameter.data.batches import Batch
from pentameter.model import (
    GPT,
    build_model,
    chunked_loss_sum,
    dropout_keys,
    elementwise_row_loss,
    exceeds_chunk,
    loss_sum,
    row_loss,
)
from pentameter.model.chunked_loss import RowLoss
from pentameter.model.fused import fused_loss_sum, kernel, with_own_code
from pentameter.parallel.engine import fused_obstacle
from pentameter.parallel.recompute import recompute_activations
from pentameter.plan.plan import Plan

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LossSum:
    """A summed loss and what it is summed over; `mean` is the number everything reports."""

    total: float
    n_targets: int

    @property
    def mean(self) -> float:
        """Nats per target token; NaN over no targets."""
        return self.total / self.n_targets if self.n_targets else float("nan")

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.total + other.total, self.n_targets + other.n_targets)


Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of tokens (B, T), targets (B, T) and dropout keys: the summed loss."""


@dataclass(frozen=True)
class _Forward:
    """The pieces of a forward pass, plain or compiled."""

    loss_of_logits: Loss
    hidden_states: Callable[..., Tensor]
    row_loss: RowLoss


class Stage:
    """This process's part of the model and how to run a batch through it.

    `precision` is one of fp64, fp32, tf32, bf16, fp16, already chosen (see `device.py`).
    """

    def __init__(
        self, model: GPT, plan: Plan, device: torch.device, precision: str, *, compiled: bool
    ) -> None:
        self.model = model
        self.plan = plan
        self.device = device
        self.precision = precision
        assert model.config.vocab_size is not None  # the plan resolved it
        self._vocab_size = model.config.vocab_size
        plain = _Forward(self._loss_of_logits, model.hidden_states, row_loss)
        self._evaluation_loss: Loss = partial(self._loss, plain)
        self._training_loss: Loss = self._evaluation_loss
        if compiled and device.type == "cpu" and fused_obstacle(plan.config) is None:
            self._training_loss = self._fused_loss
        elif compiled:
            whole = _compiled(Stage._loss_of_logits, self)
            hidden = _compiled(GPT.hidden_states, model)
            per_chunk = kernel(elementwise_row_loss)
            self._training_loss = partial(self._loss, _Forward(whole, hidden, per_chunk))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Parameters by the names of the parameter table."""
        return self.model.named_parameters()

    def parameters(self) -> Iterable[Parameter]:
        """Parameters in the order of `named_parameters`."""
        return self.model.parameters()

    def forward_backward(self, batch: Batch, step: int, *, loss_scale: float = 1.0) -> LossSum:
        """The step's loss; its gradients, times `loss_scale`, are added to the parameters' `.grad`.

        The batch is this step's whole batch. Each micro-batch contributes its summed loss over
        the count of targets of the whole batch, known before the first backward pass, so
        accumulation is exact whatever the micro-batches hold.
        """
        self.model.train()
        n_targets = batch.n_targets
        tokens, targets = self._to_device(batch)
        keys = self._keys(step, batch.rows)
        micro_losses = []
        for rows in micro_batches(len(batch.rows), self.plan.micro_batch_size):
            own_keys = None if keys is None else keys[rows]
            loss = self._training_loss(tokens[rows], targets[rows], own_keys)
            (loss * (loss_scale / max(1, n_targets))).backward()
            micro_losses.append(loss.detach())
        return LossSum(sum(torch.stack(micro_losses).tolist()), n_targets)

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> LossSum:
        """The loss of a batch without dropout and without gradients."""
        self.model.eval()
        loss = self._evaluation_loss(*self._to_device(batch), None)
        return LossSum(loss.item(), batch.n_targets)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The arithmetic of the run's precision, for a forward pass."""
        dtype = AUTOCAST.get(self.precision)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    def _loss(
        self, forward: _Forward, tokens: Tensor, targets: Tensor, keys: Tensor | None
    ) -> Tensor:
        """The summed loss; where the logits would be many, without ever holding them all."""
        weight, bias = self.model.head_parameters()
        if not exceeds_chunk(tokens.numel(), len(weight)):
            return forward.loss_of_logits(tokens, targets, keys)
        with self.autocast():
            x = forward.hidden_states(tokens, dropout_keys=keys)
            return chunked_loss_sum(x, weight, bias, targets, self._vocab_size, forward.row_loss)

    def _loss_of_logits(self, tokens: Tensor, targets: Tensor, keys: Tensor | None) -> Tensor:
        with self.autocast():
            logits = self.model(tokens, dropout_keys=keys)
            return loss_sum(logits, targets, self._vocab_size)

    def _fused_loss(self, tokens: Tensor, targets: Tensor, keys: Tensor | None) -> Tensor:
        dtype = AUTOCAST.get(self.precision, next(self.model.parameters()).dtype)
        return fused_loss_sum(self.model, tokens, targets, keys, dtype)

    def _to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._copied(torch.from_numpy(batch.inputs)), self._copied(
            torch.from_numpy(batch.targets)
        )

    def _keys(self, step: int, rows: np.ndarray) -> Tensor | None:
        model = self.plan.config.model
        if not (model.dropout or model.attention_dropout or model.embedding_dropout):
            return None
        return self._copied(dropout_keys(model, self.plan.config.seed, step, rows))

    def _copied(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device; out of pinned memory, a GPU's host need not wait for it."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def _compiled(method: Callable[..., Tensor], owner: object) -> Callable[..., Tensor]:
    return torch.compile(MethodType(with_own_code(method), owner), dynamic=False)


def assemble(plan: Plan, device: torch.device, precision: str, *, compiled: bool) -> Stage:
    """The Stage of `plan` on `device`, its weights drawn from the configuration's seed."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = build_model(plan.config.model, plan.config.seed, device=device, dtype=dtype)
    train = plan.config.train
    torch.set_float32_matmul_precision(
        train.matmul_precision or ("high" if precision == "tf32" else "highest")
    )
    if train.activation_checkpoint is not None:
        recompute_activations(model, train.activation_checkpoint)
    return Stage(model, plan, device, precision, compiled=compiled)


def micro_batches(n_rows: int, micro_batch_size: int) -> Iterator[slice]:
    """The rows of each micro-batch, in order."""
    for start in range(0, n_rows, micro_batch_size):
        yield slice(start, start + micro_batch_size)
