"""Conversion between the tensors of a family (a Hugging Face architecture) and pentameter's, by the
tables of its `Family`.

Tensors correspond in strips: rows in a pentameter tensor are rows in one of the family's. A fused
matrix whose rows are in another order is many strips, head by head; a strip may be every other row
of a tensor. A region is computed from the strips that overlap it, so nothing else is read. Rows
that no strip fills are zero: biases that the family has and the model lacks.

A tensor with a matrix for each expert, (E experts, rows, columns), counts as its matrices one below
the other, (E · rows, columns). So it corresponds to one tensor with as many rows, to a tensor for
each expert, or to every other block of rows, and single experts are read by their rows.

Shapes: D d_model, H heads, G KV heads, K head size.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pentameter.checkpoint.format.lazy_tensors import LazyTensor, copy_region
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.gpt import parameter_table
from pentameter.planning.sub_layers.attention import projections

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.folders.model_folder import Weights


@dataclass(frozen=True)
class Strip:
    """A correspondence of rows: some rows of the tensor `ours`, named as in this package, equal as
    many rows of the tensor `theirs` of a Hugging Face family (before any transposition), in the
    same order."""

    ours: str
    rows: range
    theirs: str
    their_rows: range


@dataclass(frozen=True)
class RowSource:
    """The source of some rows of a tensor: its `rows` are copied from the rows `source_rows`, as
    many, of `tensor`."""

    rows: range
    tensor: torch.Tensor | LazyTensor
    source_rows: range


@dataclass(frozen=True)
class TensorMap:
    """The map between a model's tensors here and those of a Hugging Face family, as a list of
    strips (rows that correspond to each other)."""

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
        """Build the map between the tensors of `model` and those of `family`, which must be able to
        express it. With `is_stacked`, a layer's experts lie in common tensors, named by
        `family.stacked`; otherwise each expert's matrix is a tensor by itself."""
        # The state of balancing is of training, unless the family says otherwise.
        whole = model.updated({"vocab_multiple": 1, "router.balance": "none", **family.read})
        table = parameter_table(whole)
        stacked, present = family.stacked if is_stacked else {}, {spec.name for spec in table}
        strips: list[Strip] = []
        shapes: dict[str, tuple[int, ...]] = {}
        transposed: set[str] = set()
        n_experts: dict[str, int] = {}
        for spec in table:
            for strip in _strips(family, whole, spec, stacked, present):
                strips.append(strip)
                n_rows = max(strip.their_rows[-1] + 1, shapes.get(strip.theirs, (0,))[0])
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
                sources[strip.theirs].append(RowSource(strip.their_rows, found, strip.rows))
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
            sources[strip.ours].append(RowSource(strip.rows, found, strip.their_rows))
        return self._assembled(self.our_shapes, sources, dtype)

    def _as_rows(self, name: str, tensor: torch.Tensor | LazyTensor) -> torch.Tensor | LazyTensor:
        """Return a tensor as the matrix in which strips count rows. A tensor that is stored
        transposed is transposed back, and experts' matrices (E, rows, columns) are put one below
        the other, (E · rows, columns)."""
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
            fill = partial(_fill, sorted(sources[name], key=lambda source: source.rows.start))
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
    rows, *columns = region
    target.zero_()
    first = bisect_left(sources, rows.start, key=lambda source: source.rows[-1])
    for source in itertools.islice(sources, first, None):
        if source.rows.start >= rows.stop:
            break
        asked = slice(bisect_left(source.rows, rows.start), bisect_left(source.rows, rows.stop))
        if filled := source.rows[asked]:
            start, last = filled[0] - rows.start, filled[-1] - rows.start
            part = target[start : last + 1 : filled.step]
            _copy_rows(part, source.tensor, source.source_rows[asked], columns)


def _copy_rows(
    target: torch.Tensor, source: torch.Tensor | LazyTensor, rows: range, columns: Sequence[slice]
) -> None:
    """Fill `target`, in place, with the given rows and columns (start and stop per dimension) of
    `source`. Rows that are not adjacent are read one by one, and those between them not at all."""
    if rows.step == 1:
        copy_region(target, source, (slice(rows.start, rows.stop), *columns))
        return
    for number, row in enumerate(rows):
        copy_region(target.narrow(0, number, 1), source, (slice(row, row + 1), *columns))


def _has_experts(spec: ParameterSpec) -> bool:
    """Return True if a parameter has a matrix, or a bias, for each expert: its first axis is
    experts."""
    return spec.axes[0] == "experts"


