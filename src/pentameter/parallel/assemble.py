"""`assemble`: from a Plan to the Engine that a trainer drives.

The trainer asks an Engine for one thing, `forward_backward(batch, step)`, and never how many
devices, micro-batches or pipeline stages answer.
"""

from __future__ import annotations

import torch
from torch import nn

from pentameter.fused_cpu.obstacles import fused_obstacle
from pentameter.model.gpt import GPT
from pentameter.model.initial import fill
from pentameter.parallel.adapters import add_adapters
from pentameter.parallel.context_parallel import share_context
from pentameter.parallel.data_parallel import share_state, with_copies
from pentameter.parallel.engine import Engine
from pentameter.parallel.local_parts import local_part
from pentameter.parallel.mesh import build_mesh, group_along
from pentameter.parallel.precision import arithmetic, set_matmul_precision
from pentameter.parallel.stage_module import StageModule, recompute_activations
from pentameter.parallel.tensor_grid import Grid, share_grid
from pentameter.parallel.tensor_parallel import share_matrices
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
) -> Engine:
    """This process's Engine of `plan` on `device`, its weights drawn from the configuration's seed.

    Each slice is shaped on `meta`, cut by tensor, then by data, and only then gets memory: no
    process ever holds more of the model than its own share. Collective over the world.
    """
    world, layout, rules = world or World(), plan.layout, plan.rules
    set_matmul_precision(plan.config.train.matmul_precision, precision)
    mesh = build_mesh(layout, device.type, world) if world.size > 1 or layout.zero else None
    divides_time = group_along("context", layout, world) if layout.context > 1 else None
    grid = Grid.of(layout, world) if layout.tensor_mode != "1d" else None
    wrapped: dict[int, nn.Module] = {}
    stage_modules: list[StageModule] = []
    for number in layout.stages_of(layout.coordinates(world.rank)["pipeline"]):
        module = StageModule(_slice(plan, number, precision), device, precision)
        if mesh is not None and grid is not None:
            share_grid(module.model, mesh["row", "tensor"], grid)
        elif mesh is not None and layout.tensor > 1:
            share_matrices(module.model, mesh["tensor"], sequence=layout.sequence)
        if plan.config.lora.rank is not None:
            add_adapters(module.model, plan)
        if divides_time is not None:
            share_context(module.model, divides_time, layout)
        if plan.config.train.activation_checkpoint is not None:
            recompute_activations(module.model, plan.config.train.activation_checkpoint)
        if mesh is not None and rules.data_sum == "fsdp":
            share_state(module, mesh, rules, offload=plan.config.train.offload)
        module.to_empty(device="cpu" if plan.config.train.offload else device)
        _initialize(module.model, plan)
        if layout.turns_back and module.model.is_last and plan.config.model.tied_head:
            # Both ends of the V are here: one weight, whose gradients add up by themselves.
            module.model.token_embedding.weight = stage_modules[0].model.token_embedding.weight
        if compiled:
            _compile(module, plan, alone=mesh is None)
        wrapped[number] = module
        if mesh is not None and rules.data_sum == "ddp":
            wrapped[number] = with_copies(module, mesh)
        stage_modules.append(module)
    return Engine(stage_modules, wrapped, plan, device, world, mesh)


def engine_of(model: GPT, plan: Plan, device: torch.device, precision: str) -> Engine:
    """The Engine of a whole model that is there already, in one process."""
    module = StageModule(model, device, precision)
    return Engine([module], {0: module}, plan, device, World(), None)


def _slice(plan: Plan, number: int, precision: str) -> GPT:
    """The slice of the model that pipeline stage `number` runs, on `meta`."""
    layers = plan.stages[number]
    with torch.device("meta"):
        model = GPT(plan.config.model, first_layer=layers.start, last_layer=layers.stop)
        return model.to(arithmetic(precision).weights)


def _initialize(model: GPT, plan: Plan) -> None:
    """Set every parameter of a slice to what the whole model has there, in place. A rank draws the
    values of its own shards and no others."""
    specs = {spec.name: spec for spec in plan.table}
    for name, parameter in model.named_parameters():
        own, offset = local_part(parameter)
        region = tuple((start, start + size) for start, size in zip(offset, own.shape, strict=True))
        fill(specs[name], own, region, plan.config.seed)


def _compile(module: StageModule, plan: Plan, *, alone: bool) -> None:
    """Have a slice run by what suits its device. A GPU that is done with a micro-batch before its
    host has launched the next kernels replays them, which hooks of other ranks' sums forbid."""
    if module.device.type == "cpu" and fused_obstacle(plan) is None:
        module.run_fused()
        return
    n_tokens = plan.micro_batch_size * plan.config.model.context_length
    is_short = n_tokens * plan.flops_per_token < REPLAYED_FLOPS
    module.run_compiled(replays=alone and is_short and module.device.type == "cuda")
