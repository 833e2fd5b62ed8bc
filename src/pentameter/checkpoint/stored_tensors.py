"""The tensors of a checkpoint's group, whole or in pieces, over one file or many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.pieces import METADATA_KEY, Part, check_cover, decode_pieces
from pentameter.checkpoint.tensors import LazyTensor, dtype_of
from pentameter.errors import CorruptError, StorageError
from pentameter.parallel.local_parts import is_distributed
from pentameter.processes.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stored:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


class StoredTensors(Mapping[str, "torch.Tensor | LazyTensor"]):
    """Name → tensor, on the CPU: mapped from its file, or lazy where pieces must be put together.

    Pages are read when touched; writing to a tensor changes memory, never the file. The files stay
    readable while this lives, even where their folder is removed. Opening raises CorruptError,
    naming file and tensor, when a file is malformed or pieces do not make up a tensor exactly,
    StorageError when a file went away.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[Path, Any] = {}
        self.stored: Mapping[str, Stored] = self._index(paths)

    def __getitem__(self, name: str) -> torch.Tensor | LazyTensor:
        stored = self.stored[name]
        if len(stored.parts) == 1:
            return self.read(stored.parts[0])
        return LazyTensor(stored.shape, stored.dtype, partial(self._assemble, stored))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def read(self, part: Part) -> torch.Tensor:
        """One entry of a file, mapped from it."""
        with _reading(part.path):
            tensor: torch.Tensor = self._files[part.path].get_tensor(part.key)
        return tensor

    def load_into(self, targets: Mapping[str, torch.Tensor], world: World | None = None) -> None:
        """Fill the targets in place: each process reads what its parts of them need, no more.

        Targets are plain tensors or DTensors on any mesh; processes may pass different names.
        Collective where `world` has several processes. Raises CorruptError, before anything is
        changed here, when a name is missing or a shape or dtype differs.
        """
        for name, target in targets.items():
            if name not in self.stored:
                raise CorruptError(f"the checkpoint has no tensor {name!r}")
            check_fits(name, self.stored[name], target.shape, target.dtype)
        world = World() if world is None else world
        if world.size > 1 or any(map(is_distributed, targets.values())):
            from pentameter.checkpoint.sharded import load_sharded

            load_sharded(self, targets, no_dist=world.size == 1)
            return
        for name, target in targets.items():
            self._fill(target.detach(), self.stored[name])

    def _fill(self, target: torch.Tensor, stored: Stored) -> None:
        for part in stored.parts:
            target[part.region].copy_(self.read(part))

    def _assemble(self, stored: Stored) -> torch.Tensor:
        import torch

        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._fill(tensor, stored)
        return tensor

    def _index(self, paths: Sequence[Path]) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for path in paths:
            for name, here in self._entries(path):
                known = found.setdefault(name, here)
                if known is here:
                    continue
                if (known.shape, known.dtype) != (here.shape, here.dtype):
                    raise CorruptError(
                        f"{path} is malformed: {here.parts[0].key!r} is of a tensor of shape "
                        f"{here.shape} and {here.dtype}, in {known.parts[0].path.name} {name!r} is "
                        f"{known.shape} and {known.dtype}"
                    )
                found[name] = Stored(known.shape, known.dtype, known.parts + here.parts)
        for name, stored in found.items():
            check_cover(name, stored.shape, stored.parts)
        return found

    def _entries(self, path: Path) -> Iterator[tuple[str, Stored]]:
        """Name and what is there of it, for each entry of a file."""
        from safetensors import safe_open

        with _reading(path):
            file = safe_open(str(path), framework="pt")
            keys: list[str] = list(file.keys())
            slices = {key: file.get_slice(key) for key in keys}
            pieces = decode_pieces((file.metadata() or {}).get(METADATA_KEY), path)
        self._files[path] = file
        if absent := pieces.keys() - slices.keys():
            raise CorruptError(f"{path} is malformed: it lacks the piece {min(absent)!r}")
        for key, entry in slices.items():
            sizes = tuple(entry.get_shape())
            dtype = dtype_of(entry.get_dtype())
            if dtype is None:
                raise CorruptError(f"{path}: {key!r} is of the unknown dtype {entry.get_dtype()}")
            piece = pieces.get(key)
            if piece is None:
                yield key, Stored(sizes, dtype, (Part(path, key, (0,) * len(sizes), sizes),))
            else:
                part = Part(path, key, piece.offset, sizes)
                yield piece.name, Stored(piece.shape, dtype, (part,))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CorruptError(f"{path} is malformed: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def check_fits(
    name: str,
    found: torch.Tensor | LazyTensor | Stored,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> None:
    """Raise CorruptError unless a stored tensor has this shape and, where given, dtype."""
    if tuple(found.shape) != tuple(shape) or (dtype is not None and found.dtype != dtype):
        raise CorruptError(
            f"the checkpoint's {name} is {tuple(found.shape)} of {found.dtype}, "
            f"the configuration asks for {tuple(shape)} of {dtype or 'any dtype'}"
        )
