"""The mesh dimensions that shard each axis: local activation shapes, and parameters' Placements.

Local shapes, DTensor placements, gradient sums after the backward pass, memory and communication
estimates and divisibility checks all read these two tables and this one function from (layout,
parameter).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import Axis, ParameterSpec
from pentameter.planning.layouts.layout import EXPERT_DIMENSIONS, PARAMETER_DIMENSIONS, Layout

AXIS_DIMENSIONS: Mapping[Axis, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "context": ("context",),
    "time": ("context", "tensor"),
    "message": ("context", "tensor"),
    "routed": ("context", "tensor"),
    "received": ("context", "tensor"),
    "experts": ("expert",),
    "expert_mlp": ("expert_tensor",),
}
"""Maps a logical axis to the mesh dimensions that shard it, outermost first. `tensor` shards `time`
only with `sequence`, `routed` and `received` also where experts are sharded, and `message` only if
it splits into equal shards. A missing axis is replicated on every rank."""

GRID_AXES: tuple[Axis, ...] = ("vocab", "heads", "kv_heads", "mlp")
"""Activation axes that a grid shards by `layout.grid_width`, besides `embed`, which it shards by
`tensor`. It shards `context`, `time` and `message` by `context` only, and the batch by `depth` and
`row`. In mode 3d this applies to the residual stream's batch rows; between a layer's two matmuls,
`tensor` and `row` shard the batch."""

NOT_IN_A_GRID: frozenset[Axis] = frozenset({"position", "head"})
"""Parameter axes that no grid shards: position embeddings are replicated, as all batch rows look
them up. Otherwise `row` shards a matrix's rows and `tensor` shards its columns and any vector; in
mode 3d `tensor` shards `embed`, and `row` everything else."""

Shape = tuple[int, ...]
DataSum = Literal["none", "ddp", "fsdp", "after_backward"]


@dataclass(frozen=True)
class Placement:
    """One parameter's placement on the mesh, a frozen record: the mesh dimensions that shard it,
    those that sum its gradient, and when. They are from PARAMETER_DIMENSIONS, or for sharded
    experts from EXPERT_DIMENSIONS."""

    sharded_by: tuple[tuple[str, ...], ...]
    """For each dimension of the parameter, the mesh dimensions that shard it, outermost first; ()
    if none does."""
    summed_over: tuple[str, ...]
    """Mesh dimensions over which the gradient is all-reduced after the backward pass. Their ranks
    hold replicas of the parameter, and compute its gradient from different tokens or heads. Along a
    dimension that is neither here nor in `fsdp_over` or `ddp_over`, replicas get equal
    gradients."""
    fsdp_over: tuple[str, ...] = ()
    """Mesh dimensions over which FSDP reduces the gradient during the backward pass: `shard`, along
    which ZeRO shards the parameter, preceded by `data` if those shards have replicas (HSDP). For
    sharded experts `expert_shard` and `expert_data`."""
    ddp_over: tuple[str, ...] = ()
    """Mesh dimensions over which DDP all-reduces the gradient during a step's last backward
    pass."""

    def dimension(self, mesh_dimension: str) -> int | None:
        """Return the index of the tensor dimension that a mesh dimension shards; None if that mesh
        dimension replicates the parameter. ZeRO's sharding along `shard` is not included."""
        for index, dimensions in enumerate(self.sharded_by):
            if mesh_dimension in dimensions:
                return index
        return None

    @property
    def zero_dimension(self) -> str | None:
        """The mesh dimension along which ZeRO shards the parameter; None without ZeRO."""
        return self.fsdp_over[-1] if self.fsdp_over else None

    @property
    def is_whole(self) -> bool:
        """Whether every rank in the parameter's pipeline stage holds all of it, apart from ZeRO's
        sharding."""
        return not any(self.sharded_by)


