"""One rank of a layout built on no memory: its parameters as the run would hold them, beside those
that the Plan counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

# PyTorch has no public process group that answers for ranks that are not there; this one is what
# its own tests of sharding, and torchtitan's memory estimates, use.
from torch.testing._internal.distributed.fake_pg import FakeStore

from pentameter.errors import ConfigError
from pentameter.parallel.data_parallel import share_state
from pentameter.parallel.gpt_source import GPTSource
from pentameter.parallel.local_parts import local_part
from pentameter.parallel.mesh import build_mesh
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.stage_module import slice_module
from pentameter.planning.plan import Plan
from pentameter.planning.shares import shard_elements, stage_tables
from pentameter.processes.world import World


@dataclass(frozen=True)
class TracedRank:
    """What one rank holds, by parameter."""

    rank: int
    traced: dict[str, int]
    """Bytes of each parameter in the modules that were built."""
    planned: dict[str, int]
    """Bytes of each by the Plan's layout."""

    @property
    def differing(self) -> list[str]:
        """Parameters whose bytes differ, or that only one of the two has."""
        names = self.traced.keys() | self.planned.keys()
        return sorted(name for name in names if self.traced.get(name) != self.planned.get(name))

    def __str__(self) -> str:
        traced, planned = sum(self.traced.values()), sum(self.planned.values())
        said = (
            f"rank {self.rank}: {len(self.traced)} parameters of {traced:,} bytes built, "
            f"{planned:,} planned"
        )
        if self.differing:
            return f"{said}; differing: {', '.join(self.differing[:5])}"
        return f"{said}: equal, one by one; so are their gradients, and each of AdamW's moments"


def trace_rank(plan: Plan, rank: int, precision: str) -> TracedRank:
    """Build a rank's part of the model on `meta`, in a group of the layout's full size whose other
    processes are not there, and compare its parameters with the Plan's.

    Raises ConfigError for a rank that the layout does not have, and for tensor modes of several
    dimensions.
    """
    layout = plan.layout
    if not 0 <= rank < layout.world_size:
        raise ConfigError(
            f"--dry-run-rank {rank} is not in 0 … {layout.world_size - 1} of the layout {layout}"
        )
    if layout.tensor_mode != "1d":
        raise ConfigError(
            f"--dry-run-rank builds no parallel.tensor_mode={layout.tensor_mode!r}; use 1d"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        return TracedRank(rank, _traced(plan, rank, precision), _planned(plan, rank, precision))
    finally:
        dist.destroy_process_group()


def _traced(plan: Plan, rank: int, precision: str) -> dict[str, int]:
    layout = plan.layout
    world = World(rank=rank, size=layout.world_size, timeout_seconds=600.0)
    mesh = build_mesh(layout, "cpu", world)
    source, device = GPTSource(), torch.device("cpu")
    found: dict[str, int] = {}
    for number in layout.stages_of(layout.coordinates(rank)["pipeline"]):
        module = slice_module(source, plan, number, device, precision)
        source.divide([module.model], plan, mesh, world)
        if plan.rules.data_sum == "fsdp":
            units = source.gathered_units(module.model)
            share_state(module, units, mesh, plan.rules, offload=False)
        _count(module.model, found)
    return found


def _count(model: nn.Module, found: dict[str, int]) -> None:
    """Add the bytes of a module's local parameters; a tied weight that is there counts once."""
    for name, parameter in model.named_parameters():
        own, _ = local_part(parameter)
        found.setdefault(name, own.numel() * own.element_size())


def _planned(plan: Plan, rank: int, precision: str) -> dict[str, int]:
    layout = plan.layout
    places = layout.parameter_coordinates(rank)
    n_bytes = arithmetic(precision).weights.itemsize
    tables = stage_tables(plan.config, layout, plan.stages, places["pipeline"])
    found = {}
    for _, table in tables:
        for spec in table:
            shape = layout.parameter_shape(spec.shape, spec.axes, places)
            n = shard_elements(shape, layout.shard, places["shard"])
            found[spec.name] = n * n_bytes
    return found
