"""The world of a run: this process's rank, and collectives outside the step, small and on the CPU.

Every method that sends is collective: each process calls it, in the same order. With one
process nothing is sent and torch.distributed is never imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pentameter.errors import PentameterError
from pentameter.processes.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's rank among those of the run. One process is the default."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes of its machine, and the index of its GPU."""
    local_size: int = 1
    timeout_seconds: float = math.inf
    """Longest wait for another process, in every group; one process alone waits for nobody."""
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)
    """The step that this process is in, and what it does there."""
    store: Store | None = field(default=None, compare=False, repr=False)
    """The store of the rendezvous, where processes that lost another one say so."""

    @property
    def is_main(self) -> bool:
        """True for rank 0, which speaks and writes the run folder."""
        return self.rank == 0

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value that rank `source` passed, in every process."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source)
        return box[0]  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, in every process."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_reduce_max(self, value: int) -> int:
        """The largest of the values that ranks passed; cheap enough for every step."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value])
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor.item())

    def barrier(self) -> None:
        """Return once every process has come here."""
        self.all_reduce_max(0)

    def agreed(self, work: Callable[[], T]) -> T:
        """What `work` returns in this process; where it raises in any, each process raises that.

        Of several failures one of ours is raised before any other, then that of the lowest rank.
        """
        result: T | None = None
        own: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:
            own = caught
        failures = [
            (rank, each) for rank, each in enumerate(self.all_gather(own)) if each is not None
        ]
        if failures:
            ours = [failure for failure in failures if isinstance(failure[1], PentameterError)]
            rank, error = (ours or failures)[0]
            raise own if own is not None and rank == self.rank else error
        return result  # type: ignore[return-value]

    def on_main(self, action: Callable[[], T]) -> T:
        """The result of `action`, which the main process alone runs; what it raises, all raise."""
        result = self.agreed(lambda: action() if self.is_main else None)
        return self.broadcast(result)  # type: ignore[return-value]
