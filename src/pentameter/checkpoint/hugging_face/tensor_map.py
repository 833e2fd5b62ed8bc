"""Conversion between the tensors of a family (a Hugging Face architecture) and pentameter's, by the
tables of its `Family`.

Tensors correspond in strips: rows in a pentameter tensor are rows in one of the family's. A fused
matrix whose rows are in another order is many strips, head by head. A region is computed from the
strips that overlap it, so nothing else is read. Rows that no strip fills are zero: biases that the
family has and the model lacks.

A tensor with a matrix for each expert, (E experts, rows, columns), counts as its matrices one below
the other, (E · rows, columns). So it corresponds to one tensor with as many rows, to a tensor for
each expert, or to every other block of rows, and single experts are read by their rows.

Shapes: D d_model, H heads, G KV heads, K head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pentameter.checkpoint.hugging_face.family import Family
from pentameter.checkpoint.lazy_tensors import LazyTensor, copy_region
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.gpt import parameter_table
from pentameter.planning.sub_layers.attention import projections

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.model_folder import Weights


@dataclass(frozen=True)
class Strip:
    """`n_rows` rows in the pentameter tensor `ours`, from `row` on, that equal rows in the family's
    tensor `theirs` (before any transposition), from `their_row` on."""

    ours: str
    row: int
    theirs: str
    their_row: int
    n_rows: int


@dataclass(frozen=True)
class RowSource:
    """Rows to copy from `tensor`, beginning at `source_row`, into the result, at `row`."""

    row: int
    tensor: torch.Tensor | LazyTensor
    source_row: int
    n_rows: int


@dataclass(frozen=True)
class TensorMap:
    """All strips between a model's tensors and a family's."""

    strips: tuple[Strip, ...]
    our_shapes: Mapping[str, tuple[int, ...]]
    """pentameter's name → shape, without rows that pad the vocabulary, with the biases that the
    family has."""
    their_shapes: Mapping[str, tuple[int, ...]]
    """The family's name → shape as stored in the file."""
    transposed: frozenset[str]
    """The family's names for tensors that it stores transposed."""
    n_experts: Mapping[str, int]
    """pentameter's names, and the family's, for tensors with a matrix for each expert → E."""

    @staticmethod
    def of(family: Family, model: ModelConfig, *, is_stacked: bool = False) -> TensorMap:
        """Build the map between the tensors of `model` and those of the family that expresses it.
        With `is_stacked`, a layer's experts lie in common tensors, named by `family.stacked`;
        otherwise each expert's matrix is a tensor by itself."""
        biases = dict.fromkeys(family.not_needed & {"bias", "qkv_bias", "router_bias"}, True)
        # No family here holds the state of balancing, which is of training.
        whole = model.model_copy(update={**biases, "vocab_multiple": 1, "balance": "none"})
        table = parameter_table(whole)
        stacked = family.stacked if is_stacked else {}
        strips: list[Strip] = []
        shapes: dict[str, tuple[int, ...]] = {}
        transposed: set[str] = set()
        n_experts: dict[str, int] = {}
        for spec in table:
            for strip in _strips(family, whole, spec, stacked):
                strips.append(strip)
                n_rows = max(strip.their_row + strip.n_rows, shapes.get(strip.theirs, (0,))[0])
                shapes[strip.theirs] = (n_rows, *spec.shape[1 + _has_experts(spec) :])
                if family.transposed and spec.is_block_matrix:
                    transposed.add(strip.theirs)
                if _has_experts(spec):
                    is_common = is_stacked or family.stacks_experts
                    names = (strip.ours, strip.theirs) if is_common else (strip.ours,)
                    n_experts |= dict.fromkeys(names, spec.shape[0])
        for name in transposed:
            shapes[name] = shapes[name][::-1]
        for name in n_experts.keys() & shapes.keys():
            E, (n_rows, *columns) = n_experts[name], shapes[name]
            shapes[name] = (E, n_rows // E, *columns)
        ours = {spec.name: spec.shape for spec in table}
        return TensorMap(tuple(strips), ours, shapes, frozenset(transposed), n_experts)

    def to_theirs(self, weights: Weights) -> dict[str, LazyTensor]:
        """Return the family's tensors, name → lazy tensor in the stored layout, whose regions are
        computed from pentameter's `weights` at access. All have the first weight's dtype. Rows for
        a bias that `weights` lacks are zero."""
        sources: dict[str, list[RowSource]] = {name: [] for name in self.their_shapes}
        for strip in self.strips:
            if strip.ours in weights:
                found = self._as_rows(strip.ours, weights[strip.ours])
                source = RowSource(strip.their_row, found, strip.row, strip.n_rows)
                sources[strip.theirs].append(source)
        dtype = next(iter(weights.values())).dtype
        return self._assembled(self.their_shapes, sources, dtype)

    def to_ours(
        self, tensors: Mapping[str, LazyTensor], dtype: torch.dtype
    ) -> dict[str, LazyTensor]:
        """Return pentameter's tensors, name → lazy tensor in `dtype`, whose regions are computed
        from the family's `tensors` at access. `tensors` must be complete, with the shapes in
        `their_shapes`."""
        sources: dict[str, list[RowSource]] = {name: [] for name in self.our_shapes}
        for strip in self.strips:
            found = self._as_rows(strip.theirs, tensors[strip.theirs])
            sources[strip.ours].append(RowSource(strip.row, found, strip.their_row, strip.n_rows))
        return self._assembled(self.our_shapes, sources, dtype)

    def _as_rows(self, name: str, tensor: torch.Tensor | LazyTensor) -> torch.Tensor | LazyTensor:
        """Return a tensor, ours or the family's, as the matrix in which strips count rows:
        transposed if it is stored so, and experts' matrices (E, rows, columns) one below the other,
        (E · rows, columns)."""
        if name in self.n_experts:
            return tensor.flatten(0, 1)
        return tensor.t() if name in self.transposed else tensor

    def _assembled(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Mapping[str, Sequence[RowSource]],
        dtype: torch.dtype,
    ) -> dict[str, LazyTensor]:
        """Return a lazy tensor for each name in `shapes` (all ours or all the family's), with that
        shape and `dtype`. At access its rows are copied from `sources[name]`."""
        tensors: dict[str, LazyTensor] = {}
        for name, shape in shapes.items():
            fill = partial(_fill, sorted(sources[name], key=lambda source: source.row))
            if name in self.n_experts:
                E, n_rows, *columns = shape
                rows = LazyTensor((E * n_rows, *columns), dtype, fill)
                tensors[name] = rows.unflatten(0, (E, n_rows))
            elif name in self.transposed:
                tensors[name] = LazyTensor(shape[::-1], dtype, fill).t()
            else:
                tensors[name] = LazyTensor(shape, dtype, fill)
        return tensors


def _fill(sources: Sequence[RowSource], target: torch.Tensor, region: tuple[slice, ...]) -> None:
    """Fill `target`, in place, with one region (start and stop per dimension), assembled from the
    rows in `sources`, which are in order. Rows without a source are zero."""
    rows, *others = region
    target.zero_()
    first = bisect_right(sources, rows.start, key=lambda source: source.row + source.n_rows)
    for source in islice(sources, first, None):
        if source.row >= rows.stop:
            break
        start, stop = max(rows.start, source.row), min(rows.stop, source.row + source.n_rows)
        shift = source.source_row - source.row
        found = slice(start + shift, stop + shift)
        part = target.narrow(0, start - rows.start, stop - start)
        copy_region(part, source.tensor, (found, *others))


def _has_experts(spec: ParameterSpec) -> bool:
    """Return whether a parameter has a matrix, or a bias, for each expert: its first axis is
    experts."""
    return spec.axes[0] == "experts"


def _strips(
    family: Family, model: ModelConfig, spec: ParameterSpec, stacked: Mapping[str, str]
) -> Iterator[Strip]:
    """Yield the strips that map a parameter's rows to the family's tensors. `stacked` maps a
    parameter's name within a layer to the tensor in which all experts lie; empty if each expert's
    matrix is a tensor by itself."""
    module, _, kind = spec.name.rpartition(".")
    if spec.layer is None:
        name = family.head if module == "head" else f"{family.body}{family.names[module]}.{kind}"
        yield Strip(spec.name, 0, name, 0, spec.shape[0])
        return
    module = module.removeprefix(f"blocks.{spec.layer}.")
    prefix = f"{family.body}{family.layers}{spec.layer}."
    if module in family.names:
        parameter = f"{module}.{kind}"
        name = prefix + stacked.get(parameter, f"{family.names[module]}.{kind}")
        if _has_experts(spec):
            together = [key for key in stacked if stacked[key] == stacked.get(parameter)]
            yield from _expert_strips(spec, name, parameter, together or [parameter])
        else:
            yield Strip(spec.name, 0, name, 0, spec.shape[0])
        return
    K, order = model.head_channels, family.projections.order
    for row, (part, head) in enumerate(_projected(model, module)):
        match order:
            case "apart":
                names, their_block = family.projections.names[part], head
            case "parts":
                names, their_block = family.projections.names[0], part * model.n_heads + head
            case "heads":
                names, their_block = family.projections.names[0], 3 * head + part
        yield Strip(spec.name, row * K, f"{prefix}{names}.{kind}", their_block * K, K)


def _expert_strips(
    spec: ParameterSpec, name: str, parameter: str, together: Sequence[str]
) -> Iterator[Strip]:
    """Yield a strip for each expert's rows of the parameter `spec`, called `parameter` within a
    layer. If `name` contains `{expert}`, each expert has a tensor with that number. Otherwise
    `name` is one tensor, in which an expert's block holds the rows of each parameter in `together`,
    in order."""
    E, n_rows = spec.shape[:2]
    for expert in range(E):
        theirs = name.format(expert=expert)
        row = (expert * len(together) + together.index(parameter)) * n_rows
        yield Strip(spec.name, expert * n_rows, theirs, row if theirs == name else 0, n_rows)


def _projected(model: ModelConfig, module: str) -> Iterator[tuple[int, int]]:
    """Yield (part, head) for each block of K rows (K is the head size) in the pentameter projection
    `module`, in row order; part 0 is queries, 1 keys, 2 values."""
    parts = projections(model)[module.rpartition(".")[2]]
    n_heads = model.n_heads if 0 in parts else model.kv_heads
    return ((part, head) for head in range(n_heads) for part in parts)
