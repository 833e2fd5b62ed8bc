"""Names for the modules, parameters and groups in a local variable of a traceback's frame: a
message about a rank that waits for another one says by them what it waited for."""

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
"""Largest number of autograd nodes that `of_gradient` searches."""


class Names(Naming):
    """Finds the names of one engine's objects, for error messages about a rank that waits:
    `processes/failures/waiting.py` asks it what the local variables in a traceback hold.

    Modules and parameters have the full model's names, process groups those of their mesh
    dimensions. `stages` maps stage numbers to this rank's slices of the model. They are held by
    weak references, so that a World that outlives its engine does not keep the model in memory.
    """

    def __init__(self, stages: Mapping[int, StageModule], mesh: Mesh) -> None:
        self._stages, self._mesh = WeakValueDictionary(stages), mesh

    def of(self, local: object) -> str | None:
        """Return the name of `local`: of a module inside a slice, of the first named module in a
        unit of FSDP (for the unit of all other parameters, words that say so), or of this rank's
        pipeline stages. None for anything else, and for a slice's root."""
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
        """Return the name of the module nearest to an autograd node in the backward graph.

        `local` is any object; only a `torch.autograd.graph.Node` gives a name. From it the graph is
        searched breadth first for a leaf that is a parameter of this rank; the module that owns it
        is named. Of a node's inputs the last ones, such as weights, are searched first. None if
        `local` is not a node, or if no parameter is among the first MOST_NODES nodes.
        """
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
        """Return (mesh dimension, ranks) of a process group. `local` is the group, its name as
        `group_named` knows it, or a Pipeline, which has one. The dimension is "" for a group along
        none. None if `local` is anything else."""
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
        """Return (parameters, mesh dimension, ranks) for the first bucket of gradients whose
        all-reduce by DDP is not done: the first and the last parameter's name in words, and the
        group that reduces them. None if every all-reduce is done, or without DDP."""
        for stage in self._stages.values():
            sums = stage.bucket_sums
            parameters = () if sums is None else sums.first_not_done()
            if sums is not None and len(parameters):
                ranks = dist.get_process_group_ranks(sums.group)
                return self._of_parameters(parameters) or "", self._dimension(sums.group), ranks
        return None

    def _dimension(self, group: dist.ProcessGroup) -> str:
        """Return the mesh dimension that the group lies along; "" if there is none."""
        named = self._mesh.named_groups.items()
        return next((dimension for dimension, each in named if each is group), "")

    def _of_modules(self, modules: Iterable[object]) -> str | None:
        wanted = {id(module) for module in modules}
        named = (pair for stage in self._stages.values() for pair in stage.model.named_modules())
        return next((name for name, module in named if name and id(module) in wanted), None)

    def _of_parameters(self, parameters: Sequence[Tensor]) -> str | None:
        """Return `A to B` with the names of the first and the last of `parameters`, or `A` for one;
        None if this rank's slices have neither."""
        names = [name for each in (parameters[0], parameters[-1]) if (name := self._name(each))]
        return " to ".join(dict.fromkeys(names)) or None

    def _name(self, parameter: object) -> str | None:
        named = (pair for stage in self._stages.values() for pair in stage.model.named_parameters())
        return next((name for name, each in named if each is parameter), None)
