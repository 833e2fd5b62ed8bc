"""Named tensors, whole or in regions, into safetensors files: which process writes what, and how.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the bytes of the tensors without gaps. Written here
rather than by the library because its writer wants every tensor in host memory at once, refuses
tensors that share storage, and lets nobody hash what passes. `tensor_reader` reads.

A run of several processes saves a tensor in pieces: each process the region that lies in it, in a
file of its own; what several hold (a copy under data parallelism) one of them writes. Every process
sees what all hold and comes to the same plan, so nobody has to hand it out. Which region an entry
holds stands in its file's header (`__metadata__`), so that any reader can put the tensor together,
whatever layout wrote it. An entry that is a whole tensor needs no such word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt

from pentameter.parallel.local_parts import local_part
from pentameter.processes.world import World

if TYPE_CHECKING:
    import torch

Groups = Mapping[str, Mapping[str, "torch.Tensor | LazyTensor"]]
"""Group (`model`, `optimizer`) → name → tensor, whole or a DTensor."""

METADATA_KEY = "pieces"

DTYPE_CODES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.complex64": "C64",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""dtype → what safetensors calls it."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed each time it is asked for, whole or a region of it; its shape and
    dtype are known before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[[tuple[slice, ...]], torch.Tensor]
    """Computes a region, of which each dimension's start and stop are given, and no more."""


def materialize(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """The tensor itself, computed now if it is lazy."""
    return read_region(tensor, tuple(slice(0, size) for size in tensor.shape))


def read_region(tensor: torch.Tensor | LazyTensor, region: tuple[slice, ...]) -> torch.Tensor:
    """A region of the tensor, each dimension's start and stop given; only this is computed if it is
    lazy."""
    return tensor.compute(region) if isinstance(tensor, LazyTensor) else tensor[region]


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file about to be written: its size is known, its bytes come as they go out."""

    header: bytes
    tensors: tuple[torch.Tensor | LazyTensor, ...]
    """In the order of the file."""
    n_bytes: int

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file; each tensor is brought to the host only when its turn comes."""
        yield self.header
        for tensor in self.tensors:
            if math.prod(tensor.shape):
                yield _host_bytes(materialize(tensor))


@dataclass(frozen=True)
class Piece:
    """The tensor that an entry holds a region of, and where in it the region begins."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    """Of the whole tensor."""
    offset: tuple[NonNegativeInt, ...]


def piece_key(piece: Piece, sizes: Sequence[int]) -> str:
    """The piece's name in its file: `blocks.0.mlp.up.weight[0:128,0:64]`."""
    ranges = zip(piece.offset, sizes, strict=True)
    return f"{piece.name}[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def plan_file(
    tensors: Mapping[str, torch.Tensor | LazyTensor], pieces: Mapping[str, Piece] | None = None
) -> TensorFile:
    """The file of these tensors by key, largest items first so that each stays aligned.

    `pieces` says which of them are not whole tensors, and what they are pieces of. Tensors that
    share memory are written once per name. Raises TypeError for what has no bytes of its own
    (sparse, meta) or a dtype the format lacks.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    metadata = {"format": "pt"}
    if pieces:
        content = {key: asdict(piece) for key, piece in pieces.items()}
        metadata[METADATA_KEY] = json.dumps(content, separators=(",", ":"), sort_keys=True)
    header: dict[str, object] = {"__metadata__": metadata}
    offset_bytes = 0
    for name in names:
        tensor = tensors[name]
        code = DTYPE_CODES.get(str(tensor.dtype))
        described, is_dense = str(tensor.dtype), True
        if not isinstance(tensor, LazyTensor):  # that one is computed from tensors with data
            described += f", {tensor.layout}, {tensor.device}"
            is_dense = str(tensor.layout) == "torch.strided" and not tensor.is_meta
        if code is None or not is_dense:
            raise TypeError(
                f"tensor {name!r} ({described}) cannot be saved: only dense tensors with "
                "data, of a dtype safetensors knows"
            )
        n_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, offset_bytes + n_bytes],
        }
        offset_bytes += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    ordered = tuple(tensors[name] for name in names)
    return TensorFile(prefix, ordered, len(prefix) + offset_bytes)


def _host_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order, on the host."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Region:
    """A region of a tensor that a process holds."""

    group: str
    piece: Piece
    dtype: torch.dtype
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
    held = world.agreed(lambda: held_regions(groups))
    writer_of = _writers(world.all_gather(list(held)))

    def plan() -> dict[str, tuple[str, TensorFile]]:
        files = {}
        for group in groups:
            found = {writer for region, writer in writer_of.items() if region.group == group}
            writers = sorted(found or {0})  # a group without tensors is a file of the main process
            if world.rank in writers:
                number = writers.index(world.rank)
                part = f"-{number:05d}-of-{len(writers):05d}" if len(writers) > 1 else ""
                own = {
                    region: tensor
                    for region, tensor in held.items()
                    if region.group == group and writer_of[region] == world.rank
                }
                files[group] = (f"{group}{part}.safetensors", _file_of(own))
        return files

    return world.agreed(plan)


def held_regions(groups: Groups) -> dict[Region, torch.Tensor | LazyTensor]:
    """The regions in this process, and their elements. Several processes that hold the same region
    have copies of it. Raises ValueError for a tensor of which this process's region is not known.
    """
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
            held[Region(group, Piece(name, shape, offset), tensor.dtype, sizes)] = local
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
        tensor = (region.group, region.piece.name, region.piece.shape, region.dtype)
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


def _file_of(held: Mapping[Region, torch.Tensor | LazyTensor]) -> TensorFile:
    """The file of these regions of a group; a tensor that is whole goes by its own name."""
    tensors: dict[str, torch.Tensor | LazyTensor] = {}
    pieces: dict[str, Piece] = {}
    for region, tensor in held.items():
        key = region.piece.name
        if region.sizes != region.piece.shape:
            key = piece_key(region.piece, region.sizes)
            pieces[key] = region.piece
        if key in tensors:
            raise ValueError(f"two tensors of a checkpoint would both be called {key!r}")
        tensors[key] = tensor
    return plan_file(tensors, pieces)
