"""Reading tensors from safetensors files, whole or by region, over one file or many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.format.safetensors_format import METADATA_KEY, Piece, dtype_codes
from pentameter.errors import CorruptError, StorageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredRegion:
    """The place of a region of a tensor, or of a whole tensor: the entry `key` in a safetensors
    file, and the region's offset and sizes."""

    path: Path
    key: str
    offset: tuple[int, ...]
    """Its first index along each dimension of the whole tensor."""
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk, saved whole or in several regions: its shape, dtype and regions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[StoredRegion, ...]


class StoredTensors(Mapping[str, "torch.Tensor | LazyTensor"]):
    """Mapping from name to tensor over the safetensors files `paths`, on the CPU: memory-mapped
    from its file, or lazy if its regions must be assembled.

    Pages are read when touched; writing to a tensor changes memory, never the file. The files stay
    readable while this object lives, even if their folder is removed. Opening raises CorruptError,
    naming file and tensor, if a file is malformed or regions do not cover a tensor exactly;
    StorageError if a file has disappeared.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[Path, Any] = {}
        self.stored: Mapping[str, StoredTensor] = self._index(paths)

    def __getitem__(self, name: str) -> torch.Tensor | LazyTensor:
        regions = self.stored[name].regions
        return self.read(regions[0]) if len(regions) == 1 else self.lazy(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def lazy(self, name: str) -> LazyTensor:
        """Return the tensor `name` as a LazyTensor: nothing is read from the file now, and each
        access reads only its region. Indexing the mapping instead would memory-map the tensor and
        read its first page, which is slow for thousands of them."""
        stored = self.stored[name]
        return LazyTensor(stored.shape, stored.dtype, partial(self._fill, stored))

    def read(self, region: StoredRegion) -> torch.Tensor:
        """Return the tensor (sizes of `region`) in one entry of a file, memory-mapped. Raises
        CorruptError if the file is malformed, StorageError if it cannot be read."""
        with _reading(region.path):
            tensor: torch.Tensor = self._files[region.path].get_tensor(region.key)
        return tensor

    def _fill(self, stored: StoredTensor, target: torch.Tensor, region: tuple[slice, ...]) -> None:
        """Fill `target`, in place, with one region (start and stop per dimension) of the whole
        tensor, from every stored region that overlaps it."""
        offset = [each.start for each in region]
        for each in stored.regions:
            starts = list(map(max, offset, each.offset))
            ends = [
                min(asked.stop, start + size)
                for asked, start, size in zip(region, each.offset, each.sizes, strict=True)
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                source = self.read(each)[_slices(starts, ends, each.offset)]
                target[_slices(starts, ends, offset)].copy_(source)

    def _index(self, paths: Sequence[Path]) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for path in paths:
            for name, entry in self._entries(path):
                known = found.setdefault(name, entry)
                if known is entry:
                    continue
                if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                    key, other = entry.regions[0].key, known.regions[0].path.name
                    raise CorruptError(
                        f"{path} is malformed: {key!r} is of a tensor of shape {entry.shape} and "
                        f"{entry.dtype}, in {other} {name!r} is {known.shape} and {known.dtype}"
                    )
                found[name] = StoredTensor(known.shape, known.dtype, known.regions + entry.regions)
        for name, stored in found.items():
            check_cover(name, stored.shape, stored.regions)
        return found

    def _entries(self, path: Path) -> Iterator[tuple[str, StoredTensor]]:
        """Yield each entry in a file as the name of the whole tensor and a StoredTensor with that
        one region. Raises CorruptError if the header is malformed or a dtype unknown."""
        import torch
        from safetensors import safe_open

        with _reading(path):
            file = safe_open(str(path), framework="pt")
            keys: list[str] = list(file.keys())
            slices = {key: file.get_slice(key) for key in keys}
            text = (file.metadata() or {}).get(METADATA_KEY, "{}")
        try:
            pieces = TypeAdapter(dict[str, Piece]).validate_json(text, strict=True)
        except ValidationError as error:
            what = error.errors()[0]
            raise CorruptError(
                f"{path} is malformed: its header's pieces: {'.'.join(map(str, what['loc']))}: "
                f"{what['msg']}"
            ) from error
        self._files[path] = file
        if absent := pieces.keys() - slices.keys():
            raise CorruptError(f"{path} is malformed: it lacks the piece {min(absent)!r}")
        dtypes = {code: name.removeprefix("torch.") for name, code in dtype_codes().items()}
        for key, entry in slices.items():
            sizes = tuple(entry.get_shape())
            code = entry.get_dtype()
            if code not in dtypes:
                raise CorruptError(f"{path}: {key!r} is of the unknown dtype {code}")
            piece = pieces.get(key, Piece(key, sizes, (0,) * len(sizes)))
            region = StoredRegion(path, key, piece.offset, sizes)
            yield piece.name, StoredTensor(piece.shape, getattr(torch, dtypes[code]), (region,))


def _slices(starts: Sequence[int], ends: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    """Convert a region [starts, ends) of a whole tensor to slices into the block that begins at
    `offset`."""
    return tuple(
        slice(start - begin, end - begin)
        for start, end, begin in zip(starts, ends, offset, strict=True)
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CorruptError(f"{path} is malformed: {error}") from error
    except (OSError, RuntimeError) as error:  # the latter: no address space is left to map it
        raise StorageError(f"cannot read {path}: {error}") from error


def check_cover(name: str, shape: tuple[int, ...], regions: Sequence[StoredRegion]) -> None:
    """Raise CorruptError, naming file and tensor, unless the regions cover the tensor exactly.

    Each must lie inside it, no two may overlap, and together they must leave nothing out.
    """
    for region in regions:
        if not len(region.offset) == len(region.sizes) == len(shape) or any(
            start + size > whole
            for start, size, whole in zip(region.offset, region.sizes, shape, strict=True)
        ):
            raise CorruptError(
                f"{region.path} is malformed: {region.key!r} is not inside of {name!r}, which is "
                f"{shape}: it begins at {region.offset} and is {region.sizes}"
            )
        if len(regions) > 1 and not math.prod(region.sizes):
            raise CorruptError(f"{region.path} is malformed: {region.key!r} is an empty piece")
    _refuse_overlap(name, shape, regions)
    n_elements, n_found = math.prod(shape), sum(math.prod(region.sizes) for region in regions)
    if n_found != n_elements:
        where = ", ".join(sorted({region.path.name for region in regions})[:5])
        raise CorruptError(
            f"{regions[0].path.parent}: a piece of {name!r} is missing: those that are there (in "
            f"{where}) hold {n_found:,} of its {n_elements:,} elements"
        )


def _refuse_overlap(name: str, shape: tuple[int, ...], regions: Sequence[StoredRegion]) -> None:
    """Raise CorruptError if two regions have an element in common.

    Sweeps along the dimension with the most distinct offsets; few regions lie next to each other
    along the others.
    """
    if not shape:
        if len(regions) > 1:
            raise CorruptError(f"{regions[1].path} holds {name!r} a second time")
        return
    sweep = max(range(len(shape)), key=lambda dim: len({region.offset[dim] for region in regions}))
    active: list[StoredRegion] = []
    for region in sorted(regions, key=lambda region: region.offset[sweep]):
        start = region.offset[sweep]
        active = [other for other in active if other.offset[sweep] + other.sizes[sweep] > start]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(
                    region.offset, region.sizes, other.offset, other.sizes, strict=True
                )
            ):
                same = (region.offset, region.sizes) == (other.offset, other.sizes)
                raise CorruptError(
                    f"{region.path} holds {name!r} a second time"
                    if same
                    else f"{region.path} is malformed: {region.key!r} overlaps {other.key!r} of "
                    f"{other.path.name}"
                )
        active.append(region)
