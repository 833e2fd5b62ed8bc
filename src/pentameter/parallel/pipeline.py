"""Pipeline parallelism: stages of layers in different processes, driven by PyTorch's schedules.

Shapes: B rows of a micro-batch, T time (this rank's part of it), D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pentameter.config.choices import TAKES_SEVERAL_STAGES, look_up
from pentameter.data.batches.tree import Tree, leaves
from pentameter.parallel.bounded_stage import SCHEDULES_LET_GO, BoundedStage, SendingStage
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.architecture import residual_stream
from pentameter.planning.plan import Plan

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}
STAGES: dict[str, type[BoundedStage]] = {
    "gpipe": SendingStage,
    "1f1b": BoundedStage,
    "interleaved": SendingStage,
    "zero-bubble": SendingStage,
    "zero-bubble-v": SendingStage,
}
"""`parallel.schedule` → its stages, unless SCHEDULES_LET_GO: PyTorch's 1F1B posts a send and a
receive as one call, and lets go of each message; the others hold what they sent until the end."""
Use = Literal["train", "evaluate", "logits"]


class Pipeline:
    """Runs the pipeline stages of this rank, and sends activations and gradients between ranks.

    `modules` run the stages that this rank holds, by stage number: stage modules, which FSDP may
    wrap already; `module` is one of them. Every rank of the pipeline makes one Pipeline, and calls
    its methods together with the others. `take_gradients` is the stages', of BoundedStage.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        module: StageModule,
        plan: Plan,
        mesh: DeviceMesh,
        take_gradients: Callable[[], None],
    ) -> None:
        self._take_gradients = take_gradients
        self._modules = modules
        self._plan = plan
        self._group = mesh["pipeline"].get_group()
        self._device = module.device
        self._stream_dtype = next(module.model.parameters()).dtype
        self._logits_dtype = self._stream_dtype  # StageModule does not round them, unless sharded
        if plan.layout.zero:
            self._logits_dtype = arithmetic(module.precision).autocast or self._stream_dtype
        self._holds_first = 0 in modules
        self._reads_inputs = any(
            isinstance(each, StageModule) and each.reads_inputs for each in modules.values()
        )
        self._schedules: dict[tuple[object, ...], tuple[Any, list[BoundedStage]]] = {}
        self._factor = 1.0
        self._losses: list[Tensor] = []

    def train(
        self, inputs: Tree, targets: Tree, keys: Tensor | None, factor: float, n_micro_batches: int
    ) -> Tensor:
        """The summed loss, () (zero where the last stage is elsewhere); the gradients of it times
        `factor` are added to the parameters'. Rows are divided into equal micro-batches."""
        self._factor = factor
        schedule, stages = self._schedule(
            "train", self._plan.layout.schedule, inputs, n_micro_batches
        )
        self._run(schedule.step, inputs, targets, keys)
        return self._collected(stages)

    def evaluate(self, inputs: Tree, targets: Tree, n_micro_batches: int) -> Tensor:
        """The summed loss, (), without gradients; rows are divided into equal micro-batches."""
        schedule, stages = self._schedule("evaluate", self._forward_only, inputs, n_micro_batches)
        self._run(schedule.eval, inputs, targets, None)
        return self._collected(stages)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits (B, T, V) of one micro-batch; None where the last stage is elsewhere."""
        schedule, stages = self._schedule("logits", self._forward_only, tokens, 1)
        arguments = (tokens,) if self._holds_first else ()
        context = {"inputs": tokens} if self._reads_inputs else {}
        result: Tensor | None = schedule.step(*arguments, **context)
        _end(stages)
        return result

    def _run(
        self, run: Callable[..., Any], inputs: Tree, targets: Tree, keys: Tensor | None
    ) -> None:
        arguments = (inputs,) if self._holds_first else ()
        context = {"targets": targets}
        if keys is not None:
            context["dropout_keys"] = keys
        if self._reads_inputs:
            context["inputs"] = inputs
        # PyTorch asks for a tensor, which `_loss` has no use for.
        run(*arguments, target=leaves(targets)[0], **context)

    def _loss(self, loss: Tensor, _targets: Tensor) -> Tensor:
        self._losses.append(loss.detach())
        return loss.sum() * self._factor

    def _collected(self, stages: list[BoundedStage]) -> Tensor:
        _end(stages)
        losses, self._losses = self._losses, []
        return torch.cat(losses).sum() if losses else torch.zeros((), device=self._device)

    @property
    def _forward_only(self) -> str:
        """The schedule without backward passes: GPipe's takes any number of micro-batches."""
        name = self._plan.layout.schedule
        return name if _takes_several_stages(name) else "gpipe"

    def _schedule(
        self, use: Use, name: str, inputs: Tree, n_micro_batches: int
    ) -> tuple[Any, list[BoundedStage]]:
        """PyTorch's schedule for a use and inputs' shapes, made at its first call, and its stages.

        Shapes are fixed for a schedule's life, and so is whether what is received has a gradient,
        which the first step settles. Schedules hold no parameters.
        """
        # Sizes of one micro-batch; rows come first.
        given = [
            torch.empty(
                (len(each) // n_micro_batches, *each.shape[1:]), dtype=each.dtype, device="meta"
            )
            for each in leaves(inputs)
        ]
        shapes = tuple((each.shape, each.dtype) for each in given)
        key = (use, name, n_micro_batches, shapes)
        if key not in self._schedules:
            stages = [
                self._stage(use, name, number, module, given)
                for number, module in self._modules.items()
            ]
            schedule = SCHEDULES[name](
                stages if _takes_several_stages(name) else stages[0],
                n_micro_batches,
                loss_fn=None if use == "logits" else self._loss,
                scale_grads=False,  # the loss is divided by the global count of targets
            )
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _stage(
        self, use: Use, schedule: str, number: int, module: nn.Module, given: Sequence[Tensor]
    ) -> BoundedStage:
        """A stage of a schedule; `given` are the first one's inputs, without memory."""
        plan, layout = self._plan, self._plan.layout
        micro_batch_size = len(given[0])
        (T,) = layout.local_shape((plan.config.model.context_length,), ("context",))
        has_loss = use != "logits"
        on_meta: dict[str, Any] = {"device": "meta"}
        stream = torch.empty(
            micro_batch_size,
            *layout.local_shape(
                residual_stream(plan.config.model, "stream").shape, ("message", "embed")
            ),
            dtype=self._stream_dtype,
            requires_grad=has_loss,
            **on_meta,
        )
        if has_loss:  # sums are fp32, or fp64
            end = torch.empty(1, dtype=self._stream_dtype, requires_grad=True, **on_meta)
        else:
            shape = (micro_batch_size, T, plan.vocab_size_padded)
            end = torch.empty(shape, dtype=self._logits_dtype, **on_meta)
        stage = BoundedStage if SCHEDULES_LET_GO else STAGES[schedule]
        return stage(
            module,
            number,
            layout.n_stages,
            self._device,
            input_args=tuple(given) if number == 0 else stream,
            output_args=end if number == layout.n_stages - 1 else stream,
            group=self._group,
            take_gradients=self._take_gradients,
        )


def _end(stages: list[BoundedStage]) -> None:
    for stage in stages:
        stage.end_step()


def _takes_several_stages(schedule: str) -> bool:
    return look_up(TAKES_SEVERAL_STAGES, schedule, "parallel.schedule", "the pipeline")
