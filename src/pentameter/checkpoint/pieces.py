"""Pieces: which part of which tensor an entry of a safetensors file holds.

A run of several processes saves a tensor in the pieces that lie in them, spread over files. What
an entry is a piece of stands in its file's own header (`__metadata__`), so that any reader can put
a tensor together, whatever layout wrote it. An entry that is a whole tensor needs no such word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.errors import CorruptError

METADATA_KEY = "pieces"


@dataclass(frozen=True)
class Piece:
    """What a piece is a part of, and where in it it begins."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """An entry of a file: a whole tensor or a piece of one."""

    path: Path
    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        """Where it lies in the whole tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.sizes, strict=True)
        )


def piece_key(piece: Piece, sizes: Sequence[int]) -> str:
    """The piece's name in its file: `blocks.0.mlp.up.weight[0:128,0:64]`."""
    ranges = zip(piece.offset, sizes, strict=True)
    return f"{piece.name}[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def encode_pieces(pieces: Mapping[str, Piece]) -> str:
    """The word of a file's header: key → name, shape and offset, as JSON."""
    content = {
        key: {"name": piece.name, "shape": piece.shape, "offset": piece.offset}
        for key, piece in pieces.items()
    }
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


def decode_pieces(text: str | None, path: Path) -> dict[str, Piece]:
    """What `encode_pieces` wrote into the file `path`; CorruptError when it is something else."""
    if text is None:
        return {}
    try:
        content = json.loads(text)
        return {
            key: Piece(str(entry["name"]), _integers(entry["shape"]), _integers(entry["offset"]))
            for key, entry in content.items()
        }
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path} is malformed: its header's pieces are {error!r}") from error


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"not a shape or offset: {values!r}")
    return tuple(values)


def check_cover(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    """Raise CorruptError, naming file and tensor, unless the parts make up the tensor exactly.

    Each must lie inside it, no two may overlap, and together they must leave nothing out.
    """
    for part in parts:
        if not len(part.offset) == len(part.sizes) == len(shape) or any(
            start + size > whole
            for start, size, whole in zip(part.offset, part.sizes, shape, strict=True)
        ):
            raise CorruptError(
                f"{part.path} is malformed: {part.key!r} is not inside of {name!r}, which is "
                f"{shape}: it begins at {part.offset} and is {part.sizes}"
            )
        if len(parts) > 1 and not math.prod(part.sizes):
            raise CorruptError(f"{part.path} is malformed: {part.key!r} is an empty piece")
    _refuse_overlap(name, shape, parts)
    n_elements, n_found = math.prod(shape), sum(math.prod(part.sizes) for part in parts)
    if n_found != n_elements:
        where = ", ".join(sorted({part.path.name for part in parts})[:5])
        raise CorruptError(
            f"{parts[0].path.parent}: a piece of {name!r} is missing: those that are there (in "
            f"{where}) hold {n_found:,} of its {n_elements:,} elements"
        )


def _refuse_overlap(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    """A sweep along the dimension with the most cuts; few parts are side by side in the others."""
    if not shape:
        if len(parts) > 1:
            raise CorruptError(f"{parts[1].path} holds {name!r} a second time")
        return
    sweep = max(range(len(shape)), key=lambda dim: len({part.offset[dim] for part in parts}))
    active: list[Part] = []
    for part in sorted(parts, key=lambda part: part.offset[sweep]):
        start = part.offset[sweep]
        active = [other for other in active if other.offset[sweep] + other.sizes[sweep] > start]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(
                    part.offset, part.sizes, other.offset, other.sizes, strict=True
                )
            ):
                same = (part.offset, part.sizes) == (other.offset, other.sizes)
                raise CorruptError(
                    f"{part.path} holds {name!r} a second time"
                    if same
                    else f"{part.path} is malformed: {part.key!r} overlaps {other.key!r} of "
                    f"{other.path.name}"
                )
        active.append(part)
