"""Which process writes which region of a checkpoint's tensors, and into which file.

A tensor that several processes hold (a copy under data parallelism) is written by one of them.
Every process sees what all hold and comes to the same plan, so nobody has to hand it out. One
process writes everything, by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pentameter.checkpoint.safetensors_writer import (
    LazyTensor,
    Piece,
    TensorFile,
    piece_key,
    plan_file,
)
from pentameter.parallel.local_parts import local_part
from pentameter.processes.world import World

if TYPE_CHECKING:
    import torch

Groups = Mapping[str, Mapping[str, "torch.Tensor | LazyTensor"]]
"""Group (`model`, `optimizer`) → name → tensor, whole or a DTensor."""


@dataclass(frozen=True)
class Region:
    """A region of a tensor that a process holds."""

    group: str
    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    """Where in the whole tensor it begins."""
    sizes: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


def files_to_write(groups: Groups, world: World) -> dict[str, tuple[str, TensorFile]]:
    """Group → name and content of the file that this process writes of it, where it writes any.

    Collective: each process passes the same groups with the tensors it has. Raises ValueError
    where the processes do not hold all of a tensor between them, TypeError for a tensor that
    cannot be saved; what one process raises, all raise.
    """
    held = world.agreed(lambda: _held(groups))
    writer_of = _writers(world.collect(list(held)))
    names = {group: _file_name(group, world.rank, writer_of) for group in groups}
    return world.agreed(
        lambda: {
            group: (name, _plan_regions(group, held, writer_of, world.rank))
            for group, name in names.items()
            if name is not None
        }
    )


def _held(groups: Groups) -> dict[Region, torch.Tensor | LazyTensor]:
    """The regions in this process, and their elements."""
    held: dict[Region, torch.Tensor | LazyTensor] = {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            local, offset = tensor, (0,) * len(shape)
            if not isinstance(tensor, LazyTensor):
                local, offset = local_part(tensor)
            sizes = tuple(local.shape)
            if math.prod(shape) and not math.prod(sizes):
                continue  # an uneven division leaves the last processes with nothing
            held[Region(group, name, shape, tensor.dtype, offset, sizes)] = local
    return held


def _writers(held_by_rank: Sequence[Sequence[Region]]) -> dict[Region, int]:
    """Region → the rank that writes it: of those that hold it, the one with the least so far.

    Raises ValueError for a tensor whose regions, all together, are not all of it.
    """
    ranks_of: dict[Region, list[int]] = {}
    for rank, regions in enumerate(held_by_rank):
        for region in regions:
            ranks_of.setdefault(region, []).append(rank)
    n_elements: dict[tuple[str, str, tuple[int, ...], torch.dtype], int] = {}
    for region in ranks_of:
        tensor = (region.group, region.name, region.shape, region.dtype)
        n_elements[tensor] = n_elements.get(tensor, 0) + math.prod(region.sizes)
    for (_, name, shape, dtype), n_found in n_elements.items():
        if n_found != math.prod(shape):
            raise ValueError(
                f"{name!r} cannot be saved: the processes hold {n_found:,} of the "
                f"{math.prod(shape):,} elements of its shape {shape}, {dtype}"
            )
    n_bytes = [0] * len(held_by_rank)
    writer_of = {}
    for region, ranks in ranks_of.items():
        writer_of[region] = writer = min(ranks, key=n_bytes.__getitem__)
        n_bytes[writer] += region.n_bytes
    return writer_of


def _file_name(group: str, rank: int, writer_of: Mapping[Region, int]) -> str | None:
    """The rank's file of a group: `model.safetensors`, or `model-00001-of-00004.safetensors`.

    None where it writes none; a group without tensors is a file of the main process.
    """
    writers = {writer for region, writer in writer_of.items() if region.group == group} or {0}
    if rank not in writers:
        return None
    number = sorted(writers).index(rank)
    part = f"-{number:05d}-of-{len(writers):05d}" if len(writers) > 1 else ""
    return f"{group}{part}.safetensors"


def _plan_regions(
    group: str,
    held: Mapping[Region, torch.Tensor | LazyTensor],
    writer_of: Mapping[Region, int],
    rank: int,
) -> TensorFile:
    """The rank's file of a group; a tensor that is whole goes by its own name."""
    tensors: dict[str, torch.Tensor | LazyTensor] = {}
    pieces: dict[str, Piece] = {}
    for region, tensor in held.items():
        if region.group != group or writer_of[region] != rank:
            continue
        key = region.name
        if region.sizes != region.shape:
            piece = Piece(region.name, region.shape, region.offset)
            key = piece_key(piece, region.sizes)
            pieces[key] = piece
        if key in tensors:
            raise ValueError(f"two tensors of a checkpoint would both be called {key!r}")
        tensors[key] = tensor
    return plan_file(tensors, pieces)
