"""Gradients after the backward pass: reduce, measure, unscale, clip and zero them.

A parameter may be replicated, a shard, or a copy of a tied parameter in another stage. This module
redistributes gradients to their parameters' placements, all-reduces those that backward did not,
computes one norm that counts every element once, divides by the loss scale, and clips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import Parameter

from pentameter.planning.buckets import filled_buckets
from pentameter.planning.layouts.layout import EXPERT_DIMENSIONS, PARAMETER_DIMENSIONS
from pentameter.planning.plan import Plan


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; a plain tensor, of any shape, is returned itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as_parameters(parameters: Iterable[Parameter]) -> None:
    """Redistribute each DTensor gradient to its parameter's placements; plain tensors stay.
    Collective.

    DTensor leaves some gradients Replicate although the parameter is sharded (a vocabulary-parallel
    embedding), or Partial although the sum is needed.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def add_up(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce each tensor (any shape) over the group, in place, in buckets with one dtype and up
    to 64 MiB, or one larger tensor. Collective: ranks pass the same shapes in the same order."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        sizes = [tensor.nbytes for tensor in same]
        for bucket in (same[indices] for indices in filled_buckets(sizes)):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0], group=group)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            reduced = flat.split([tensor.numel() for tensor in bucket])
            for tensor, chunk in zip(bucket, reduced, strict=True):
                tensor.copy_(chunk.view(tensor.shape))


def add_up_all(parameters: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce these parameters' gradients over the group, in place; a parameter without one is
    skipped. Collective."""
    add_up([local(each.grad) for each in parameters if each.grad is not None], group)


def replicas_to_sum(
    named: Sequence[tuple[str, Parameter]],
    plan: Plan,
    along: Callable[[str], DeviceMesh],
    *,
    by_dtensor: bool,
) -> list[tuple[dist.ProcessGroup, list[Parameter]]]:
    """Return what must be all-reduced after the backward pass, as pairs (this rank's process group
    along a mesh dimension, the parameters whose gradients are summed over it), by the placements in
    `plan`.

    named: this rank's (name, parameter) pairs.
    along: maps a mesh dimension to the DeviceMesh with its group.
    by_dtensor: True if modules compute with DTensors, whose backward pass already sums along the
        parameter's own mesh; such parameters are left out.
    """
    dimensions = dict.fromkeys((*PARAMETER_DIMENSIONS, *EXPERT_DIMENSIONS))
    found = {
        dimension: [
            parameter
            for name, parameter in named
            if dimension in plan.placements[name].summed_over
            and not (by_dtensor and lies_on(parameter, dimension))
        ]
        for dimension in reversed(dimensions)  # neighbouring ranks first
    }
    return [
        (along(dimension).get_group(), replicas)
        for dimension, replicas in found.items()
        if replicas
    ]


def is_sharded(parameter: Tensor, dimension: str) -> bool:
    """Return whether ranks along a mesh dimension hold different shards of the parameter; False for
    a plain tensor."""
    return any(
        name == dimension and not placement.is_replicate()
        for name, placement in _placements(parameter)
    )


def lies_on(parameter: Tensor, dimension: str) -> bool:
    """Return whether the parameter is a DTensor whose mesh has this dimension."""
    return any(name == dimension for name, _ in _placements(parameter))


def _placements(parameter: Tensor) -> list[tuple[str, Placement]]:
    """Return (mesh dimension, placement) pairs for a DTensor; none for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return []
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None  # every mesh here has dimension names
    return list(zip(names, parameter.placements, strict=True))


def norm_here(parameters: Iterable[Parameter]) -> Tensor:
    """Return the Euclidean norm, 0-dim, of the gradients that this rank holds for these parameters,
    without communication. A parameter without a gradient counts as 0."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def global_norm(parameters: Iterable[Parameter], *meshes: DeviceMesh) -> Tensor:
    """Compute the Euclidean norm over all gradients, each element counted once, 0-dim; the same on
    every rank.

    `parameters` are this rank's. `meshes` factorize the same ranks; a parameter lies on the first
    one that has all its dimensions. An element is counted on the one rank whose coordinate is 0
    along every dimension of that mesh, except `pipeline`, that does not shard the parameter. The
    caller leaves out replicas of tied parameters in other stages. Collective over the world.
    """
    counted = [
        local(parameter.grad)
        for parameter in parameters
        if parameter.grad is not None and _counts_here(parameter, meshes)
    ]
    device = torch.device(meshes[0].device_type)
    if counted:
        square = torch.nn.utils.get_total_norm(counted).to(device, torch.float64) ** 2
    else:  # PyTorch's norm of nothing lies on the host, which would wait while it is copied
        square = torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(square)
    return square.sqrt()


def _counts_here(parameter: Parameter, meshes: Sequence[DeviceMesh]) -> bool:
    """Return whether the norm counts this rank's shard of the parameter: of its replicas, one
    counts."""
    own = {name for name, _ in _placements(parameter)}
    mesh = next(each for each in meshes if own <= set(each.mesh_dim_names or ()))
    coordinates = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    return all(
        coordinate == 0 or name == "pipeline" or is_sharded(parameter, name)
        for name, coordinate in coordinates
    )


def unscale(parameters: Iterable[Parameter], scale: float) -> None:
    """Divide every gradient by the loss scale, in place; a scale of 1 touches nothing."""
    if scale == 1.0:
        return
    for same in _by_mesh(parameters):
        torch._foreach_mul_([each.grad for each in same if each.grad is not None], 1.0 / scale)


def clip(parameters: Iterable[Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by one factor, in place, so that their norm, now `norm` (0-dim), is at
    most `limit`.

    A limit of 0 does not clip. The norm is passed in, not recomputed: under a mesh only the engine
    knows how to count each element once.
    """
    if limit <= 0:
        return
    for same in _by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(same, limit, norm)


def _by_mesh(parameters: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Return the parameters that have a gradient in lists, one for each mesh on which they lie:
    one operation cannot scale those of several."""
    by_mesh: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return by_mesh.values()


def zero(parameters: Sequence[Parameter], *, in_place: bool) -> None:
    """Set every gradient to None, or fill it with zeros if `in_place`."""
    held = [each.grad for each in parameters if each.grad is not None]
    if in_place and held:
        torch._foreach_zero_(held)
        return
    for parameter in parameters:
        parameter.grad = None
