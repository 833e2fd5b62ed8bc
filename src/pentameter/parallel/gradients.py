"""The work on gradients after the backward pass, so that each is that of the global loss.

A parameter may be whole in each process, a shard, or a copy of a tied one in another stage. Here
gradients get their parameters' placements, sums over processes that backward did not make, one
norm in which every element counts once, and are divided by the loss scale and clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import Parameter

from pentameter.planning.traffic import filled_buckets


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as_parameters(parameters: Iterable[Parameter]) -> None:
    """Give each gradient the placements of its parameter.

    DTensor leaves some gradients whole where only a part is needed (that of a vocabulary-parallel
    embedding), or partial where the sum is.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def add_up(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce each tensor over the group, in place; by buckets, a few large messages."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        sizes = [tensor.nbytes for tensor in same]
        for bucket in (same[part] for part in filled_buckets(sizes)):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0], group=group)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def is_divided(parameter: Tensor, dimension: str) -> bool:
    """Whether processes along a dimension of the mesh hold different parts of it."""
    return any(
        name == dimension and not placement.is_replicate()
        for name, placement in _placements(parameter)
    )


def lies_on(parameter: Tensor, dimension: str) -> bool:
    """Whether the parameter's own mesh has this dimension."""
    return any(name == dimension for name, _ in _placements(parameter))


def _placements(parameter: Tensor) -> list[tuple[str, Placement]]:
    if not isinstance(parameter, DTensor):
        return []
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None  # all ours have names
    return list(zip(names, parameter.placements, strict=True))


def norm_here(parameters: Iterable[Parameter]) -> Tensor:
    """The Euclidean norm of all gradients of this process together, 0-dim; a parameter without one
    counts 0."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def global_norm(parameters: Iterable[Parameter], mesh: DeviceMesh) -> Tensor:
    """The Euclidean norm of all gradients, each element counted once, 0-dim; the same everywhere.

    An element counts in the one process whose place is 0 along every dimension of `mesh` in which
    the parameter is not divided. Copies of tied parameters in other stages are left out by the
    caller. Collective over the world.
    """
    places = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    counted = [
        local(parameter.grad)
        for parameter in parameters
        if parameter.grad is not None
        and all(
            place == 0 or name == "pipeline" or is_divided(parameter, name)
            for name, place in places.items()
        )
    ]
    device = torch.device(mesh.device_type)
    square = torch.nn.utils.get_total_norm(counted).to(device, torch.float64) ** 2
    dist.all_reduce(square)
    return square.sqrt()


def unscale(parameters: Iterable[Parameter], scale: float) -> None:
    """Divide every gradient by the loss scale, in place; a scale of 1 touches nothing."""
    if scale == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(1.0 / scale)


def clip(parameters: Iterable[Parameter], norm: Tensor, limit: float) -> None:
    """Shrink all gradients together so that their norm, now `norm`, is at most `limit`.

    A limit of 0 does not clip. The norm is given, not recomputed: under a mesh only its owner
    knows how to count each element once. Parameters that lie on different meshes cannot be scaled
    by one operation, so each mesh takes its turn.
    """
    if limit <= 0:
        return
    by_mesh: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    for each in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(each, limit, norm)
