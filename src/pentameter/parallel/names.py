"""Names of a model's modules, parameters and groups, for messages about a rank that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from pentameter.parallel.mesh import Mesh, group_named
from pentameter.parallel.pipeline.pipeline import Pipeline
from pentameter.parallel.stage_module import StageModule
from pentameter.processes.failures.waiting import Naming

MOST_NODES = 200
"""Nodes of the autograd graph among which the nearest parameter is looked for."""


class Names(Naming):
    """Names for what belongs to this rank's slices of a model: modules and parameters by the full
    model's names, process groups by their mesh dimensions. `stages` are the slices by number; a
    World that outlives its engine does not keep them."""

    def __init__(self, stages: Mapping[int, StageModule], mesh: Mesh) -> None:
        self._stages, self._mesh = WeakValueDictionary(stages), mesh

    def of(self, local: object) -> str | None:
        """Return the name of a module, of the modules of FSDP's unit, or of a pipeline's stages on
        this rank; None for anything else, and for a whole slice."""
        if isinstance(local, nn.Module):
            return self._of_modules([local])
        if isinstance(local, Pipeline):
            numbers = " and ".join(map(str, self._stages))
            return f"stage{'s' * (len(self._stages) > 1)} {numbers}"
        unit = getattr(local, "modules", None)  # FSDP's, in the frames of its hooks
        if not isinstance(unit, tuple):
            return None
        return self._of_modules(unit) or "the parameters outside of blocks"

    def of_gradient(self, local: object) -> str | None:
        """Return the name of the module whose parameter the gradient of an autograd node reaches
        first, by breadth, the node's last inputs, such as weights, first; None if there is none
        near."""
        if not isinstance(local, Node):
            return None
        queue, seen = deque([local]), {local}
        while queue and len(seen) < MOST_NODES:
            each = queue.popleft()
            name = self._name(getattr(each, "variable", None))  # of a leaf of the graph
            if name is not None:
                return name.rpartition(".")[0]
            for node, _ in reversed(each.next_functions):
                if node is not None and node not in seen:
                    seen.add(node)
                    queue.append(node)
        return None

    def group(self, local: object) -> tuple[str, list[int]] | None:
        """Return a group's mesh dimension and ranks, if `local` holds the group, the name under
        which `group_named` knows it, or a pipeline; None for anything else."""
        if isinstance(local, Pipeline):
            local = local.group
        if isinstance(local, str):
            try:
                local = group_named(local)
            except KeyError:
                return None
        if not isinstance(local, dist.ProcessGroup):
            return None
        ranks = dist.get_process_group_ranks(local)
        return self._dimension(local), ranks

    def summed(self) -> tuple[str, str, list[int]] | None:
        """Return the first gradients whose all-reduce by DDP is not done: the names of the first
        and the last parameter, the mesh dimension and the ranks; None if there are none."""
        for stage in self._stages.values():
            sums = stage.bucket_sums
            parameters = () if sums is None else sums.first_not_done()
            if sums is not None and len(parameters):
                ranks = dist.get_process_group_ranks(sums.group)
                return self._of_parameters(parameters) or "", self._dimension(sums.group), ranks
        return None

    def _dimension(self, group: dist.ProcessGroup) -> str:
        """Return the mesh dimension along which the group lies; "" if there is none."""
        named = self._mesh.named_groups.items()
        return next((dimension for dimension, each in named if each is group), "")

    def _of_modules(self, modules: Iterable[object]) -> str | None:
        wanted = {id(module) for module in modules}
        named = (pair for stage in self._stages.values() for pair in stage.model.named_modules())
        return next((name for name, module in named if name and id(module) in wanted), None)

    def _of_parameters(self, parameters: Sequence[Tensor]) -> str | None:
        """Return `A`, or `A to B` for the first and the last of several; None for unknown ones."""
        names = [name for each in (parameters[0], parameters[-1]) if (name := self._name(each))]
        return " to ".join(dict.fromkeys(names)) or None

    def _name(self, parameter: object) -> str | None:
        named = (pair for stage in self._stages.values() for pair in stage.model.named_parameters())
        return next((name for name, each in named if each is parameter), None)
