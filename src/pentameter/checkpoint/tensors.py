"""Named tensors to and from one safetensors file, one tensor in memory at a time.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the bytes of the tensors without gaps. Written here
rather than by the library because its writer wants every tensor in host memory at once, refuses
tensors that share storage, and lets nobody hash what passes. The library reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.checkpoint.pieces import METADATA_KEY, Piece, encode_pieces
from pentameter.errors import CorruptError, StorageError

if TYPE_CHECKING:
    import torch

_CODES = {
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


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed each time it is asked for; shape and dtype are known before."""

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


def dtype_of(code: str) -> torch.dtype | None:
    """The dtype that safetensors calls `code`; None for one that we never write."""
    import torch

    names = [name for name, known in _CODES.items() if known == code]
    return getattr(torch, names[0].removeprefix("torch.")) if names else None


def plan_file(
    tensors: Mapping[str, torch.Tensor | LazyTensor], pieces: Mapping[str, Piece] | None = None
) -> TensorFile:
    """The file of these tensors, largest items first so that each stays aligned.

    `pieces` says which of them are not whole tensors, and what they are pieces of. Tensors that
    share memory are written once per name. Raises TypeError for what has no bytes
    of its own (sparse, meta) or a dtype the format lacks.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    metadata = {"format": "pt"} | ({METADATA_KEY: encode_pieces(pieces)} if pieces else {})
    header: dict[str, object] = {"__metadata__": metadata}
    offset_bytes = 0
    for name in names:
        tensor = tensors[name]
        code = _CODES.get(str(tensor.dtype))
        if code is None or not _is_dense(tensor):
            raise TypeError(
                f"tensor {name!r} ({_described(tensor)}) cannot be saved: only dense tensors with "
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


def _is_dense(tensor: torch.Tensor | LazyTensor) -> bool:
    if isinstance(tensor, LazyTensor):
        return True  # what it computes comes out of other tensors with data
    return str(tensor.layout) == "torch.strided" and not tensor.is_meta


def _described(tensor: torch.Tensor | LazyTensor) -> str:
    if isinstance(tensor, LazyTensor):
        return str(tensor.dtype)
    return f"{tensor.dtype}, {tensor.layout}, {tensor.device}"


def _host_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Name → tensor of a safetensors file, on the CPU, mapped from it.

    Pages are read when touched; writing to a tensor changes memory, never the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptError(f"{path} is malformed: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
