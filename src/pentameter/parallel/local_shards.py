"""The region in the full tensor that a rank's local shard covers; a plain tensor is its own
shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, without importing the module that defines them, which takes a
    second."""
    return hasattr(tensor, "placements")


def sharding_dimensions(tensor: torch.Tensor) -> frozenset[str]:
    """Return the names of the mesh dimensions that shard a DTensor; none for a plain tensor.

    Raises ValueError for a mesh without names.
    """
    if not is_distributed(tensor):
        return frozenset()
    distributed: Any = tensor
    names = distributed.device_mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"the mesh of a tensor placed {distributed.placements} has no names")
    return frozenset(
        name
        for name, placement in zip(names, distributed.placements, strict=True)
        if not placement.is_replicate()
    )


def local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return (shard, offset): a tensor's local shard, which uses the tensor's memory, and the
    shard's first index along each dimension in the full tensor; a plain tensor and zeros.

    Raises ValueError for a DTensor whose local shard is not one region that its placements
    determine. Torch's own computation is not used, because it is wrong when `fully_shard` unevenly
    shards a dimension that tensor parallelism has already sharded unevenly (65 rows over tensor 2,
    then over 4: torch 2.13 says rows 27–34, but the rank has 27–33).
    """
    tensor = tensor.detach()
    if not is_distributed(tensor):
        return tensor, (0,) * tensor.ndim
    distributed: Any = tensor
    local: torch.Tensor = distributed.to_local()
    offset, sizes = _region(tuple(tensor.shape), distributed.device_mesh, distributed.placements)
    if tuple(local.shape) != sizes:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, placed {distributed.placements}, has "
            f"{tuple(local.shape)} in this process, not {sizes}: it was not cut in equal steps"
        )
    return local, offset


def _region(
    shape: tuple[int, ...], mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, sizes), one number for each dimension, of this rank's shard of a tensor whose
    full shape is `shape`. `mesh` and `placements` are those of a DTensor; each placement that
    shards splits as `torch.chunk` does. Raises ValueError for a Partial placement or an unknown
    one."""
    coordinate = mesh.get_coordinate()
    splits = []
    for index, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"a tensor placed {placements} is a sum still to be made")
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(f"a tensor placed {placements} is cut in a way that is not known here")
        # Strided: sharded by FSDP after tensor parallelism, which is further right in the mesh.
        strided = kind == "_StridedShard" and placement.split_factor > 1
        splits.append((strided, -index if strided else index, index, placement.dim % len(shape)))
    offset, sizes = [0] * len(shape), list(shape)
    for _, _, index, dim in sorted(splits):
        step = -(-sizes[dim] // mesh.size(index))
        start = min(sizes[dim], step * coordinate[index])
        offset[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return tuple(offset), tuple(sizes)


def copy_shard(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's region of `target`, a DTensor or plain tensor, out of a full tensor
    `source`, in place.

    If `source` ends earlier than `target`, the rest of `target` keeps its values.
    """
    local, region = common_region(target, tuple(source.shape))
    local.copy_(source[region])


def common_region(
    target: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return (view, slices) for the overlap between `target`'s local shard and a full tensor with
    another `shape`: a view into the shard, and slices into the full tensor. Both may be empty."""
    local, offset = local_shard(target)
    counts = [
        max(0, min(size, end - start))
        for size, start, end in zip(local.shape, offset, shape, strict=True)
    ]
    in_shard = tuple(slice(count) for count in counts)
    in_full = tuple(
        slice(start, start + count) for start, count in zip(offset, counts, strict=True)
    )
    return local[in_shard], in_full
