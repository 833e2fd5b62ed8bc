"""Build the Engine, which a trainer drives, from a Plan (what a run obeys: sharding, batch, steps).

In each step the trainer calls `forward_backward`, then `gradient_norm` and `clip_gradients` before
the optimizer's update and `zero_gradients` after it; now and then `evaluate`. It asks the Engine
for the batch rows to load (`rows`) and for the parameters to update (`named_parameters`). It never
needs to know how many devices, micro-batches or pipeline stages are behind them.
"""

from __future__ import annotations

import torch
from torch import nn

from pentameter.model.gpt import GPT
from pentameter.model.gpu.forms import PLAIN_FORMS, GpuForms
from pentameter.parallel.data_parallel import parallelize_data
from pentameter.parallel.engine import Engine
from pentameter.parallel.linear import install_forwards
from pentameter.parallel.mesh import Mesh, build_mesh
from pentameter.parallel.precision import arithmetic, set_matmul_precision
from pentameter.parallel.sources.gpt_source import GPTSource, gpt_slice
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.parallel.sources.tied_parameters import TiedReplicas, tie
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World

BUILT_IN = GPTSource()


def assemble(
    plan: Plan,
    device: torch.device,
    precision: str,
    *,
    compiled: bool,
    world: World | None = None,
    source: ModelSource = BUILT_IN,
    forms: GpuForms = PLAIN_FORMS,
) -> Engine:
    """Build this rank's Engine for `plan` on `device`, with the initial weights that follow from
    the configuration's seed. Collective over the world.

    precision: a resolved `train.precision`, not `auto`.
    compiled: False trains eagerly. True trains on a CPU by the hand-fused operations of
        `fused_cpu/` if they support the plan, and otherwise by `torch.compile`.
    world: this process's rank and the world's size; None for a single process.
    source: builds the model; by default the built-in GPT.
    forms: which operations use faster kernels; pass only what `choose_compute` found to work.

    Each pipeline stage is built on `meta`, sharded by tensor parallelism, then by data parallelism,
    and only then gets memory: no rank ever holds more than its own shard.
    """
    world = world or World()
    set_matmul_precision(plan.config.train.matmul_precision, precision)
    mesh = build_mesh(plan.layout, device.type, world)
    train = plan.config.train
    computes_in = arithmetic(precision, forms, train.matmuls, train.stream)
    n_stages = plan.layout.n_stages
    shards_messages = plan.sharding.shards_messages(plan.config.model.context_length)
    modules: dict[int, StageModule] = {}
    wrapped: dict[int, nn.Module] = {}
    for number in plan.layout.stages_of(mesh.coordinates["pipeline"]):
        model_slice = source.stage(plan, number, mesh, computes_in)
        offset = number if source.draws_from_generator else None
        module = StageModule(model_slice, device, computes_in, generator_offset=offset)
        if shards_messages:
            module.shard_messages(mesh, receives=number > 0, sends=number < n_stages - 1)
        if compiled:
            alone = mesh.parameters is None
            module.speed_up(plan, replays=alone and not source.may_leave_unused)
        wrapped[number] = parallelize_data(module, source, mesh, plan)
        modules[number] = module
    models = {number: module.model for number, module in modules.items()}
    tied = tie(list(models.values()), plan.tied, mesh)
    source.initialize(models, plan)
    return Engine(list(modules.values()), wrapped, tied, plan, device, mesh, source)


def engine_of(model: GPT, plan: Plan, device: torch.device, precision: str) -> Engine:
    """Return an Engine that runs an existing, full GPT on `device` in one process, eagerly and
    without a mesh.

    The model keeps its weights; its modules' `forward` methods are replaced if `precision`, a
    resolved `train.precision` and not `auto`, needs it. `plan` gives batch sizes and steps.
    """
    how = arithmetic(precision)
    install_forwards(model, how.matmul, {})
    module = StageModule(gpt_slice(model), device, how)
    mesh = Mesh(plan.layout, World())
    return Engine([module], {0: module}, TiedReplicas(), plan, device, mesh, BUILT_IN)
