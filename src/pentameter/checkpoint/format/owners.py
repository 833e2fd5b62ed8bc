"""Owners: the rank that writes each region of each tensor in a checkpoint.

A distributed run saves a tensor in regions, rectangular blocks of it. Each rank writes the regions
it owns into its own file; if several ranks hold a region (replicas under data parallelism), one of
them writes it.

The device mesh and the tensor's placements determine the ranks that hold a region: those with the
same coordinates along `pipeline` and along every dimension that shards the tensor, whatever their
coordinates along the others. So finding the owners needs no messages. Ranks only compare one hash
over the regions that they expect each other to hold. If the hashes differ (a custom optimizer may
keep different tensors on different ranks), or there is no mesh, the ranks exchange their lists of
regions instead, once for as long as these stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.format.safetensors_format import Piece, TensorFile, piece_key, plan_file
from pentameter.parallel.local_shards import local_shard, sharding_dimensions
from pentameter.processes.group.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Groups = Mapping[str, Mapping[str, "torch.Tensor | LazyTensor"]]
"""Group (`model`, `optimizer`) → name → tensor: plain and whole, lazy and whole, or a DTensor."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A rectangular block of a tensor, or a whole tensor, that a rank holds. `group` is `model` or
    `optimizer`, `piece` has the whole tensor's name and shape and the block's offset in it, `sizes`
    is the block's own shape."""

    group: str
    piece: Piece
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size of its elements in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Holdings:
    """The regions of tensors that this rank holds, their elements (`tensors`), and for each region
    the ranks that also hold it. From this follows who writes what in a save."""

    tensors: Mapping[Region, torch.Tensor | LazyTensor]
    ranks_of: Mapping[Region, Ranks]
    """Region → all ranks that hold a replica of it; no ranks if placements do not determine
    them."""
    view: bytes
    """Hash over names, shapes, dtypes and sharding dimensions. If placements determine the holders,
    it is equal on all ranks of a pipeline stage; if not, it is empty."""

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash over this rank's regions (not their elements), to notice that they changed since
        the last save."""
        return _hash(self.tensors)


def held_regions(groups: Groups) -> dict[Region, torch.Tensor | LazyTensor]:
    """Return the regions that this rank holds, region → elements; empty shards are left out. Ranks
    that hold the same region are replicas. Raises ValueError for a tensor whose local region is
    unknown."""
    held: dict[Region, torch.Tensor | LazyTensor] = {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            local, offset = tensor, (0,) * len(shape)
            if not isinstance(tensor, LazyTensor):
                local, offset = local_shard(tensor)
            sizes = tuple(local.shape)
            if math.prod(shape) and not math.prod(sizes):
                continue  # uneven sharding leaves the last ranks with nothing
            held[Region(group, Piece(name, shape, offset), tensor.dtype, sizes)] = local
    return held


def holdings(
    groups: Groups,
    meshes: Sequence[DeviceMesh],
    stages_of: Mapping[str, tuple[int, ...]] | None = None,
) -> Holdings:
    """Return this rank's Holdings: its regions of the tensors in `groups`, and which ranks hold the
    same ones, derived from `meshes` without communication.

    meshes: cover the whole layout; all their dimensions are named, `pipeline` among them. A tensor
        belongs to the first mesh that has all the dimensions which shard it.
    stages_of: parameter name → its coordinates along `pipeline`, if it is in several stages.

    A region's ranks are left empty if its tensor belongs to no mesh. Raises ValueError for a tensor
    whose local region is unknown.
    """
    held = held_regions(groups)
    if not meshes:
        return Holdings(held, {}, b"")
    try:
        over = {
            (group, name): frozenset[str]()
            if isinstance(tensor, LazyTensor)
            else sharding_dimensions(tensor)
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }
    except ValueError:  # a user's mesh, unknown to the layout
        return Holdings(held, {}, b"")
    lies_on = {each: _mesh_with(each, meshes) for each in set(over.values())}
    if None in lies_on.values():
        return Holdings(held, {}, b"")
    stages_of = stages_of or {}
    known: dict[object, Ranks] = {}
    ranks_of = {}
    for region in held:
        name = region.piece.name
        parameter = name if region.group == "model" else name.rpartition(".")[0]
        key = over[region.group, name], stages_of.get(parameter)
        if key not in known:
            known[key] = _ranks_at(lies_on[key[0]], *key)
        ranks_of[region] = known[key]
    view = [
        (group, name, tuple(tensor.shape), str(tensor.dtype), sorted(over[group, name]))
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    ]
    return Holdings(held, ranks_of, _hash(sorted(view)))


def _mesh_with(over: frozenset[str], meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """Return the first mesh that has all the dimensions in `over`; None if there is none."""
    return next((mesh for mesh in meshes if over <= set(mesh.mesh_dim_names or ())), None)


def _ranks_at(
    mesh: DeviceMesh | None, over: frozenset[str], stages: tuple[int, ...] | None
) -> Ranks:
    """List the ranks that have this rank's coordinates along all mesh dimensions in `over`, and
    along `pipeline` a coordinate in `stages`; if that is None, this rank's own."""
    assert mesh is not None
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # the mesh spans all ranks
    ranks = mesh.mesh
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        wanted = [coordinate[index]]
        if name == "pipeline" and stages is not None:
            wanted = list(stages)
        elif name not in over and name != "pipeline":
            continue
        ranks = ranks.index_select(index, ranks.new_tensor(wanted))
    return tuple(sorted(ranks.flatten().tolist()))


