"""Data parallelism: ranks that compute different batch rows, with full replicas or with shards.

DDP all-reduces the gradients of full replicas during the backward pass. `fully_shard` (FSDP2)
shards optimizer state, gradients and weights, as ZeRO does (Rajbhandari et al. 2020).

Both are made to sum gradients, where PyTorch's default is the mean over ranks: the loss is already
divided by the global target count, so a mean would divide twice. For DDP the sum is made by its
communication hook, `BucketSums`; for FSDP by `set_gradient_divide_factor(1.0)` in `shard_state`.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from pentameter.parallel.mesh import Mesh
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.parallel.stage_module import StageModule
from pentameter.parallel.waits import BucketSums
from pentameter.planning.buckets import COPIES_BUCKET_BYTES
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import Placement
from pentameter.planning.plan import Plan
from pentameter.planning.rules import LayoutRules

# torch 2.13 renamed the argument, and warns of the old name.
_NEW_NAME = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_NO_BROADCASTS: dict[str, Any] = {
    "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False
}


def parallelize_data(module: StageModule, source: ModelSource, mesh: Mesh, plan: Plan) -> nn.Module:
    """Prepare a pipeline stage for data parallelism, and return the module to run it by.

    The parameters of `module` are sharded by FSDP if their placements in the plan say so, then
    allocated, uninitialized (on the host with `train.offload`). Returns `module` itself, or DDP
    around it if the placements name mesh dimensions for DDP; DDP then all-reduces gradients during
    the last micro-batch's backward pass. Collective over the world.

    If `source.may_leave_unused`, a forward hook connects every parameter to the output, because DDP
    waits for a gradient from each.
    """
    offload = plan.config.train.offload
    over: tuple[str, ...] = ()
    if mesh.parameters is not None:
        (over,) = set(_dimensions(module, plan, attrgetter("ddp_over")).values())
        shard_state(module, mesh, plan, offload=offload)
    module.allocate(torch.device("cpu") if offload else module.device)
    if mesh.parameters is None or not over:
        return module
    parameters = [each for each in module.parameters() if each.requires_grad]
    if source.may_leave_unused:
        # The alternative, `find_unused_parameters`, walks the graph in each pass, and warns.
        module.register_forward_hook(partial(_touched, parameters))
    sums = module.bucket_sums = BucketSums(mesh.parameters[over].get_group())
    ddp = DistributedDataParallel(
        module,
        process_group=sums.group,
        init_sync=False,  # every copy draws the same initial values, afterwards
        **_NO_BROADCASTS,  # buffers are constants
        bucket_cap_mb=COPIES_BUCKET_BYTES / 2**20,
        gradient_as_bucket_view=True,
    )
    # A lambda, as DDP refuses a hook whose annotations are strings.
    ddp.register_comm_hook(sums, lambda sums, bucket: sums.start(bucket))
    return ddp


def _dimensions(
    module: StageModule, plan: Plan, field: Callable[[Placement], tuple[str, ...]]
) -> dict[nn.Parameter, tuple[str, ...]]:
    """Map each parameter of `module` to a tuple of mesh dimensions: the one that `field` returns
    for the parameter's Placement in the plan."""
    return {each: field(plan.placements[name]) for name, each in module.model.named_parameters()}


def _touched(
    parameters: Sequence[nn.Parameter], module: nn.Module, inputs: object, y: Tensor
) -> Tensor:
    """Forward hook that connects a module's output y (any shape) to every one of `parameters` in
    the autograd graph, so that the backward pass reaches each. Returns the connected y; y itself
    where gradients are off."""
    return _EveryParameter.apply(y, *parameters) if torch.is_grad_enabled() else y


class _EveryParameter(Function):
    """Autograd function: identity on its first argument. All further arguments are parameters,
    which the backward pass then reaches even if they took no part in the loss; their gradient is
    None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        """Return a view with the shape and values of y; `parameters` only enter the graph."""
        ctx.n_parameters = len(parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient g for y unchanged, and None for each parameter."""
        return g, *(None for _ in range(ctx.n_parameters))


