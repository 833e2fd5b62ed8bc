"""Tied weights across pipeline stages: two copies of one parameter, kept equal.

The token embedding belongs to the first stage, and the last one, whose head reads it, holds a
copy of its own. Their gradients are added up before norm, clip and step; so both make the same
update, and neither need ever be sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from pentameter.parallel import gradients
from pentameter.parallel.mesh import make_group
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

NAME = "token_embedding.weight"


class TiedCopies:
    """The embedding of the first stage and the head's copy of it, where the head is tied.

    Made by every process of the world at the same time. `copy` is the parameter in a process that
    holds it as a copy only.
    """

    def __init__(
        self, plan: Plan, mesh: DeviceMesh, world: World, named: Mapping[str, Parameter]
    ) -> None:
        self._held: Parameter | None = None
        self.copy: Parameter | None = None
        self._group: dist.ProcessGroup | None = None
        if not plan.config.model.tied_head:
            return
        last = plan.layout.pipeline - 1
        places = plan.layout.coordinates(world.rank)
        if places["pipeline"] not in (0, last):
            return
        self._held = named[NAME]
        self.copy = self._held if places["pipeline"] == last else None
        if last == 1:
            self._group = mesh["pipeline"].get_group()
        else:
            ends = (plan.layout.rank_of(**{**places, "pipeline": end}) for end in (0, last))
            self._group = make_group(ends, world)

    def add_up(self) -> None:
        """Give both copies the sum of their gradients."""
        if self._held is not None and self._held.grad is not None:
            assert self._group is not None  # whoever holds a copy is in a pair
            gradients.add_up([gradients.local(self._held.grad)], self._group)
