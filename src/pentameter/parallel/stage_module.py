"""One pipeline stage's slice of the model: its precision, and how it is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pentameter.data.batches.tree import Tree
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.model.compiled import with_own_code
from pentameter.model.gpt import GPT
from pentameter.parallel.model_source import Call, ModelSource
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.stage_messages import Message, Parts
from pentameter.planning.plan import Plan


class StageModule(nn.Module):
    """Runs one pipeline stage's slice of the model (plain, compiled or fused); DDP and FSDP wrap
    this module.

    `model` is the slice, whose parameters keep the names of the table, and `call` runs it. In
    training it runs as `run_compiled` or `run_fused` asked, in evaluation fused or plainly. With a
    `generator_offset` PyTorch's generator is seeded for each micro-batch, by the key of its first
    row and that offset. A slice that `reads_inputs` is called with (x, the batch's inputs).
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        device: torch.device,
        precision: str,
        *,
        generator_offset: int | None = None,
        reads_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.precision = precision
        self._call = call
        self._generator_offset = generator_offset
        self.reads_inputs = reads_inputs
        self._train: Callable[..., Tensor] = self._plain
        self._evaluate: Callable[..., Tensor] = self._plain
        self._received: Parts | None = None
        self._sent: Parts | None = None
        self.replays = False
        """Whether a CUDA graph is replayed in training, which writes over what the replay before it
        returned: gradients are added to `.grad`, which stays."""

    def forward(
        self,
        x: Tree,
        targets: Tree | None = None,
        dropout_keys: Tensor | None = None,
        inputs: Tree | None = None,
    ) -> Tensor:
        """What the slice returns of a Call's arguments: the last layers the summed loss (1,) of
        `targets`, or logits where there are none; other layers the residual stream.

        Without targets, which is to sample, products are in the weights' precision, as `generate`
        computes them; but weights that are gathered from shards come rounded.
        """
        run = self._train if self.training else self._evaluate
        if targets is None:
            run = self._plain
        rounds = targets is not None or isinstance(self, FSDPModule)
        if self._generator_offset is not None and dropout_keys is not None:
            torch.manual_seed(int(dropout_keys[0]) + self._generator_offset)
        if self._received is not None:
            x = Message.apply(x, self._received, False)
        if self.reads_inputs:
            x = (x, inputs)
        with self.autocast() if rounds else contextlib.nullcontext():
            y = run(x, targets, dropout_keys)
        if self._sent is not None:
            y = Message.apply(y, self._sent, True)
        # Not a view, which FSDP's hook on what a module returns would be lost on.
        return torch.stack((y,)) if y.ndim == 0 else y

    def cut_messages(self, parts: Parts, *, receives: bool, sends: bool) -> None:
        """From now on take a part of the stream where the slice `receives` it from another stage,
        and return one where it `sends` it."""
        self._received = parts if receives else None
        self._sent = parts if sends else None

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
        # It imports PyTorch's compiler, which a run that compiles nothing starts without.
        from pentameter.parallel.recomputed_attention import WithoutGenerator

        self.replays = replays
        for parameter in self.model.parameters() if replays else ():
            if not parameter.requires_grad:  # beside adapters
                continue
            parameter.grad = torch.zeros_like(parameter)
        self._train = torch.compile(
            MethodType(with_own_code(self._call), self.model),
            dynamic=False,
            options={
                "joint_custom_post_pass": WithoutGenerator(),
                **({"triton.cudagraphs": True} if replays else {}),
            },
        )

    def run_fused(self) -> None:
        """Train and evaluate by the fused operations of `fused_cpu`, which know whole GPTs."""
        assert isinstance(self.model, GPT)
        dtype = arithmetic(self.precision).autocast or next(self.model.parameters()).dtype
        self._train = self._evaluate = partial(_fused, self.model, dtype)

    def _plain(self, x: Tree, targets: Tree | None, dropout_keys: Tensor | None) -> Tensor:
        return self._call(self.model, x, targets, dropout_keys)


def slice_module(
    source: ModelSource, plan: Plan, number: int, device: torch.device, precision: str
) -> StageModule:
    """The StageModule of pipeline stage `number`, whose parameters have no memory yet."""
    layers = plan.stages[number]
    model = source.build_slice(plan.config, layers, arithmetic(precision).weights)
    return StageModule(
        model,
        source.call(model, plan.config, layers),
        device,
        precision,
        generator_offset=number if source.draws_from_generator else None,
        reads_inputs=number > 0 and source.reads_inputs(model),
    )


def _fused(
    model: GPT, dtype: torch.dtype, tokens: Tensor, targets: Tensor, dropout_keys: Tensor | None
) -> Tensor:
    with torch.autocast(tokens.device.type, enabled=False):  # it chooses its dtypes itself
        return fused_loss_sum(model, tokens, targets, dropout_keys, dtype)