def shard_state(module: StageModule, mesh: Mesh, plan: Plan, *, offload: bool) -> None:
    """Shard the parameters of `module` by FSDP, in place, over the mesh dimensions that their
    placements in the plan name; with `offload`, the shards are kept on the host. Do nothing without
    ZeRO.

    Each of the slice's units (`ModelSlice.units`) is all-gathered in one collective. A unit that
    only matmuls read is rounded to the matmul dtype before it is sent, since autocast would round
    it anyway; everything else (embeddings, norms, head) is gathered in its own dtype. All
    parameters of a unit, except those of units inside it, must have the same mesh dimensions.
    """
    over = _dimensions(module, plan, attrgetter("fsdp_over"))
    rules, dimensions = plan.rules, [each for each in over.values() if each]
    if not dimensions:
        return

    def shard(unit: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Shard the parameters of `unit` by FSDP, except those that it has sharded already;
        `policy` gives the dtypes in which weights are gathered and gradients reduced."""
        (along,) = {over[each] for each in unit.parameters() if each in over} or dimensions[:1]
        fully_shard(unit, mesh=mesh.along(*along), mp_policy=policy, **options)

    specs = {spec.name: spec for spec in plan.table}
    shard_of = {  # FSDP's own choice is the first dimension
        each: Shard(index)
        for name, each in module.model.named_parameters()
        if (index := plan.sharding.zero_index(specs[name]))
    }
    offload_policy: OffloadPolicy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=module.device.type == "cuda")
    options: dict[str, Any] = {
        "reshard_after_forward": not rules.weights_stay_gathered,
        "offload_policy": offload_policy,
        "shard_placement_fn": shard_of.get,
    }
    rounded = module.arithmetic.autocast_dtype
    matmul_policy = MixedPrecisionPolicy(
        param_dtype=rounded,
        reduce_dtype=None if rounded is None else torch.float32,
        cast_forward_inputs=False,
    )
    # FSDP warns if a unit returns a view. No code here writes into one: users need no warning.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for unit, feeds_matmuls_only in module.units:
        shard(unit, matmul_policy if feeds_matmuls_only else MixedPrecisionPolicy())
    shard(module, MixedPrecisionPolicy())
    modules = [unit for unit, _ in module.units]
    if rules.prefetches_weights:
        _prefetch(modules)
    for unit in (*modules, module):
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no average


def _prefetch(units: Sequence[nn.Module]) -> None:
    """All-gather each unit's weights while the previous unit computes, in the backward pass too."""
    for earlier, later in itertools.pairwise(units):
        assert isinstance(earlier, FSDPModule)
        assert isinstance(later, FSDPModule)
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])


def micro_batch(
    module: nn.Module, rules: LayoutRules, *, is_last: bool
) -> contextlib.AbstractContextManager[object]:
    """Return the context manager in which one micro-batch runs forward and backward through
    `module`: the stage module, or DDP around it. The step's last micro-batch (`is_last`) reduces
    gradients over the data-parallel ranks; earlier ones accumulate them locally. But FSDP reduces
    each to its shards if `rules.reduces_each_micro_batch` (ZeRO 2 or 3 without a pipeline)."""
    if isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(is_last)
        module.set_requires_gradient_sync(is_last or rules.reduces_each_micro_batch)
        module.set_requires_all_reduce(is_last)  # over the shards' replicas
        module.set_reshard_after_backward(is_last or not rules.weights_stay_gathered)
    return contextlib.nullcontext()


def reshard(modules: Iterable[nn.Module], layout: Layout) -> None:
    """Free the full weights that FSDP has all-gathered in these modules, so that each rank again
    holds only its shards, as after a backward pass. Does nothing without ZeRO."""
    for module in modules if layout.zero else ():
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
