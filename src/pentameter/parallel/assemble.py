"""`assemble`: from a Plan to the Engine that a trainer drives.

The trainer calls one method, `forward_backward(batch, step)`. It never needs to know how many
devices, micro-batches or pipeline stages are behind it.
"""

from __future__ import annotations

import torch
from torch import nn

from pentameter.model.fused_dropout import drop_in_kernel
from pentameter.model.gpt import GPT
from pentameter.parallel.data_parallel import shard_state, with_copies
from pentameter.parallel.engine import Engine
from pentameter.parallel.memory.recomputation import recompute_activations
from pentameter.parallel.mesh import build_mesh, name_of
from pentameter.parallel.precision import arithmetic, set_matmul_precision
from pentameter.parallel.sources.gpt_source import GPTSource, call_gpt, call_gpt_by_row
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.parallel.sources.tied_parameters import give_memory, tie_within
from pentameter.parallel.stage_messages import MessageShards
from pentameter.parallel.stage_module import StageModule, compile_module, slice_module
from pentameter.planning.plan import Plan
from pentameter.processes.world import World


def assemble(
    plan: Plan,
    device: torch.device,
    precision: str,
    *,
    compiled: bool,
    world: World | None = None,
    source: ModelSource | None = None,
    fused_dropout: bool = False,
) -> Engine:
    """Build this rank's Engine for `plan` on `device`: the model from `source`, or the built-in
    GPT, with the initial weights that follow from the configuration's seed. With `fused_dropout`,
    kernels apply attention dropout; pass it only if `choose_compute` has found that they can.

    Each slice is built on `meta`, sharded by tensor parallelism, then by data parallelism, and only
    then gets memory: no rank ever holds more than its own shard. Collective over the world.
    """
    world, layout = world or World(), plan.layout
    source = source or GPTSource()
    train = plan.config.train
    set_matmul_precision(train.matmul_precision, precision)
    mesh = build_mesh(layout, device.type, world) if world.size > 1 or layout.zero else None
    numbers = layout.stages_of(layout.coordinates(world.rank)["pipeline"])
    computes_in = arithmetic(precision)
    modules = {each: slice_module(source, plan, each, device, computes_in) for each in numbers}
    models = [module.model for module in modules.values()]
    source.divide(models, plan, computes_in, mesh, world)
    for module in modules.values():
        if fused_dropout:
            drop_in_kernel(module.model)
        if train.activation_checkpoint is not None:
            recompute_activations(
                source.recomputed_blocks(module.model),
                train.activation_checkpoint,
                draws_from_generator=source.draws_from_generator,
            )
        if mesh is not None:
            shard_state(module, source, mesh, plan, offload=train.offload)
        give_memory(module, torch.device("cpu") if train.offload else device)
    tie_within(models, plan.tied)
    source.initialize({number: module.model for number, module in modules.items()}, plan)
    if mesh is not None and plan.sharding.shards_messages(plan.config.model.context_length):
        group = mesh["tensor"].get_group()
        parts = MessageShards(group.rank(), group.size(), name_of(group))
        for number, module in modules.items():
            module.shard_messages(parts, receives=number > 0, sends=number < layout.n_stages - 1)
    wrapped: dict[int, nn.Module] = {}
    for number, module in modules.items():
        if compiled:
            compile_module(module, source, plan, alone=mesh is None)
        wrapped[number] = module if mesh is None else with_copies(module, source, mesh, plan)
    return Engine(list(modules.values()), wrapped, plan, device, world, mesh, source)


def engine_of(model: GPT, plan: Plan, device: torch.device, precision: str) -> Engine:
    """Return an Engine for a full GPT that exists already, on one rank without a mesh."""
    module = StageModule(model, call_gpt, call_gpt_by_row, device, arithmetic(precision))
    return Engine([module], {0: module}, plan, device, World(), None, GPTSource())
