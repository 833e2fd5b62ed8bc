"""Named tensors, or regions of tensors, into one safetensors file: one in host memory at a time.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the bytes of the tensors without gaps. Written here
rather than by the library because its writer wants every tensor in host memory at once, refuses
tensors that share storage, and lets nobody hash what passes. `tensor_reader` reads.

A run of several processes saves a tensor in pieces: each process the region that lies in it, in a
file of its own. Which region an entry holds stands in its file's header (`__metadata__`), so that
any reader can put the tensor together, whatever layout wrote it. An entry that is a whole tensor
needs no such word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
    """A tensor that is computed each time it is asked for; its shape and dtype are known before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[[], torch.Tensor]


def materialize(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """The tensor itself, computed now if it is lazy."""
    return tensor.compute() if isinstance(tensor, LazyTensor) else tensor


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
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]


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
