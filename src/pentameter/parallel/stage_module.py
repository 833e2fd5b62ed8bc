"""One pipeline stage's slice of the model: its precision, and how it runs."""

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
from pentameter.parallel.linear import use_matmul
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.model_source import Call, ModelSource
from pentameter.parallel.stage_messages import Message, MessageShards
from pentameter.planning.plan import Plan

REPLAYED_FLOPS = 2**43
"""FLOPs of a micro-batch below which its launches are replayed as a CUDA graph. A fast GPU takes
some 20 ms for as many, about as long as a host needs to launch a deep model's kernels one by one.
"""


class StageModule(nn.Module):
    """Runs one pipeline stage's slice of the model (eager, compiled or fused); DDP and FSDP wrap
    this module.

    `model` is the slice, whose parameters keep the names in the parameter table and whose linear
    layers multiply by the matmul of `arithmetic`; `call` runs it. In training it runs as
    `run_compiled` or `run_fused` set it up; evaluation is fused or eager. `row_call` runs it
    for the loss of each batch row. With a `generator_offset`, PyTorch's generator is seeded for
    each micro-batch with the key of its first row plus that offset. If the slice `reads_inputs`, it
    is called with (x, the batch's inputs).
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        row_call: Call,
        device: torch.device,
        arithmetic: Arithmetic,
        *,
        generator_offset: int | None = None,
        reads_inputs: bool = False,
    ) -> None:
        super().__init__()
        use_matmul(model, arithmetic.matmul)
        self.model = model
        self.device = device
        self.arithmetic = arithmetic
        self._call = call
        self._row_call = row_call
        self._generator_offset = generator_offset
        self.reads_inputs = reads_inputs
        self._train: Callable[..., Tensor] = self._plain
        self._evaluate: Callable[..., Tensor] = self._plain
        self._received: MessageShards | None = None
        self._sent: MessageShards | None = None
        self.replays = False
        """Whether training replays a CUDA graph. A replay overwrites the tensors that the previous
        one returned, so gradients must be added to a `.grad` that stays."""

    def forward(
        self,
        x: Tree,
        targets: Tree | None = None,
        dropout_keys: Tensor | None = None,
        inputs: Tree | None = None,
        *,
        by_row: bool = False,
    ) -> Tensor:
        """Run the slice with a Call's arguments: x is int64 (B, T) in the GPT's first stage, else
        the residual stream (B, T, D). Returns the summed loss (1,) of `targets` in nats, that of
        each batch row (B,) if `by_row`, or logits (B, T, V) without targets, from the last stage;
        (B, T, D) from any other.

        Without targets, for sampling, matmuls run in the weights' dtype, as in `generate`; but
        weights all-gathered by FSDP come rounded.
        """
        run = self._train if self.training else self._evaluate
        if by_row:
            run = partial(self._row_call, self.model)
        elif targets is None:
            run = self._plain
        rounds = targets is not None or isinstance(self, FSDPModule)
        if self._generator_offset is not None and dropout_keys is not None:
            torch.manual_seed(int(dropout_keys[0]) + self._generator_offset)
        if self._received is not None:
            x = Message.apply(x, self._received, False)
        if self.reads_inputs:
            x = (x, inputs)
        with self.arithmetic.autocast(self.device) if rounds else contextlib.nullcontext():
            y = run(x, targets, dropout_keys)
        if self._sent is not None:
            y = Message.apply(y, self._sent, True)
        # `stack` and not a view: FSDP's hook on module outputs would be lost on a view.
        return torch.stack((y,)) if y.ndim == 0 else y

    def shard_messages(self, parts: MessageShards, *, receives: bool, sends: bool) -> None:
        """Exchange sharded messages from now on: take a shard if the slice `receives` the stream
        from another stage, and return one if it `sends` it."""
        self._received = parts if receives else None
        self._sent = parts if sends else None

    def run_compiled(self, *, replays: bool = False) -> None:
        """Train with `torch.compile` from now on. If it `replays`, launches are recorded once as
        CUDA graphs; each `.grad` must then exist before autograd runs, which would otherwise take
        the graph's own memory for it."""
        # Imports PyTorch's compiler, which runs that compile nothing need not load.
        from pentameter.parallel.memory.recomputed_attention import WithoutGenerator

        self.replays = replays
        for parameter in self.model.parameters() if replays else ():
            if not parameter.requires_grad:  # frozen, next to adapters
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
        """Train and evaluate with the fused operations in `fused_cpu`, which support full GPTs
        only."""
        assert isinstance(self.model, GPT)
        self._train = self._evaluate = partial(_fused, self.model, self.arithmetic.products)

    def _plain(self, x: Tree, targets: Tree | None, dropout_keys: Tensor | None) -> Tensor:
        """Run the slice eagerly, with the shapes that `forward` has."""
        return self._call(self.model, x, targets, dropout_keys)


def slice_module(
    source: ModelSource, plan: Plan, number: int, device: torch.device, arithmetic: Arithmetic
) -> StageModule:
    """Build the StageModule for pipeline stage `number`, its parameters without memory yet."""
    layers = plan.stages[number]
    model = source.build_slice(plan.config, layers, arithmetic.weights)
    return StageModule(
        model,
        source.call(model, plan.config, layers),
        source.row_call(model, plan.config, layers),
        device,
        arithmetic,
        generator_offset=number if source.draws_from_generator else None,
        reads_inputs=number > 0 and source.reads_inputs(model),
    )


def compile_module(module: StageModule, source: ModelSource, plan: Plan, *, alone: bool) -> None:
    """Choose how a slice runs in training: fused operations on a CPU, `torch.compile` otherwise. A
    GPU that finishes a micro-batch before its host has launched the next kernels replays a CUDA
    graph. It cannot replay if other ranks' all-reduces run in hooks, so unless it is `alone`, nor
    if the module's control flow may depend on values."""
    if module.device.type == "cpu" and plan.fused_obstacle is None:
        module.run_fused()
        return
    n_tokens = plan.micro_batch_size * plan.config.model.context_length
    is_short = n_tokens * plan.least_flops_per_token < REPLAYED_FLOPS
    can_replay = alone and not source.may_leave_unused and module.device.type == "cuda"
    source.prepare_compiled(module.model)
    module.run_compiled(replays=can_replay and is_short)


def _fused(
    model: GPT, dtype: torch.dtype, tokens: Tensor, targets: Tensor, dropout_keys: Tensor | None
) -> Tensor:
    """Compute the summed loss, 0-dim, from tokens and targets (B, T) by the fused CPU
    operations."""
    with torch.autocast(tokens.device.type, enabled=False):  # the kernels choose their dtypes
        return fused_loss_sum(model, tokens, targets, dropout_keys, dtype)
