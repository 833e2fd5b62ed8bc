"""The tensors of gpt-oss's folders, computed from parameters and back: all experts of a layer are
in common tensors, transposed; rows of gate and up alternate; matrices are published in 4 bits
(MXFP4).

Elsewhere, `TensorMap` counts rows of (E, outputs, inputs) and uses names made of a module and a
parameter. The functions here convert region by region.

Shapes: E experts, N outputs and K inputs of a matrix; a block is 32 inputs with a common scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.family import Packing, StoredForm

if TYPE_CHECKING:
    import torch

_OF_EXPERTS = re.compile(r"(?P<path>.*\.experts\.)(?P<matrix>gate|up|down)_proj\.(?P<kind>\w+)")
_BLOCK = 32
"""Numbers in a block, which have one scale. A byte holds two of them, the first in its low half."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of a number's three low bits (E2M1); the highest bit is its sign."""
_EXPONENT_BIAS = 127


def _matrix(name: str) -> tuple[str | None, str | None]:
    """Return (matrix, kind) if `name` is a parameter of experts: `gate`, `up` or `down`, and
    `weight` or `bias`. Return (None, None) for any other name."""
    found = _OF_EXPERTS.fullmatch(name)
    return (None, None) if found is None else (found["matrix"], found["kind"])


def _their_name(name: str) -> str:
    """Return the name of the tensor in a Hugging Face folder that holds the parameter called `name`
    here."""
    found = _OF_EXPERTS.fullmatch(name)
    if found is None:
        return name.removesuffix(".weight") if name.endswith(".sinks.weight") else name
    matrix = "down" if found["matrix"] == "down" else "gate_up"
    return f"{found['path']}{matrix}_proj{'_bias' * (found['kind'] == 'bias')}"


