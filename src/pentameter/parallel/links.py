"""Are the links between ranks well? Messages to the neighbours in each group, timed and checked."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.machine.health import best_seconds
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.waits import finish

MESSAGE_BYTES = 2**20


def measure_links(mesh: Mesh, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """In each of this rank's groups along mesh dimensions, send a message to the next rank and
    receive one from the previous. Return dimension → seconds, and sentences without a subject about
    messages that did not arrive as they were sent. Collective."""
    seconds, faults = {}, []
    for dimension, group in mesh.named_groups.items():
        rank, size = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + hop) % size) for hop in (1, -1))
        sent, received = _message(mesh.world.rank, device), torch.empty(0)

        def exchange() -> None:
            nonlocal received
            received = pass_on(sent, after, before, group)  # noqa: B023 - called in this turn

        dist.all_reduce(torch.zeros(1, device=device), group=group)  # begin together
        seconds[dimension] = best_seconds(device, exchange)
        n_wrong = int(torch.count_nonzero(received != _message(before, device)).item())
        if n_wrong:
            faults.append(
                f"receives other words from rank {before} along {dimension} than it sent: "
                f"{n_wrong:,} of {len(received):,} differ"
            )
    return seconds, faults


def pass_on(sent: Tensor, after: int, before: int, group: dist.ProcessGroup) -> Tensor:
    """Send a tensor to rank `after`, and return the one with the same shape that rank `before`
    sends. Collective over the group."""
    received = torch.empty_like(sent)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, group),
            dist.P2POp(dist.irecv, received, before, group),
        ]
    )
    for work in works:
        finish(work, "messages", group)
    return received


def _message(rank: int, device: torch.device) -> Tensor:
    """Return what `rank` sends, int64 (MESSAGE_BYTES / 8,)."""
    return torch.arange(MESSAGE_BYTES // 8, device=device).mul_(0x9E3779B97F4A7C1).add_(rank)