@dataclass(frozen=True)
class Sharding:
    """The shards of one model's activations and parameters in a layout, a frozen record. Of the
    model only the number of key and value heads is needed."""

    layout: Layout
    n_kv_heads: int
    _largest_shapes: dict[object, Shape] = field(default_factory=dict, compare=False, repr=False)
    """Caches local shapes at coordinate 0, which a layout search asks for by the hundred
    thousand."""
    _placements: dict[object, Placement] = field(default_factory=dict, compare=False, repr=False)
    """Caches placements by (axes, sums_over), because layers are alike."""

    @property
    def kv_replicas(self) -> int:
        """Ranks along `tensor` that compute the same key and value head: `tensor` ÷ `n_kv_heads` if
        that is a whole number and the tensor mode is 1d, else 1."""
        n_ranks = 1 if self.layout.is_grid else self.layout.tensor
        return n_ranks // self.n_kv_heads if n_ranks % self.n_kv_heads == 0 else 1

    @cached_property
    def sharded_axes(self) -> dict[Axis, tuple[str, ...]]:
        """Maps each activation axis that is sharded to the mesh dimensions that shard it, outermost
        first."""
        layout, table = self.layout, AXIS_DIMENSIONS
        if layout.is_grid:
            grid: dict[Axis, tuple[str, ...]] = dict.fromkeys(GRID_AXES, (layout.grid_width,))
            table = {**table, "message": ("context",), **grid, "embed": ("tensor",)}
        whole_tokens: tuple[Axis, ...] = () if layout.sequence else ("time",)
        if not layout.sequence and not layout.shards_experts:
            whole_tokens += ("routed", "received")
        found = {}
        for axis, dimensions in table.items():
            several = (name for name in dimensions if self._sizes[name] > 1)
            chosen = tuple(n for n in several if n != "tensor" or axis not in whole_tokens)
            are_replicated = axis == "kv_heads" and self.kv_replicas > 1  # by some ranks
            if chosen and not are_replicated:
                found[axis] = chosen
        return found

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Maps each mesh dimension that may shard an activation to its number of ranks."""
        return self.layout.expert_sizes | self.layout.sizes

    @cached_property
    def sharding_dimensions(self) -> tuple[str, ...]:
        """The mesh dimensions that shard at least one activation axis."""
        return tuple(dict.fromkeys(itertools.chain(*self.sharded_axes.values())))

    @property
    def loss_replicas(self) -> tuple[str, ...]:
        """Mesh dimensions along which every rank computes the same loss: those that shard the
        vocabulary, as their ranks exchange sums over it. () if none does."""
        return self.sharded_axes.get("vocab", ())

    def local_shape(
        self, shape: Shape, axes: Sequence[Axis], coordinates: Mapping[str, int] | None = None
    ) -> Shape:
        """Return an activation's local shape on the rank at mesh `coordinates`, given its global
        `shape`, with one logical axis per dimension in `axes`. A mesh dimension that `coordinates`
        omits (None: all) has coordinate 0, which holds the largest shard."""
        coordinates = coordinates or {}
        local = list(shape)
        for index, axis in enumerate(axes):
            if axis == "kv_heads" and self.kv_replicas > 1:
                local[index] //= self.n_kv_heads
            if axis == "received":  # every rank that has a shard of an expert gets the row
                local[index] *= self.layout.expert_tensor
            for dimension in self.sharded_axes.get(axis, ()):
                local[index] = self._shard(
                    local[index], axis, dimension, coordinates.get(dimension, 0)
                )
        return tuple(local)

    def n_heads_here(self, n_heads: int) -> int:
        """Return how many of the model's `n_heads` attention heads one rank computes while it
        attends, for all the tokens that it has."""
        return self.local_shape((n_heads,), ("heads",))[0]

    @property
    def n_kv_heads_here(self) -> int:
        """Key and value heads that one rank computes, for all its tokens."""
        return self.local_shape((self.n_kv_heads,), ("kv_heads",))[0]

    def shards_messages(self, context_length: int) -> bool:
        """Return whether tensor-parallel ranks shard the activation that a pipeline stage sends to
        the next one. Each rank then holds the whole residual stream, but sends only an equal block
        of its tokens; the receiving ranks all-gather the blocks. So it is in a pipeline with tensor
        mode 1d, without `sequence`, if `tensor` divides the tokens on a rank."""
        time, message = (
            self.local_shape((context_length,), (axis,)) for axis in ("time", "message")
        )
        return self.layout.pipeline > 1 and time != message

    def placement(self, spec: ParameterSpec) -> Placement:
        """Return a parameter's Placement: the mesh dimensions that shard it, and those that sum its
        gradient."""
        key = spec.axes, spec.sums_over
        if key not in self._placements:
            self._placements[key] = _placement_of(self, spec.axes, spec.sums_over)
        return self._placements[key]

    def n_zero_shards(self, spec: ParameterSpec) -> int:
        """Return the number of shards in which ZeRO splits a parameter; 1 without ZeRO."""
        dimension = self.placement(spec).zero_dimension
        return 1 if dimension is None else self.layout.placement_sizes[dimension]

    def zero_index(self, spec: ParameterSpec) -> int:
        """Return the index of the parameter's dimension along which ZeRO splits it. This is 0, but
        for an experts' parameter with fewer experts than shards it is the next one that splits
        evenly, since along 0 most ranks would get nothing."""
        shape, n_shards = self.parameter_shape(spec), self.n_zero_shards(spec)
        if "experts" not in spec.axes or shape[0] >= n_shards:
            return 0
        return next((i for i, size in enumerate(shape) if i and size % n_shards == 0), 0)

    def zero_elements(
        self, spec: ParameterSpec, coordinates: Mapping[str, int] | None = None
    ) -> int:
        """Return how many of a parameter's elements the rank at `coordinates` holds between steps,
        its shard with ZeRO; an omitted dimension has coordinate 0, which holds the most."""
        local = list(self.parameter_shape(spec, coordinates))
        dimension = self.placement(spec).zero_dimension
        if dimension is not None and local:
            index, n_shards = self.zero_index(spec), self.n_zero_shards(spec)
            local[index] = shard_size(local[index], n_shards, (coordinates or {}).get(dimension, 0))
        return math.prod(local)

    def gathered_elements(
        self, spec: ParameterSpec, coordinates: Mapping[str, int] | None = None
    ) -> int:
        """Return how many elements the rank at `coordinates` receives when it all-gathers a
        parameter from ZeRO's shards. Shards are padded to the largest, so that all ranks send
        equally much."""
        dimension = self.placement(spec).zero_dimension
        first = {} if dimension is None else {dimension: 0}
        return self.n_zero_shards(spec) * self.zero_elements(spec, {**(coordinates or {}), **first})

    def parameter_shape(
        self, spec: ParameterSpec, coordinates: Mapping[str, int] | None = None
    ) -> Shape:
        """Return a parameter's local shape on the rank at `coordinates`, as
        `layout.parameter_coordinates` returns them, before ZeRO shards it. A dimension that
        `coordinates` omits (None: all) has coordinate 0, which holds the largest shard."""
        if coordinates:
            return self._parameter_shape(spec, coordinates)
        key = spec.shape, spec.axes, spec.sums_over
        if key not in self._largest_shapes:
            self._largest_shapes[key] = self._parameter_shape(spec, {})
        return self._largest_shapes[key]

    def _parameter_shape(self, spec: ParameterSpec, coordinates: Mapping[str, int]) -> Shape:
        local = list(spec.shape)
        for index, dimensions in enumerate(self.placement(spec).sharded_by):
            for dimension in dimensions:
                size = self.layout.placement_sizes[dimension]
                local[index] = shard_size(local[index], size, coordinates.get(dimension, 0))
        return tuple(local)

    @property
    def data_sum(self) -> DataSum:
        """The way gradients are summed over the ranks that compute different batch rows or sequence
        chunks, except those of sharded experts. `fsdp`: reduce-scattered to ZeRO's shards. `ddp`:
        without ZeRO, all-reduced by DDP during a step's last backward pass. `after_backward`:
        without ZeRO but with tensor, expert or pipeline parallelism, all-reduced by us, since DDP
        knows neither DTensors nor a pipeline's schedule. `none`: there is nothing to sum."""
        layout = self.layout
        if layout.zero:
            return "fsdp"
        if layout.parameter_sizes["data"] == 1:
            return "none"
        return "ddp" if layout.is_data_parallel else "after_backward"

    def _shard(self, n: int, axis: Axis, dimension: str, coordinate: int) -> int:
        """Return how many of an axis's n entries the rank at `coordinate` along a mesh dimension
        holds. The axis `message`, the tokens of a message between pipeline stages, stays whole if
        it does not split evenly.

        In tensor mode 3d two dimensions shard a vocabulary: `depth`, then `row` within its shard.
        The size along `depth` is the sum over its `row` shards, which are equal except the last.
        """
        size = self._sizes[dimension]
        if axis == "message" and n % size:
            return n
        if (axis, dimension) != ("vocab", "depth"):
            return shard_size(n, size, coordinate)
        row = self.layout.sizes["row"]
        most = shard_size(n, size * row, 0) * row
        return min(most, max(0, n - coordinate * most))


