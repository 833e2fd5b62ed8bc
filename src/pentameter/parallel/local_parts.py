"""The local shard of a tensor as a region of the whole one: all of a plain tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_distributed(tensor: torch.Tensor) -> bool:
    """True for a DTensor, told without importing what defines them: that takes a second."""
    return hasattr(tensor, "placements")


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The local shard of a tensor, sharing its memory, and its offset in the whole tensor.

    Raises ValueError for a DTensor whose part here is not one region that can be told from its
    placements. Torch's own computation of the region is not used: it is wrong where `fully_shard`
    divides unevenly what tensor parallelism already divided unevenly on the same dimension (65
    rows over tensor 2, then over 4: torch 2.13 says rows 27–34 where 27–33 are).
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
    """Offset and sizes of this process's region: each cut is as `torch.chunk` makes it."""
    coordinate = mesh.get_coordinate()
    cuts = []
    for index, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"a tensor placed {placements} is a sum still to be made")
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(f"a tensor placed {placements} is cut in a way that is not known here")
        # Strided: FSDP's cut of what tensor parallelism, further right in the mesh, cut first.
        strided = kind == "_StridedShard" and placement.split_factor > 1
        cuts.append((strided, -index if strided else index, index, placement.dim % len(shape)))
    offset, sizes = [0] * len(shape), list(shape)
    for _, _, index, dim in sorted(cuts):
        step = -(-sizes[dim] // mesh.size(index))
        start = min(sizes[dim], step * coordinate[index])
        offset[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return tuple(offset), tuple(sizes)


def copy_part(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into the local shard of `target` the same region of a whole tensor.

    Where `source` ends earlier than `target`, the rest of `target` stays as it is.
    """
    local, region = common_part(target, tuple(source.shape))
    local.copy_(source[region])


def common_part(
    target: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What the local shard of `target` has in common with a whole tensor of another size: that part
    of the shard, sharing its memory, and where it lies in the whole tensor. Either may be empty."""
    local, offset = local_part(target)
    counts = [
        max(0, min(size, there - start))
        for size, start, there in zip(local.shape, offset, shape, strict=True)
    ]
    here = tuple(slice(count) for count in counts)
    there = tuple(slice(start, start + count) for start, count in zip(offset, counts, strict=True))
    return local[here], there