def views_agree(views: Sequence[bytes], meshes: Sequence[DeviceMesh]) -> bool:
    """Return True if, in each pipeline stage, all ranks have derived the same answer to which rank
    holds which region. `views` are the hashes of these answers (`Holdings.view`) of all ranks, in
    rank order; `meshes` are those given to `holdings`. False if there are no meshes. The result is
    the same on all ranks."""
    if not meshes or meshes[0].mesh.numel() != len(views) or not all(views):
        return False
    mesh = meshes[0]
    dimensions = list(mesh.mesh_dim_names or ())
    stages = mesh.mesh.movedim(dimensions.index("pipeline"), 0) if "pipeline" in dimensions else [
        mesh.mesh
    ]  # fmt: skip
    return all(len({views[rank] for rank in each.flatten().tolist()}) == 1 for each in stages)


def exchange(held: Iterable[Region], world: World) -> dict[Region, Ranks]:
    """Gather every rank's list of regions: region → the ranks that hold it, in the whole world.

    Collective. Raises ValueError if the regions do not add up to a whole tensor.
    """
    ranks_of: dict[Region, list[int]] = {}
    for rank, regions in enumerate(world.all_gather(list(held))):
        for region in regions:
            ranks_of.setdefault(region, []).append(rank)
    n_elements: dict[tuple[str, str, tuple[int, ...], torch.dtype], int] = {}
    for region in ranks_of:
        tensor = (region.group, region.piece.name, region.piece.shape, region.dtype)
        n_elements[tensor] = n_elements.get(tensor, 0) + math.prod(region.sizes)
    for (_, name, shape, dtype), n_found in n_elements.items():
        if n_found != math.prod(shape):
            raise ValueError(
                f"{name!r} cannot be saved: the processes hold {n_found:,} of the "
                f"{math.prod(shape):,} elements of its shape {shape}, {dtype}"
            )
    return {region: tuple(ranks) for region, ranks in ranks_of.items()}


def owned(ranks_of: Mapping[Region, Ranks], rank: int) -> set[Region]:
    """Return the regions that `rank` writes. `ranks_of` maps each region to the ranks that hold it.

    Regions that the same ranks hold are shared out among them: the largest first, each to the rank
    with the fewest bytes so far. All holders compute the same owner, because each of them knows
    every region that the same ranks hold.
    """
    own = set()
    n_bytes: dict[Ranks, list[int]] = {}
    for region in sorted(ranks_of, key=_largest_first):
        ranks = ranks_of[region]
        if rank not in ranks:
            continue
        loads = n_bytes.setdefault(ranks, [0] * len(ranks))
        owner = loads.index(min(loads))
        loads[owner] += region.n_bytes
        if ranks[owner] == rank:
            own.add(region)
    return own


def _largest_first(region: Region) -> tuple[int, str, str, tuple[int, ...]]:
    return -region.n_bytes, region.group, region.piece.name, region.piece.offset


def files_of(own: Iterable[Region], holds: Holdings) -> dict[str, TensorFile]:
    """Plan the files that this rank writes in a save, one for each group (`model`, `optimizer`) of
    which it writes anything: return group → TensorFile.

    own: the regions that this rank writes.
    holds: has the regions' elements.

    Raises TypeError for a tensor that cannot be saved.
    """
    by_group: dict[str, list[Region]] = {}
    own = set(own)
    for region in holds.tensors:
        if region in own:
            by_group.setdefault(region.group, []).append(region)
    return {group: _file_of(regions, holds) for group, regions in by_group.items()}


def file_name(group: str, writers: Sequence[int], rank: int) -> str:
    """Name the file that `rank` writes for a group: `model.safetensors`, or for the second of four
    `writers` (ranks in ascending order) `model-00001-of-00004.safetensors`."""
    part = f"-{writers.index(rank):05d}-of-{len(writers):05d}" if len(writers) > 1 else ""
    return f"{group}{part}.safetensors"


def _file_of(regions: Sequence[Region], holds: Holdings) -> TensorFile:
    """Plan the safetensors file for these regions of one group. The key of a whole tensor is its
    name; that of a region is the name with the ranges of its indices."""
    tensors: dict[str, torch.Tensor | LazyTensor] = {}
    pieces: dict[str, Piece] = {}
    for region in regions:
        key = region.piece.name
        if region.sizes != region.piece.shape:
            key = piece_key(region.piece, region.sizes)
            pieces[key] = region.piece
        if key in tensors:
            raise ValueError(f"two tensors of a checkpoint would both be called {key!r}")
        tensors[key] = holds.tensors[region]
    return plan_file(tensors, pieces)


def _hash(items: Iterable[object]) -> bytes:
    digest = blake2b(digest_size=16)
    for item in items:
        digest.update(repr(item).encode())
    return digest.digest()
