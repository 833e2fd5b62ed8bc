"""Data parallelism: processes that compute different rows, with whole copies or with shards.

DDP sums the gradients of whole copies while the backward pass runs; `fully_shard` (FSDP2) shares
out optimizer state, gradients and weights as ZeRO does (Rajbhandari et al. 2020). Both sum: the
loss is already divided by the global count of targets, so a mean would be one too many.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from pentameter.parallel.precision import arithmetic
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.rules import LayoutRules
from pentameter.planning.traffic import COPIES_BUCKET_BYTES

# torch 2.13 renamed the argument, and warns of the old name.
_NEW_NAME = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_NO_BROADCASTS: dict[str, Any] = {
    "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False
}


def with_copies(
    module: StageModule, mesh: DeviceMesh, *, may_leave_unused: bool
) -> DistributedDataParallel:
    """DDP around `module`: the backward pass of a step's last micro-batch sums gradients
    over the dimension `data` of `mesh`. Where the module `may_leave_unused` some parameters in a
    pass, DDP still hears of each, which it waits for."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    if may_leave_unused:
        # A search for them, `find_unused_parameters`, costs a walk over the graph, and warns.
        module.register_forward_hook(partial(_touched, parameters))
    group = mesh["data"].get_group()
    ddp = DistributedDataParallel(
        module,
        process_group=group,
        init_sync=False,  # every copy draws the same initial values
        **_NO_BROADCASTS,  # which are constants
        bucket_cap_mb=COPIES_BUCKET_BYTES / 2**20,
        gradient_as_bucket_view=True,
    )
    # A lambda, as DDP refuses a hook whose annotations are strings.
    ddp.register_comm_hook(group, lambda group, bucket: _sum(group, bucket))  # noqa: PLW0108
    return ddp


def _touched(
    parameters: Sequence[nn.Parameter], module: nn.Module, given: object, y: Tensor
) -> Tensor:
    return _EveryParameter.apply(y, *parameters) if torch.is_grad_enabled() else y


class _EveryParameter(Function):
    """Passes on its first argument, and lets the backward pass come to parameters that had no part
    in it, with no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.n_parameters = len(parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g, *(None for _ in range(ctx.n_parameters))


def _sum(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def share_state(
    module: StageModule,
    units: Sequence[tuple[nn.Module, bool]],
    mesh: DeviceMesh,
    rules: LayoutRules,
    *,
    offload: bool,
) -> None:
    """Shard the parameters of `module` over the dimension `shard` of `mesh`, in place; the replicas
    of HSDP lie along `data`.

    `units` are gathered together, in the products' dtype where products alone read them, and the
    rest (embeddings, norms, head) in its own: what autocast would round is rounded before it is
    sent, and nothing else is.
    """
    shared = mesh["data", "shard"] if rules.sums_shard_copies else mesh["shard"]
    offload_policy: OffloadPolicy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=module.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": shared,
        "reshard_after_forward": not rules.weights_stay_gathered,
        "offload_policy": offload_policy,
    }
    rounded = arithmetic(module.precision).autocast
    products = MixedPrecisionPolicy(
        param_dtype=rounded,
        reduce_dtype=None if rounded is None else torch.float32,
        cast_forward_inputs=False,
    )
    # What a unit returns may be a view, and nothing here writes into one: no word to the user.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for unit, holds_products in units:
        policy = products if holds_products else MixedPrecisionPolicy()
        fully_shard(unit, mp_policy=policy, **options)
    fully_shard(module, **options)
    modules = [unit for unit, _ in units]
    if rules.prefetches_weights:
        _prefetch(modules)
    for unit in (*modules, module):
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _prefetch(units: Sequence[nn.Module]) -> None:
    """Gather each unit's weights while the one before it computes, also in the backward pass."""
    for earlier, later in itertools.pairwise(units):
        assert isinstance(earlier, FSDPModule)
        assert isinstance(later, FSDPModule)
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])


def micro_batch(
    module: nn.Module, rules: LayoutRules, *, is_last: bool
) -> contextlib.AbstractContextManager[object]:
    """The context of a micro-batch's forward and backward pass, in which its gradients are summed
    over the data or left to be added up, as the rules say."""
    if isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(is_last)
        module.set_requires_gradient_sync(is_last or rules.reduces_each_micro_batch)
        module.set_requires_all_reduce(is_last)  # over copies of the shards
        module.set_reshard_after_backward(is_last or not rules.weights_stay_gathered)
    return contextlib.nullcontext()
