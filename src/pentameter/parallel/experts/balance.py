"""Expert loads and balancing: routers count tokens per expert during a step, and their state is
updated after it.

Counts cover the whole step's batch, summed over every rank whose tokens differ, so that loads and
state are the same on every layout. A skipped step leaves the state as it is.

Shapes: E experts, L layers with experts in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from pentameter.config.choices import refuse_unknown
from pentameter.model.experts import Experts, Router
from pentameter.parallel.mesh import Mesh
from pentameter.planning.layouts.layout import BATCH_DIMENSIONS
from pentameter.planning.plan import Plan

N_SUMS = 3
"""Columns of `ExpertLoads.total` after those of the E experts: two sums over logits, and bytes."""


def count_whole_sequences(model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Have each router in `model` count tokens of whole sequences where ranks hold parts of them:
    set its `count_sequence`, in place, to a function that all-reduces the counts over `groups`, one
    group after another. These groups' ranks hold parts of the same sequences. With no groups,
    nothing is set."""

    def summed(counts: Tensor) -> Tensor:
        """All-reduce this rank's token counts per sequence and expert (B, E), in place, over every
        group in turn, and return them."""
        for group in groups:
            dist.all_reduce(counts, group=group)
        return counts

    for module in model.modules() if groups else ():
        if isinstance(module, Router):
            module.count_sequence = summed


class ExpertLoads:
    """Record of a step's routing: the number of tokens that chose each expert, sums over their
    logits, and the bytes exchanged. `models` are this rank's slices, whose routers count during the
    backward pass. Call `start_step` before a step; `total` after it all-reduces what the ranks have
    counted."""

    def __init__(
        self, models: Sequence[nn.Module], plan: Plan, mesh: Mesh, device: torch.device
    ) -> None:
        layer_of = {spec.name: spec.layer for spec in plan.table if "router" in spec.axes}
        self.layers = tuple(sorted({layer for layer in layer_of.values() if layer is not None}))
        """Numbers of the L layers with experts, the same on every rank."""
        self._experts = {
            self.layers.index(layer): module
            for model in models
            for name, module in model.named_modules()
            if isinstance(module, Experts)
            and (layer := layer_of.get(f"{name}.router.weight")) is not None
        }
        different = {"pipeline", *BATCH_DIMENSIONS, *plan.sharding.sharded_axes.get("time", ())}
        coordinates = mesh.coordinates.items()
        # Ranks along any other dimension route the same tokens, of which one rank's count.
        self._counts_here = not any(at for name, at in coordinates if name not in different)
        self._shape = (len(self.layers), (plan.config.model.experts.count or 0) + N_SUMS)
        self._world_size, self._device = mesh.world.size, device

    def start_step(self) -> None:
        """Zero what every layer has counted."""
        for experts in self._experts.values():
            experts.router.start_step()
            experts.exchange.sent_bytes = 0

    @torch.no_grad()
    def total(self) -> Tensor | None:
        """Return the step's totals over all ranks, on the device (L, E + N_SUMS); None for a model
        without experts. Collective.

        Column e < E: how many tokens chose expert e, before any is left out for want of capacity.
        Then, summed over tokens, the squared log-sum-exp of the router's logits, and the squared
        logits. These are the same on every layout. Last, the bytes of rows, outputs and gradients
        that ranks sent one another. A layer has zeros throughout if its router had no backward
        pass, as below the first adapter (LoRA).
        """
        if not self.layers:
            return None
        dtype = torch.float64 if self._world_size > 1 else torch.float32
        loads = torch.zeros(self._shape, dtype=dtype, device=self._device)
        for row, experts in self._experts.items():
            router = experts.router
            if self._counts_here:
                loads[row, :-1] = torch.cat((router.counts, router.logit_sums))
            loads[row, -1] = experts.exchange.sent_bytes
        if self._world_size > 1:
            dist.all_reduce(loads)
        return loads


class RouterBalance:
    """Updates the balance state (E,) of each router in `models`, this rank's slices, after a step.
    Routers without such a state are left alone; with adapters (LoRA) all are. `plan` has the
    configuration and each parameter's placement; `mesh` is the parameters' DeviceMesh, None in a
    single process."""

    def __init__(self, models: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh | None) -> None:
        found = {
            f"{name}.balance": module
            for model in models
            for name, module in model.named_modules()
            if isinstance(module, Router) and module.balance is not None
        }
        # Adapters leave the model as it is, and its routing with it.
        self._routers: Mapping[str, Router] = {} if plan.config.lora.rank is not None else found
        self._plan = plan
        self._mesh = mesh

    @torch.no_grad()
    def move(self, not_made: Tensor | None = None) -> None:
        """Update the balance state of every router after a step, by the numbers of tokens that
        chose each expert, all-reduced over the ranks that route different tokens. Collective.
        `not_made` is 1 on the device, float32 (), if the optimizer step was skipped: the state then
        stays as it is. None means that the step was made."""
        if not self._routers:
            return
        counts = torch.stack([router.counts for router in self._routers.values()])
        for dimension in self._summed_over():
            assert self._mesh is not None
            dist.all_reduce(counts, group=self._mesh[dimension].get_group())
        for router, own in zip(self._routers.values(), counts, strict=True):
            assert router.balance is not None
            change = self._change(own, router.balance)
            if not_made is not None:
                change = torch.where(not_made.bool().to(change.device), 0, change)
            router.balance.add_(change)

    def _change(self, counts: Tensor, balance: Tensor) -> Tensor:
        """Return what to add to a router's `balance` (E,), in its shape and DTensor placements,
        on its device, given the step's token counts (E,) over all ranks. Mode `bias`: plus
        `balance_rate` for an expert with fewer tokens than the mean, minus it for one with more.
        Mode `batch`: counts ÷ their mean, minus the present state, which this replaces."""
        model = self._plan.config.model
        change = counts.mean() - counts
        match model.router.balance:
            case "bias":
                target = change.sign() * model.router.balance_rate
            case "batch":
                target = counts / counts.mean()
            case "none" | "sequence":
                raise AssertionError("has no state")
            case unknown:
                refuse_unknown(unknown, "model.router.balance", "the engine")
        placed: Tensor = target.to(balance.dtype)
        if isinstance(balance, DTensor):
            mesh, placements = balance.device_mesh, balance.placements
            placed = distribute_tensor(placed, mesh, placements, src_data_rank=None)
        placed = placed.to(balance.device)  # the host, if the state is offloaded
        return placed if model.router.balance == "bias" else placed - balance

    def _summed_over(self) -> tuple[str, ...]:
        """Mesh dimensions whose ranks route different tokens, over which counts are summed."""
        placement = self._plan.placements[next(iter(self._routers))]
        return (*placement.summed_over, *placement.fsdp_over, *placement.ddp_over)
