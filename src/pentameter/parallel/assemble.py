"""`assemble`: from a Plan to the Engine that a trainer drives.

The trainer asks an Engine for one thing, `forward_backward(batch, step)`, and never how many
devices, micro-batches or pipeline stages answer.
"""

from __future__ import annotations

import torch
from torch import nn

from pentameter.model.fused_dropout import drop_in_kernel
from pentameter.model.gpt import GPT
from pentameter.parallel.data_parallel import share_state, with_copies
from pentameter.parallel.engine import Engine
from pentameter.parallel.gpt_source import GPTSource, call_gpt
from pentameter.parallel.mesh import build_mesh, name_of
from pentameter.parallel.model_source import ModelSource
from pentameter.parallel.precision import set_matmul_precision
from pentameter.parallel.recomputation import recompute_activations
from pentameter.parallel.shared_parameters import give_memory, share_within
from pentameter.parallel.stage_messages import Parts
from pentameter.parallel.stage_module import StageModule, slice_module
from pentameter.planning.fused_step import fused_obstacle
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

REPLAYED_FLOPS = 2**43
"""A micro-batch of fewer operations is launched as a CUDA graph: it takes a fast GPU some 20 ms,
about as long as a host needs to launch a deep model's kernels one by one."""


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
    """This process's Engine of `plan` on `device`: the model of `source`, or the built-in GPT, with
    the initial weights that follow from the configuration's seed. With `fused_dropout` kernels drop
    attention's weights, where `choose_compute` has found that they can.

    Each slice is shaped on `meta`, cut by tensor, then by data, and only then gets memory: no
    process ever holds more of the model than its own share. Collective over the world.
    """
    world, layout, rules = world or World(), plan.layout, plan.rules
    source = source or GPTSource()
    train = plan.config.train
    set_matmul_precision(train.matmul_precision, precision)
    mesh = build_mesh(layout, device.type, world) if world.size > 1 or layout.zero else None
    numbers = layout.stages_of(layout.coordinates(world.rank)["pipeline"])
    modules = {number: slice_module(source, plan, number, device, precision) for number in numbers}
    models = [module.model for module in modules.values()]
    source.divide(models, plan, mesh, world)
    for module in modules.values():
        if fused_dropout:
            drop_in_kernel(module.model)
        if train.activation_checkpoint is not None:
            recompute_activations(
                source.recomputed_blocks(module.model),
                train.activation_checkpoint,
                draws_from_generator=source.draws_from_generator,
            )
        if mesh is not None and rules.data_sum == "fsdp":
            units = source.gathered_units(module.model)
            share_state(module, units, mesh, rules, offload=train.offload)
        give_memory(module, torch.device("cpu") if train.offload else device)
    source.initialize({number: module.model for number, module in modules.items()}, plan)
    share_within(models, plan.tied)
    if mesh is not None and layout.cuts_messages(plan.config.model.context_length):
        group = mesh["tensor"].get_group()
        parts = Parts(group.rank(), group.size(), name_of(group))
        for number, module in modules.items():
            module.cut_messages(parts, receives=number > 0, sends=number < layout.n_stages - 1)
    wrapped: dict[int, nn.Module] = {}
    for number, module in modules.items():
        if compiled:
            _compile(module, plan, source, alone=mesh is None)
        wrapped[number] = module
        if mesh is not None and rules.data_sum == "ddp":
            unused = source.may_leave_unused
            wrapped[number] = with_copies(module, mesh, may_leave_unused=unused)
    return Engine(list(modules.values()), wrapped, plan, device, world, mesh, source)


def engine_of(model: GPT, plan: Plan, device: torch.device, precision: str) -> Engine:
    """The Engine of a whole GPT that is there already, in one process."""
    module = StageModule(model, call_gpt, device, precision)
    return Engine([module], {0: module}, plan, device, World(), None, GPTSource())


def _compile(module: StageModule, plan: Plan, source: ModelSource, *, alone: bool) -> None:
    """Have a slice run by what suits its device. A GPU that is done with a micro-batch before its
    host has launched the next kernels replays them, which hooks of other ranks' sums forbid, and
    so does a module whose way may depend on values."""
    is_fused = fused_obstacle(plan.config, plan.layout, plan.built_by) is None
    if module.device.type == "cpu" and is_fused:
        module.run_fused()
        return
    n_tokens = plan.micro_batch_size * plan.config.model.context_length
    is_short = n_tokens * plan.least_flops_per_token < REPLAYED_FLOPS
    can_replay = alone and not source.may_leave_unused and module.device.type == "cuda"
    source.prepare_compiled(module.model)
    module.run_compiled(replays=can_replay and is_short)
