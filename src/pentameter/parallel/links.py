"""A check of the links between ranks: messages to the neighbours in each group, timed and
compared."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.machine.health import best_seconds
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.waits import pass_on

MESSAGE_BYTES = 2**20


def measure_links(mesh: Mesh, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Send a message to the next rank and receive one from the previous, in each of this rank's
    groups along mesh dimensions. Returns (seconds, faults): `seconds` maps each mesh dimension to
    the time of its fastest exchange; `faults` has a phrase for each message that did not arrive as
    it was sent, to follow the rank's name, such as "receives other words from rank 3 …".
    Collective."""
    seconds, faults = {}, []
    for dimension, group in mesh.named_groups.items():
        before = dist.get_global_rank(group, (group.rank() - 1) % group.size())
        sent, received = _message(mesh.world.rank, device), torch.empty(0)

        def exchange() -> None:
            nonlocal received
            received = pass_on(sent, group).wait()  # noqa: B023 - called in this turn

        dist.all_reduce(torch.zeros(1, device=device), group=group)  # begin together
        seconds[dimension] = best_seconds(device, exchange)
        n_wrong = int(torch.count_nonzero(received != _message(before, device)).item())
        if n_wrong:
            faults.append(
                f"receives other words from rank {before} along {dimension} than it sent: "
                f"{n_wrong:,} of {len(received):,} differ"
            )
    return seconds, faults


def _message(rank: int, device: torch.device) -> Tensor:
    """Return the message that `rank` sends, int64 (MESSAGE_BYTES / 8,), from which a receiver can
    tell its sender."""
    return torch.arange(MESSAGE_BYTES // 8, device=device).mul_(0x9E3779B97F4A7C1).add_(rank)
