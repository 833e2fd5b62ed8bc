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
from pentameter.plan.plan import Plan

NAME = "token_embedding.weight"


class TiedCopies:
    """The embedding of the first stage and the head's copy of it, where the head is tied.

    Made by every process of the world at the same time. `copy` is the parameter in a process that
    holds it as a copy only.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, named: Mapping[str, Parameter]) -> None:
        self._held: Parameter | None = None
        self.copy: Parameter | None = None
        self._group: dist.ProcessGroup | None = None
        if not plan.config.model.tied_head:
            return
        last = plan.layout.pipeline - 1
        for rank in range(plan.layout.world_size):
            places = plan.layout.coordinates(rank)
            if places["pipeline"]:
                continue
            pair = [rank, plan.layout.rank_of(**{**places, "pipeline": last})]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                self._group = group
        place = mesh["pipeline"].get_local_rank()
        if place in (0, last):
            self._held = named[NAME]
            self.copy = self._held if place == last else None

    def add_up(self) -> None:
        """Give both copies the sum of their gradients."""
        if self._held is not None and self._held.grad is not None:
            assert self._group is not None  # whoever holds a copy is in a pair
            gradients.add_up([gradients.local(self._held.grad)], self._group)
