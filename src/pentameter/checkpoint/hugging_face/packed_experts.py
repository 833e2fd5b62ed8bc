"""gpt-oss's form of tensors: all experts of a layer in common ones, transposed, gate and up row by
row, and published in 4 bits (MXFP4).

`TensorMap` counts in rows of (E, outputs, inputs), and in names made of a module and a parameter.
The functions here turn such tensors into those of a folder and back, region by region.

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
"""Numbers that have a scale in common; two of them are in a byte, the first in its low half."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of a number's three low bits (E2M1); the highest bit is its sign."""
_EXPONENT_BIAS = 127


def _matrix(name: str) -> tuple[str | None, str | None]:
    """Return (`gate`, `up` or `down`; `weight` or `bias`) for a parameter of experts; (None, None)
    for any other."""
    found = _OF_EXPERTS.fullmatch(name)
    return (None, None) if found is None else (found["matrix"], found["kind"])


def _their_name(name: str) -> str:
    """Return the name in a folder of the tensor that holds the parameter `name`."""
    found = _OF_EXPERTS.fullmatch(name)
    if found is None:
        return name.removesuffix(".weight") if name.endswith(".sinks.weight") else name
    matrix = "down" if found["matrix"] == "down" else "gate_up"
    return f"{found['path']}{matrix}_proj{'_bias' * (found['kind'] == 'bias')}"


def pack(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return a folder's tensors, by name, for `tensors` by parameter, in the order in which they
    are given. Experts' matrices become (E, K, N); nothing is computed before an access."""
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
    """Return the parameters `names` from a folder's `tensors`, which hold all of them: the inverse
    of `pack`, also for matrices in 4 bits."""
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
    """Return the tensors that a folder with these `names` must have, for parameters with `shapes`:
    experts' matrices in 4 bits if a name says so."""
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
"""For a family with gpt-oss's form of tensors."""


def _transposed(tensor: LazyTensor) -> LazyTensor:
    """Return matrices (E, n, m) as (E, m, n)."""
    n_experts, n, m = tensor.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, columns = region
        tensor.fill(target.transpose(1, 2), (experts, columns, rows))

    return LazyTensor((n_experts, m, n), tensor.dtype, fill)


def _interleaved(gate: LazyTensor, up: LazyTensor) -> LazyTensor:
    """Return gate's and up's rows, (E, n, …) each, by turns: (E, 2 n, …)."""
    n_experts, n, *others = gate.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, *rest = region
        pairs = slice(rows.start // 2, -(-rows.stop // 2))
        for number, expert in enumerate(_one_by_one(experts)):
            both = [each[expert, pairs, *rest] for each in (gate, up)]
            together = _stack(both)  # (pairs · 2, …)
            target[number].copy_(together[rows.start - 2 * pairs.start :][: target.shape[1]])

    return LazyTensor((n_experts, 2 * n, *others), gate.dtype, fill)


def _stack(both: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of two tensors (1, n, …) by turns: (2 n, …)."""
    import torch

    return torch.stack(both, dim=2).flatten(1, 2)[0]


def _every_other(tensor: LazyTensor, *, first: int) -> LazyTensor:
    """Return every other row of a tensor (E, 2 n, …) from row `first` on, 0 or 1: (E, n, …). The
    rows between are read with them."""
    n_experts, n_rows, *others = tensor.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        experts, rows, *rest = region
        for number, expert in enumerate(_one_by_one(experts)):
            read = tensor[expert, slice(2 * rows.start, 2 * rows.stop), *rest]
            target[number].copy_(read[0, first::2])

    return LazyTensor((n_experts, n_rows // 2, *others), tensor.dtype, fill)


def _dequantized(blocks: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return matrices (E, N, K), float32, from `blocks` (E, N, K / 32, 16), bytes of two numbers in
    4 bits, and `scales` (E, N, K / 32), the exponents of 2 that blocks are multiplied by ("OCP
    Microscaling Formats", 2023, MXFP4)."""
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
    """List slices of a single expert each: no more than one is in memory at a time."""
    return [slice(number, number + 1) for number in range(experts.start, experts.stop)]