def _strips(
    family: Family,
    model: ModelConfig,
    spec: ParameterSpec,
    stacked: Mapping[str, str],
    present: Collection[str],
) -> Iterator[Strip]:
    """Yield the strips that map a parameter's rows to the family's tensors. `stacked` maps a
    parameter's name within a layer to the tensor in which all experts lie; empty if each expert's
    matrix is a tensor by itself. `present` are the names of all of the model's parameters."""
    module, _, kind = spec.name.rpartition(".")
    if spec.layer is None:
        name = family.head if module == "head" else f"{family.body}{family.names[module]}.{kind}"
        yield _same_rows(spec, name)
        return
    module = module.removeprefix(f"blocks.{spec.layer}.")
    prefix = f"{family.body}{family.layers}{spec.layer}."
    if module in family.names:
        parameter = f"{module}.{kind}"
        apart = family.names.get(parameter, f"{family.names[module]}.{kind}")
        name = prefix + stacked.get(parameter, apart)
        if _has_experts(spec):
            together = [key for key in stacked if stacked[key] == stacked.get(parameter)]
            yield from _expert_strips(spec, name, parameter, together or [parameter])
        else:
            before = itertools.takewhile(lambda each: each != module, family.names)
            together = [each for each in before if family.names[each] == family.names[module]]
            path = f"blocks.{spec.layer}."
            n_before = sum(f"{path}{each}.{kind}" in present for each in together)
            yield _same_rows(spec, name, n_before)
        return
    if family.projections.order == "latent":
        yield from _latent_strips(family, model, spec, module, prefix)
        return
    K, n_heads = model.head_channels, model.attention.n_heads
    heads_before = (0, n_heads, n_heads + model.attention.kv_heads)
    names, order = family.projections.names, family.projections.order
    for row, (part, head) in enumerate(_projected(model, module)):
        block_in = {"apart": head, "parts": heads_before[part] + head, "heads": 3 * head + part}
        name, their_block = names[part if order == "apart" else 0], block_in[order]
        theirs = range(their_block * K, their_block * K + K)
        yield Strip(spec.name, range(row * K, row * K + K), f"{prefix}{name}.{kind}", theirs)


def _same_rows(spec: ParameterSpec, name: str, n_before: int = 0) -> Strip:
    """Return the Strip for the simplest case: the rows of the parameter `spec` here are rows of the
    tensor `name` of the Hugging Face family, in the same order: all of them, or those after
    `n_before` other parameters of the same shape."""
    n = spec.shape[0]
    return Strip(spec.name, range(n), name, range(n_before * n, (n_before + 1) * n))


def _latent_strips(
    family: Family, model: ModelConfig, spec: ParameterSpec, module: str, prefix: str
) -> Iterator[Strip]:
    """Yield the strips for `module`, a projection of latent attention with rotated channels:
    `latent_attention.q`, where each head has its rows, or `latent_attention.kv_down`, which is like
    a single head.

    The last R rows of each head are rotated in pairs: rows i and i + R / 2 here, neighbors in the
    family's tensor.
    """
    from_stream, from_latent, kv_down = family.projections.names
    name, n_plain = kv_down, model.latent_channels
    if module == "latent_attention.q":
        name = from_stream if model.attention.q_rank is None else from_latent
        n_plain = model.head_channels
    theirs, R = f"{prefix}{name}.{spec.name.rpartition('.')[2]}", model.rope_channels
    for start in range(0, spec.shape[0], n_plain + R):
        first, stop = start + n_plain, start + n_plain + R
        plain, half = range(start, first), first + R // 2
        yield Strip(spec.name, plain, theirs, plain)
        yield Strip(spec.name, range(first, half), theirs, range(first, stop, 2))
        yield Strip(spec.name, range(half, stop), theirs, range(first + 1, stop, 2))


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
        row = row if theirs == name else 0
        rows = range(expert * n_rows, (expert + 1) * n_rows)
        yield Strip(spec.name, rows, theirs, range(row, row + n_rows))


def _projected(model: ModelConfig, module: str) -> Iterator[tuple[int, int]]:
    """Yield (part, head) for each block of K rows of the projection `module` in this package, in
    row order. part is 0 for queries, 1 for keys and 2 for values, head the number of the head; K is
    the head size."""
    parts = projections(model)[module.rpartition(".")[2]]
    n_heads = model.attention.n_heads if 0 in parts else model.attention.kv_heads
    return ((part, head) for head in range(n_heads) for part in parts)