def _placement_of(
    sharding: Sharding, axes: tuple[Axis, ...], sums_over: tuple[Axis, ...]
) -> Placement:
    """Return the Placement of a parameter: the mesh dimensions that shard it, and those that sum
    its gradient.

    axes: the logical axis along each of its dimensions.
    sums_over: the axes over which its gradient is a sum, such as the tokens.
    """
    layout, sizes = sharding.layout, sharding.layout.parameter_sizes
    if "experts" in axes and layout.shards_experts:
        return _placement_of_experts(sharding, axes, sums_over)
    if not layout.is_grid:
        sharded_by = tuple(sharding.sharded_axes.get(axis, ()) for axis in axes)
        # A rank's gradient covers its own shard of every axis that the gradient sums over.
        # `context` is not among these dimensions: it is summed together with the data dimension.
        summed = {"heads" if axis == "kv_heads" else axis for axis in (*axes, *sums_over)}
        partial = set(itertools.chain(*(sharding.sharded_axes.get(axis, ()) for axis in summed)))
        replicas = [name for name in PARAMETER_DIMENSIONS if name in partial]
    else:
        sharded_by = _placement_in_a_grid(layout, axes)
        # Every rank in a grid computes a distinct block of every activation.
        replicas = [name for name in ("row", "tensor") if sizes[name] > 1]
    held = set(itertools.chain(*sharded_by))
    summed_over = tuple(name for name in replicas if name not in held)
    match sharding.data_sum:
        case "none":
            return Placement(sharded_by, summed_over=summed_over)
        case "fsdp":
            fsdp_over = ("data", "shard") if sizes["data"] > 1 else ("shard",)
            return Placement(sharded_by, summed_over=summed_over, fsdp_over=fsdp_over)
        case "ddp":
            return Placement(sharded_by, summed_over=summed_over, ddp_over=("data",))
        case "after_backward":
            return Placement(sharded_by, summed_over=(*summed_over, "data"))


