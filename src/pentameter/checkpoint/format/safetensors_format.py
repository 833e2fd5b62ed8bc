"""The safetensors format: header and bytes for a file with named tensors, whole or in regions.

A file (https://huggingface.co/docs/safetensors) is eight bytes with the header length, a JSON
header `{name: {dtype, shape, data_offsets}}`, then the tensors' bytes without gaps. pentameter
writes it itself because the library's writer wants every tensor in host memory at once, refuses
tensors that share storage, and offers no way to hash the bytes as they pass. `tensor_reader` reads
files.

An entry may hold a region instead of a whole tensor. The file's header (`__metadata__`) then says
which one, so any reader can assemble the tensor, whatever layout wrote it. An entry with a whole
tensor needs no such note.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.config.tables import packaged_table
from pentameter.errors import lone_surrogate

if TYPE_CHECKING:
    import torch

METADATA_KEY = "pieces"


@cache
def dtype_codes() -> dict[str, str]:
    """Return PyTorch dtype, as text (`torch.float32`) → its code in the safetensors format."""
    return packaged_table("checkpoint/format/dtypes.toml")


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file to be written: its size is known, its bytes are produced while it is
    written. `header` has all bytes before the tensors' data, `n_bytes` counts both."""

    header: bytes
    tensors: tuple[torch.Tensor | LazyTensor, ...]
    """Tensors in the file's order."""
    n_bytes: int

    @property
    def n_data_bytes(self) -> int:
        """Size in bytes of the tensors' data, after the header."""
        return self.n_bytes - len(self.header)

    @property
    def gpus(self) -> set[torch.device]:
        """The CUDA devices that hold some of the tensors; lazy tensors count as on the host."""
        devices = {each.device for each in self.tensors if not isinstance(each, LazyTensor)}
        return {device for device in devices if device.type == "cuda"}

    def copied_to(self, buffer: torch.Tensor) -> TensorFile:
        """Return the same file, whose data were copied into `buffer`, uint8 (n_data_bytes,) on the
        host, so that the tensors may change. If the buffer is pinned, copies from a GPU have only
        been started: synchronize the device before reading."""
        start = 0
        for tensor in self.tensors:
            source = tensor[...].detach()
            end = start + source.numel() * source.element_size()
            target = buffer[start:end].view(source.dtype).view(source.shape)
            target.copy_(source, non_blocking=buffer.is_pinned())
            start = end
        return TensorFile(self.header, (buffer,), self.n_bytes)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes; each tensor is copied to the host only when its turn comes."""
        yield self.header
        for tensor in self.tensors:
            if math.prod(tensor.shape):
                yield _host_bytes(tensor[...])


@dataclass(frozen=True)
class Piece:
    """The place of a region: the whole tensor's name and shape, and the region's offset in it, its
    first index along each dimension."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    """Shape of the whole tensor."""
    offset: tuple[NonNegativeInt, ...]


def piece_key(piece: Piece, sizes: Sequence[int]) -> str:
    """Return the key for a region in its file, with start and end per dimension:
    `token_embedding.weight[0:128,0:64]`."""
    ranges = zip(piece.offset, sizes, strict=True)
    return f"{piece.name}[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def plan_file(
    tensors: Mapping[str, torch.Tensor | LazyTensor], pieces: Mapping[str, Piece] | None = None
) -> TensorFile:
    """Plan the file that holds `tensors`, key → tensor, largest dtypes first so that each stays
    aligned.

    `pieces` maps the keys that hold regions to the tensor and offset; all other keys hold whole
    tensors. Tensors that share memory are written once per name. Raises TypeError for a tensor
    without dense data (sparse, meta), with a dtype that the format lacks, or with a name that no
    reader of the format takes (`__metadata__`, or text that is no Unicode).
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
        if name == "__metadata__" or lone_surrogate(name) is not None:
            raise TypeError(f"a tensor named {name!r} cannot be saved: no reader takes that name")
        code = dtype_codes().get(str(tensor.dtype))
        described, is_dense = str(tensor.dtype), True
        if not isinstance(tensor, LazyTensor):  # a lazy one is computed from tensors with data
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
    """Return the tensor's bytes in C order, on the host."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data