def pack(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Convert experts' parameters to the tensors of a Hugging Face folder: each expert's matrix (N,
    K) is transposed to (K, N), and gate and up become one tensor. `tensors` maps names to all
    parameters of the model. Returns the folder's tensors by name, in the same order; they are lazy:
    nothing is computed before an access."""
    packed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        matrix, kind = _matrix(name)
        rows = tensor
        if matrix == "gate":
            rows = _interleaved(tensor, tensors[name.replace("gate_proj", "up_proj")])
        if matrix != "up":
            packed[_their_name(name)] = _transposed(rows) if kind == "weight" else rows
    return packed


def unpack(tensors: Mapping[str, LazyTensor], names: Iterable[str]) -> dict[str, LazyTensor]:
    """Return the parameters `names` as lazy tensors, computed from a folder's `tensors`: the
    inverse of `pack`. Matrices that the folder has in 4 bits (`NAME_blocks` and `NAME_scales`) are
    dequantised. `tensors` must hold all that is needed."""
    unpacked: dict[str, LazyTensor] = {}
    for name in names:
        theirs, (matrix, kind) = _their_name(name), _matrix(name)
        is_quantized = f"{theirs}_blocks" in tensors
        endings = ("_blocks", "_scales") if is_quantized else ("",)
        parts = [tensors[theirs + ending] for ending in endings]
        if kind == "weight" and not is_quantized:
            parts = [_transposed(part) for part in parts]
        if matrix in ("gate", "up"):
            parts = [_every_other(part, first=int(matrix == "up")) for part in parts]
        unpacked[name] = _dequantized(*parts) if is_quantized else parts[0]
    return unpacked


def form_of(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> StoredForm:
    """Return names and shapes of the tensors that a Hugging Face folder must have for parameters
    with these `shapes`. `names` are the tensors that it does have: if one ends in `_blocks`, the
    experts' matrices are expected in 4 bits."""
    import torch

    def nothing(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        raise NotImplementedError

    whole = {name: LazyTensor(shape, torch.float32, nothing) for name, shape in shapes.items()}
    form = {name: tensor.shape for name, tensor in pack(whole).items()}
    if not any(name.endswith("_blocks") for name in names):
        return StoredForm(form, frozenset())
    in_bytes: dict[str, tuple[int, ...]] = {}
    for name in map(_their_name, shapes):
        if name.endswith((".gate_up_proj", ".down_proj")) and name in form:
            n_experts, n_in, n_out = form.pop(name)
            in_bytes[f"{name}_blocks"] = (n_experts, n_out, n_in // _BLOCK, _BLOCK // 2)
            in_bytes[f"{name}_scales"] = (n_experts, n_out, n_in // _BLOCK)
    return StoredForm({**form, **in_bytes}, frozenset(in_bytes))


PACKED_EXPERTS = Packing(pack, unpack, form_of)
"""The Packing for families whose folders have gpt-oss's tensors."""


def _transposed(tensor: LazyTensor) -> LazyTensor:
    """Return matrices (E, n, m) as (E, m, n)."""
    n_experts, n, m = tensor.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, columns = region
        tensor.fill(target.transpose(1, 2), (experts, columns, rows))

    return LazyTensor((n_experts, m, n), tensor.dtype, fill)


def _interleaved(gate: LazyTensor, up: LazyTensor) -> LazyTensor:
    """Return one tensor (E, 2 n, …) in which the rows of `gate` and `up`, (E, n, …) each,
    alternate, gate's first."""
    import torch

    n_experts, n, *others = gate.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, *rest = region
        pairs = slice(rows.start // 2, -(-rows.stop // 2))
        for number, expert in enumerate(_one_by_one(experts)):
            both = [each[expert, pairs, *rest] for each in (gate, up)]
            together = torch.stack(both, dim=2).flatten(1, 2)[0]  # (pairs · 2, …)
            target[number].copy_(together[rows.start - 2 * pairs.start :][: target.shape[1]])

    return LazyTensor((n_experts, 2 * n, *others), gate.dtype, fill)


def _every_other(tensor: LazyTensor, *, first: int) -> LazyTensor:
    """Return the even (`first` = 0) or odd (`first` = 1) rows of a tensor (E, 2 n, …) as (E, n, …).
    The rows between them are read from the file, too."""
    n_experts, n_rows, *others = tensor.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, *rest = region
        for number, expert in enumerate(_one_by_one(experts)):
            read = tensor[expert, slice(2 * rows.start, 2 * rows.stop), *rest]
            target[number].copy_(read[0, first::2])

    return LazyTensor((n_experts, n_rows // 2, *others), tensor.dtype, fill)


def _dequantized(blocks: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return matrices (E, N, K), float32, from MXFP4 ("OCP Microscaling Formats", 2023).

    blocks: bytes (E, N, K / 32, 16), each with two 4-bit numbers. scales: bytes (E, N, K / 32), the
    exponent e of the factor 2^(e - 127) for each block.
    """
    import torch

    n_experts, n_out, n_blocks, n_bytes = blocks.shape
    values = (*_VALUES, *(-value for value in _VALUES))
    of_byte = torch.tensor([(values[byte % 16], values[byte // 16]) for byte in range(256)])

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, columns = region
        along = slice(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
        first = columns.start - along.start * _BLOCK
        for number, expert in enumerate(_one_by_one(experts)):
            pairs = blocks[expert, rows, along, slice(0, n_bytes)][0]  # (rows, blocks, 16)
            exponents = scales[expert, rows, along][0].to(torch.int32) - _EXPONENT_BIAS
            numbers = of_byte[pairs.to(torch.int32)].flatten(2)  # (rows, blocks, 32)
            scaled = torch.ldexp(numbers, exponents[..., None]).flatten(1)
            target[number].copy_(scaled[:, first:][:, : target.shape[2]])

    return LazyTensor((n_experts, n_out, n_blocks * _BLOCK), torch.float32, fill)


def _one_by_one(experts: slice) -> list[slice]:
    """Split a slice of experts into slices of one expert each, so that only one is in memory at a
    time."""
    return [slice(number, number + 1) for number in range(experts.start, experts.stop)]
