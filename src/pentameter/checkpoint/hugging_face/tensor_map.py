"""Conversion between the tensors of a family (a Hugging Face architecture) and pentameter's, by the
tables of its `Family`.

Tensors correspond in strips: rows in a pentameter tensor are rows in one of the family's. A fused
matrix whose rows are in another order is many strips, head by head. A region is computed from the
strips that overlap it, so nothing else is read. Rows that no strip fills are zero: biases that one
side has and the other lacks.

Shapes: D d_model, H heads, G KV heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

    @staticmethod
    def of(family: Family, model: ModelConfig) -> TensorMap:
        """Build the map between the tensors of `model` and those of the family that expresses
        it."""
        biases = dict.fromkeys(family.not_needed & {"bias", "qkv_bias"}, True)
        whole = model.model_copy(update={**biases, "vocab_multiple": 1})
        table = parameter_table(whole)
        strips = tuple(strip for spec in table for strip in _strips(family, whole, spec))
        specs = {spec.name: spec for spec in table}
        shapes: dict[str, tuple[int, ...]] = {}
        transposed = set()
        for strip in strips:
            spec = specs[strip.ours]
            n_rows = max(strip.their_row + strip.n_rows, shapes.get(strip.theirs, (0,))[0])
            shapes[strip.theirs] = (n_rows, *spec.shape[1:])
            if family.transposed and spec.is_block_matrix:
                transposed.add(strip.theirs)
        for name in transposed:
            shapes[name] = shapes[name][::-1]
        ours = {spec.name: spec.shape for spec in table}
        return TensorMap(strips, ours, shapes, frozenset(transposed))

    def to_theirs(self, weights: Weights) -> dict[str, LazyTensor]:
        """Return the family's tensors, name → lazy tensor in the stored layout, each region
        computed from pentameter's `weights` at access."""
        dtype = next(iter(weights.values())).dtype
        sources: dict[str, list[RowSource]] = {name: [] for name in self.their_shapes}
        for strip in self.strips:
            if strip.ours in weights:
                source = RowSource(strip.their_row, weights[strip.ours], strip.row, strip.n_rows)
                sources[strip.theirs].append(source)
        return {
            name: LazyTensor(
                shape, dtype, partial(_fill, sources[name], is_transposed=name in self.transposed)
            )
            for name, shape in self.their_shapes.items()
        }

    def to_ours(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, LazyTensor]:
        """Return pentameter's tensors, name → lazy tensor in `dtype`, each region computed from the
        family's `tensors`, which must be complete and have the right shapes, at access."""
        sources: dict[str, list[RowSource]] = {name: [] for name in self.our_shapes}
        for strip in self.strips:
            there = tensors[strip.theirs]
            there = there.t() if strip.theirs in self.transposed else there
            source = RowSource(strip.row, there, strip.their_row, strip.n_rows)
            sources[strip.ours].append(source)
        return {
            name: LazyTensor(shape, dtype, partial(_fill, sources[name], is_transposed=False))
            for name, shape in self.our_shapes.items()
        }


def _fill(
    sources: Sequence[RowSource],
    target: torch.Tensor,
    region: tuple[slice, ...],
    *,
    is_transposed: bool,
) -> None:
    """Fill `target`, in place, with one region (start and stop per dimension), assembled from the
    rows in `sources`, which are transposed if `is_transposed`. Rows without a source are zero."""
    if is_transposed:
        target, region = target.t(), region[::-1]
    rows, *others = region
    target.zero_()
    for source in sources:
        start, stop = max(rows.start, source.row), min(rows.stop, source.row + source.n_rows)
        if start < stop:
            shift = source.source_row - source.row
            found = slice(start + shift, stop + shift)
            part = target.narrow(0, start - rows.start, stop - start)
            copy_region(part, source.tensor, (found, *others))


def _strips(family: Family, model: ModelConfig, spec: ParameterSpec) -> Iterator[Strip]:
    """Yield the strips that map a parameter's rows to the family's tensors."""
    module, _, kind = spec.name.rpartition(".")
    if spec.layer is None:
        name = family.head if module == "head" else f"{family.body}{family.names[module]}.{kind}"
        yield Strip(spec.name, 0, name, 0, spec.shape[0])
        return
    module = module.removeprefix(f"blocks.{spec.layer}.")
    prefix = f"{family.body}{family.layers}{spec.layer}."
    if module in family.names:
        yield Strip(spec.name, 0, f"{prefix}{family.names[module]}.{kind}", 0, spec.shape[0])
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


def _projected(model: ModelConfig, module: str) -> Iterator[tuple[int, int]]:
    """Yield (part, head) for each block of K rows (K is the head size) in the pentameter projection
    `module`, in row order; part 0 is queries, 1 keys, 2 values."""
    parts = projections(model)[module.rpartition(".")[2]]
    n_heads = model.n_heads if 0 in parts else model.kv_heads
    return ((part, head) for head in range(n_heads) for part in parts)