def _placement_of_experts(
    sharding: Sharding, axes: tuple[Axis, ...], sums_over: tuple[Axis, ...]
) -> Placement:
    """Return the Placement of a parameter of experts that are sharded over ranks, along
    EXPERT_DIMENSIONS. `axes` and `sums_over` are as for `_placement_of`. Ranks that hold replicas
    of it get the rows of different tokens, so that its gradient is summed over them."""
    layout, sharded_axes = sharding.layout, sharding.sharded_axes
    sharded_by = tuple(sharded_axes.get(axis, ()) for axis in axes)
    partial = set(itertools.chain(*(sharded_axes.get(axis, ()) for axis in sums_over)))
    held = set(itertools.chain(*sharded_by))
    summed_over = tuple(name for name in EXPERT_DIMENSIONS if name in partial - held)
    replicas = ("expert_data",) if layout.expert_sizes["expert_data"] > 1 else ()
    if layout.zero:
        return Placement(sharded_by, summed_over, fsdp_over=(*replicas, "expert_shard"))
    return Placement(sharded_by, summed_over=(*summed_over, *replicas))


def _placement_in_a_grid(layout: Layout, axes: tuple[Axis, ...]) -> tuple[tuple[str, ...], ...]:
    """Return, for each axis of a tensor, the mesh dimensions along which it is sharded, in a
    tensor-parallel mode of two or three dimensions (2d, 2.5d, 3d). `axes` names the tensor's axes;
    one that is not sharded gets (). The result is a Placement's `sharded_by`."""
    if layout.is_3d:
        dimensions = ["tensor" if axis == "embed" else "row" for axis in axes]
    else:
        dimensions = ["row"] * (len(axes) - 1) + ["tensor"]
    return tuple(
        () if axis in NOT_IN_A_GRID else (dimension,)
        for axis, dimension in zip(axes, dimensions, strict=True)
    )


@lru_cache(maxsize=4096)
def _sharding(layout: Layout, n_kv: int) -> Sharding:
    return Sharding(layout, n_kv)


def sharding_of(layout: Layout, model: ModelConfig) -> Sharding:
    """Return the Sharding (how activations and parameters are sharded) for a model under a
    layout."""
    return _sharding(layout, model.attention.kv_heads)


def shard_size(n: int, n_shards: int, coordinate: int) -> int:
    """Return the shard size at `coordinate` when n elements are split into `n_shards` shards with
    up to ⌈n / n_shards⌉ elements. The first shard is the largest; trailing shards may be smaller or
    empty."""
    most = -(-n // n_shards)
    return min(most, max(0, n - coordinate * most))
