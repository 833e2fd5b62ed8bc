"""Waiting for collectives that were started before, so that what is waited for can be named if
another rank never answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def finish(work: dist.Work | None, collective: str, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective or message over `group` that was started asynchronously.

    `collective` says in words which one it is, such as `all-gather`. Neither it nor `group` is used
    here: if the wait fails, `processes/failures/waiting.py` reads both out of this frame in the
    traceback, and names them in its message. `group` None means all ranks.
    """
    assert work is not None  # this rank is a member
    work.wait()


class Arriving(NamedTuple):
    """A message to the next rank in a group and one from the previous rank, both under way;
    `pass_on` starts them. The caller computes something else meanwhile, then calls `wait` for the
    tensor that arrives. Before that, `received` must not be read, and `sent` neither freed nor
    written."""

    received: Tensor
    sent: Tensor
    work: list[dist.Work]
    group: dist.ProcessGroup

    def wait(self) -> Tensor:
        """Wait until this rank's message has been sent and the previous rank's has arrived; return
        the tensor received from it."""
        for each in self.work:
            finish(each, "messages", self.group)
        return self.received


def pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start to send a tensor to the next rank in the group, and to receive one of the same shape
    and dtype from the previous one. Returns the exchange under way, whose `wait` returns the
    received tensor. Collective."""
    after, before = (
        dist.get_global_rank(group, (group.rank() + hop) % group.size()) for hop in (1, -1)
    )
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, after, group),
            dist.P2POp(dist.irecv, received, before, group),
        ]
    )
    return Arriving(received, tensor, work, group)


class BucketSums:
    """Communication hook for DDP that sums gradients where DDP would take their mean: pass `start`
    as the hook, and each bucket is all-reduced over `group` and not divided. It remembers which
    all-reduces are not done yet, for an error message about a rank that waits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._parameters: dict[tuple[int, int], list[Tensor]] = {}
        self._started: list[tuple[tuple[int, int], torch.futures.Future[Tensor]]] = []

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to all-reduce a bucket's flat buffer (n,); return the future of the sum."""
        buffer, index = bucket.buffer(), bucket.index()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        if index == 0:
            self._started.clear()
        key = index, buffer.numel()
        if key not in self._parameters:  # DDP forms its buckets anew after the first step
            self._parameters[key] = bucket.parameters()

        def summed(done: torch.futures.Future[object]) -> Tensor:
            done.value()  # raises what failed
            return buffer  # which was added to in place

        future = work.get_future().then(summed)
        self._started.append((key, future))
        return future

    def first_not_done(self) -> Sequence[Tensor]:
        """Return the parameters in the first of this step's buckets whose all-reduce failed or is
        not done; an empty sequence if all are done."""
        for key, future in self._started:
            with suppress(RuntimeError):
                if future.done():
                    future.value()
                    continue
            return self._parameters[key]
        return ()
