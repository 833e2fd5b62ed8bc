"""Where each layer lives: the degrees of every kind of parallelism and the stages they imply."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; 1 (or ZeRO stage 0) means not used. One process is the default."""

    data: int = 1
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Processes the layout needs."""
        return self.data * self.tensor * self.pipeline * self.context

    def to_json(self) -> dict[str, int]:
        """The degrees by name, as `plan --json` prints them."""
        return asdict(self)


def stage_layers(n_layers: int, n_stages: int) -> tuple[range, ...]:
    """Layer ranges of each pipeline stage, uniform; earlier stages take the remainder.

    Later stages also hold the head, so the extra layers of an uneven cut go to the front.
    """
    size, rest = divmod(n_layers, n_stages)
    starts = [stage * size + min(stage, rest) for stage in range(n_stages + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))
