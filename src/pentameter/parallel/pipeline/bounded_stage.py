"""Pipeline stages that hold a receive buffer only while a micro-batch needs it.

Before torch 2.15 `PipelineStage` allocates buffers for all micro-batches in a step, and schedules
hold sent tensors until the step ends: memory that grows with the batch. The classes here override
the stage's public methods that every receive and send passes through, and so know when a receive is
posted and when its tensor has been read.

A message is an activation or a gradient that one stage sends to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pentameter.parallel.waits import finish

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}
"""Maps `parallel.schedule` to PyTorch's schedule."""
META = torch.device("meta")
SCHEDULES_LET_GO = hasattr(PipelineStage, "release_fwd_send_outputs")
"""Whether PyTorch's schedules release sent activations: since torch 2.15, which also allocates no
buffers in advance, so that a BoundedStage finds none to drop."""


class BoundedStage(PipelineStage):
    """A pipeline stage that holds the memory for a received message only from the moment at which
    its receive is posted until the pass that reads it is done. PyTorch's PipelineStage, from which
    it derives, holds one for every micro-batch.

    Autograd keeps a received activation for the backward pass, as it does any input.
    `take_gradients` is called after the second half of a split backward pass, which adds to the
    weights' `.grad` without autograd's hooks. All other arguments are PipelineStage's.
    """

    def __init__(self, *args: Any, take_gradients: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_gradients = take_gradients
        self.args_recv_info = _WithoutMemory()
        self.grad_recv_info = _WithoutMemory()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives for micro-batch `fwd_chunk_id`'s input activations, into buffers
        allocated now."""
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives for the gradients of micro-batch `bwd_chunk_id`'s output, into
        buffers allocated now; for a schedule without backward passes, nothing is allocated."""
        if self.has_backward:
            _move_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run micro-batch `fwd_chunk_id`'s forward pass, free its receive buffer, and return the
        output: the residual stream (B, T, D), the summed loss (1,) or logits (B, T, V)."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move_buffers(self.args_recv_info[fwd_chunk_id], META)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run micro-batch `bwd_chunk_id`'s backward pass, or unless `full_backward` only its first
        half, the inputs' gradients; then free its receive buffer. In the last stage it starts from
        `loss`, the schedule's scalar; in others `loss` is None. `last_backward` marks the step's
        last backward pass, for DDP and FSDP."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward:
            _move_buffers(self.grad_recv_info[bwd_chunk_id], META)
        if loss is not None:  # the schedule keeps it, and its graph would keep the stage's input
            loss.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients for micro-batch `bwd_chunk_id`, the second half of a split
        backward pass, and call `take_gradients`. `last_backward` marks the step's last backward
        pass."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.take_gradients()

    # In a V, PyTorch passes gradients between a rank's two stages even without backward passes.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient of a micro-batch's input, for the previous stage on this rank; ()
        without a backward pass."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Store the gradient of a micro-batch's output, computed by the next stage on this rank; do
        nothing without a backward pass."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def end_step(self) -> None:
        """Clear PyTorch's per-step state, which a step without backward passes leaves behind.
        Called after every step or evaluation."""
        self.clear_runtime_states()


class SendingStage(BoundedStage):
    """A BoundedStage that starts each send and receive at once, for schedules of PyTorch that would
    otherwise hold every message until the step ends.

    It is not for schedules in which two ranks send to each other at once, where NCCL needs the send
    and the receive in one call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receives: dict[tuple[str, int], list[dist.Work]] = {}
        self._sends: dict[tuple[str, int], list[dist.Work]] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Post the receives for a micro-batch's activations now; return an empty list, so that the
        schedule posts none."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        self._receives["forward", fwd_chunk_id] = _post(ops)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Post the receives for a micro-batch's output gradients now; return an empty list, so that
        the schedule posts none."""
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        self._receives["backward", bwd_chunk_id] = _post(ops)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Post a micro-batch's activation sends now; return an empty list, so that the schedule
        posts none."""
        self._sends["forward", fwd_chunk_id] = _post(super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Wait for the previous micro-batch's gradient sends, then post this one's; return an empty
        list, so that the schedule posts none."""
        # The previous gradient was sent a pass ago, and its receive is posted at once.
        _wait(self._sends.pop(("backward", bwd_chunk_id - 1), []))
        self._sends["backward", bwd_chunk_id] = _post(super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Wait for micro-batch `fwd_chunk_id`'s input, then run its forward pass and return the
        output: the residual stream (B, T, D), the summed loss (1,) or logits (B, T, V)."""
        _wait(self._receives.pop(("forward", fwd_chunk_id), []))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Wait for a micro-batch's output gradient and for its activation send, then run its
        backward pass, or unless `full_backward` only its first half. `loss`, the schedule's scalar,
        is None except in the last stage."""
        _wait(self._receives.pop(("backward", bwd_chunk_id), []))
        # The stage that sent this gradient has received the activations.
        _wait(self._sends.pop(("forward", bwd_chunk_id), []))
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def end_step(self) -> None:
        """Wait for the remaining sends, then clear PyTorch's per-step state."""
        for works in self._sends.values():
            _wait(works)
        self._sends.clear()
        super().end_step()


def stage_class(schedule: str) -> type[BoundedStage]:
    """Return the class of a stage for a `parallel.schedule`.

    Before torch 2.15 PyTorch's 1F1B posts a send and a receive as one call, and releases each
    message; the other schedules hold sent tensors until the step ends.
    """
    if SCHEDULES_LET_GO or schedule == "1f1b":
        return BoundedStage
    return SendingStage


class _WithoutMemory(dict[int, Any]):
    """Dictionary from a micro-batch's number to PyTorch's record of what is received for it. It
    moves the record's buffers to `meta`, where they take no memory, until the stage allocates them.

    PyTorch makes the buffers for all micro-batches at the first step, one after the other; this
    dictionary releases each before the next is made.
    """

    def __setitem__(self, micro_batch: int, infos: Iterable[Any]) -> None:
        super().__setitem__(micro_batch, infos)
        _move_buffers(infos, META)


def _move_buffers(infos: Iterable[Any], device: torch.device) -> None:
    """Replace the buffer in each of PyTorch's receive infos by an empty one with the same shape and
    dtype on `device`. Infos without a buffer (the first stage's inputs) stay."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # the first stage's arguments have none
        if buffer is not None:
            fresh = torch.empty_like(buffer, device=device)
            info.buffer = fresh.requires_grad_(buffer.requires_grad)


def _post(ops: Iterable[dist.P2POp]) -> list[dist.Work]:
    """Start the sends or receives in `ops`, and return their work handles."""
    return [op.op(op.tensor, op.peer, op.group) for op in ops]


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        finish(work, "messages", None)
