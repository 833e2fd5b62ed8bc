"""The layout of a run: degrees of parallelism, the mesh of ranks, what divides which axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from pentameter.config.choices import (
    CHUNKS_OF_TIME,
    EXCHANGES_HEADS,
    SPLITS_BACKWARD,
    TURNS_BACK,
    look_up,
    refuse_unknown,
)
from pentameter.config.schema import (
    ContextMode,
    ModelConfig,
    ParallelConfig,
    ScheduleName,
    TensorMode,
)
from pentameter.errors import ConfigError, either, listed, nearest, nearest_divisors
from pentameter.planning.architecture import Axis, n_kv_heads

MESH_DIMENSIONS = ("pipeline", "data", "shard", "context", "depth", "row", "tensor")
"""Dimensions of the mesh, from far apart to close together: neighbouring ranks, which share a
machine, differ in `tensor`. `data` holds copies, `shard` parts of what ZeRO shares out; together
they divide the batch. `context` divides the time of each sequence. `depth` and `row` have several
processes in tensor modes of two and three dimensions, and divide the batch there."""

PARAMETER_DIMENSIONS = ("pipeline", "data", "shard", "row", "tensor")
"""Dimensions of the mesh that parameters lie on. Processes that divide time hold the same
parameters, as those that divide the batch do: here `context` is part of `shard` with ZeRO, and of
`data` without. So is `depth` in 2.5 dimensions; in three it divides parameters, and is part of
`row`."""

AXIS_DIMENSIONS: Mapping[Axis, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "context": ("context",),
    "time": ("context", "tensor"),
    "message": ("context", "tensor"),
}
"""Axis of a parameter or an activation → the mesh dimensions whose processes divide it, one after
the other; `tensor` divides `time` with `sequence` only, and a `message` where that leaves equal
parts. An axis that is not here is whole in every process."""

GRID_DIMENSIONS: Mapping[TensorMode, Mapping[Axis, tuple[str, ...]]] = {
    "2d": dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "embed"), ("tensor",)),
    "2.5d": dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "embed"), ("tensor",)),
    "3d": {
        **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), ("depth",)),
        "embed": ("tensor",),
    },
}
"""The same of activations in the other tensor modes, which leave `context`, `time` and `message` to
`context`, and divide rows of the batch over `depth` and `row`. In three dimensions rows of the
stream are so divided; rows of what is between two products of a layer over `tensor` and `row`."""

NOT_OF_A_LAYOUT = ("partition", "timeout_seconds")
"""Keys of `[parallel]` that a layout's text does not name."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; 1 (or ZeRO stage 0) means not used. One process is the default."""

    data: int = 1
    """Parts of the batch: copies × shards."""
    zero: int = 0
    replicate: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    context: int = 1
    context_mode: ContextMode = "ring"
    tensor_mode: TensorMode = "1d"
    tensor_depth: int = 1
    kv_copies: int = 1
    """Processes of `tensor` that compute the same heads of keys and values, where a model has fewer
    of them than `tensor`; no degree of its own, see `for_model`."""

    def for_model(self, model: ModelConfig) -> Layout:
        """The layout with what a model adds to it: `kv_copies`."""
        n, n_processes = n_kv_heads(model), self.tensor if self.tensor_mode == "1d" else 1
        return replace(self, kv_copies=n_processes // n if n_processes % n == 0 else 1)

    @property
    def world_size(self) -> int:
        """Processes the layout needs."""
        return math.prod(self.sizes.values())

    @property
    def shard(self) -> int:
        """Processes that share out what ZeRO shares."""
        return self.parameter_sizes["shard"]

    @property
    def n_stages(self) -> int:
        """Slices of the model in a row: several to a process of an interleaved pipeline."""
        return self.pipeline * self.virtual_stages

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Processes along each of MESH_DIMENSIONS, by name and in their order."""
        shard = self.data // self.replicate if self.zero else 1
        depth, row, tensor = grid_sizes(self.tensor_mode, self.tensor, self.tensor_depth)
        return {
            "pipeline": self.pipeline,
            "data": self.data // shard,
            "shard": shard,
            "context": self.context,
            "depth": depth,
            "row": row,
            "tensor": tensor,
        }

    @cached_property
    def parameter_sizes(self) -> dict[str, int]:
        """Processes along each of PARAMETER_DIMENSIONS, by name and in their order."""
        sizes = dict(self.sizes)
        copies = "shard" if self.zero else "data"
        sizes[copies] *= sizes.pop("context")
        sizes["row" if self.tensor_mode == "3d" else copies] *= sizes.pop("depth")
        return sizes

    @property
    def n_row_parts(self) -> int:
        """Parts that the rows of the batch are divided into: by data, and by tensor modes."""
        return self.data * self.sizes["depth"] * self.sizes["row"]

    @cached_property
    def divided_axes(self) -> dict[Axis, tuple[str, ...]]:
        """The axes that this layout divides, and the mesh dimensions that do: AXIS_DIMENSIONS,
        where such a dimension has several processes."""
        divided: dict[Axis, tuple[str, ...]] = {}
        table = AXIS_DIMENSIONS
        if self.tensor_mode != "1d":
            grid = GRID_DIMENSIONS[self.tensor_mode]
            table = {**AXIS_DIMENSIONS, "message": ("context",), **grid}
        for axis, dimensions in table.items():
            if axis == "kv_heads" and self.kv_copies > 1:
                continue  # a process has all rows of the matrix, and multiplies with some
            dividing = tuple(
                dimension
                for dimension in dimensions
                if self.sizes[dimension] > 1
                and (self.sequence or (axis, dimension) != ("time", "tensor"))
            )
            if dividing:
                divided[axis] = dividing
        return divided

    @cached_property
    def dividing_dimensions(self) -> tuple[str, ...]:
        """The mesh dimensions that divide some axis."""
        return tuple(dict.fromkeys(itertools.chain(*self.divided_axes.values())))

    def local_shape(
        self, shape: Shape, axes: Sequence[Axis], places: Mapping[str, int] | None = None
    ) -> Shape:
        """The shape of what the process at `places` has of a tensor whose dimensions run over
        `axes`; a mesh dimension that is left out is at 0, which has the largest part."""
        places = places or {}
        local = list(shape)
        for index, axis in enumerate(axes):
            if axis == "kv_heads" and self.kv_copies > 1:
                local[index] //= self.tensor // self.kv_copies
            for dimension in self.divided_axes.get(axis, ()):
                place = places.get(dimension, 0)
                local[index] = self._part(local[index], axis, dimension, place)
        return tuple(local)

    def cuts_messages(self, context_length: int) -> bool:
        """Whether the stream is whole in tensor-parallel processes, and each sends a part of it to
        the next pipeline stage."""
        time, message = (
            self.local_shape((context_length,), (axis,)) for axis in ("time", "message")
        )
        return self.pipeline > 1 and time != message

    def _part(self, n: int, axis: Axis, dimension: str, place: int) -> int:
        """The part of n that the process at a place of a dimension has. In three dimensions `row`
        cuts what `depth` has cut of a vocabulary, and all cuts are where both would cut at once."""
        size = self.sizes[dimension]
        if axis == "message" and n % size:
            return n
        if (axis, dimension) != ("vocab", "depth"):
            return part_size(n, size, place)
        most = part_size(n, size * self.sizes["row"], 0) * self.sizes["row"]
        return min(most, max(0, n - place * most))

    def parameter_divisions(self, axes: Sequence[Axis]) -> tuple[str | None, ...]:
        """For each dimension of a parameter the one of PARAMETER_DIMENSIONS that divides it in a
        tensor mode of several dimensions; None where it is whole. Positions are looked up alike by
        all rows, so only their channels are divided; what all heads share is whole."""
        if self.tensor_mode == "3d":
            of_axis: Mapping[Axis, str | None] = {"embed": "tensor", "position": None, "head": None}
            return tuple(of_axis.get(axis, "row") for axis in axes)
        if len(axes) == 1:
            return (None if axes[0] == "head" else "tensor",)
        return (None if axes[0] == "position" else "row", "tensor")

    def parameter_shape(
        self, shape: Shape, axes: Sequence[Axis], places: Mapping[str, int] | None = None
    ) -> Shape:
        """The shape of the part of a parameter at `places` of PARAMETER_DIMENSIONS, before ZeRO
        shards it; a dimension that is left out is at 0, which has the largest part."""
        if places:
            return self._parameter_shape(shape, axes, places)
        key = shape, tuple(axes)
        if key not in self._largest_shapes:
            self._largest_shapes[key] = self._parameter_shape(shape, axes, {})
        return self._largest_shapes[key]

    def _parameter_shape(
        self, shape: Shape, axes: Sequence[Axis], places: Mapping[str, int]
    ) -> Shape:
        if self.tensor_mode == "1d" and self.kv_copies > 1 and "kv_heads" in axes:
            return shape
        if self.tensor_mode == "1d":
            return self.local_shape(shape, axes, places)
        return tuple(
            n if name is None else part_size(n, self.parameter_sizes[name], places.get(name, 0))
            for n, name in zip(shape, self.parameter_divisions(axes), strict=True)
        )

    @cached_property
    def _largest_shapes(self) -> dict[tuple[Shape, tuple[Axis, ...]], Shape]:
        """`parameter_shape` without places, as far as it was asked for: layers are alike."""
        return {}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each of MESH_DIMENSIONS; ranks count them row by row."""
        return _places(rank, self.sizes)

    def parameter_coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each of PARAMETER_DIMENSIONS."""
        return _places(rank, self.parameter_sizes)

    def rank_of(self, **places: int) -> int:
        """The rank at a place of the mesh; dimensions that are left out are at 0."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + places.get(name, 0)
        return rank

    def data_index(self, rank: int) -> int:
        """The part of the batch that a rank computes, in 0 … n_row_parts - 1."""
        places, index = self.coordinates(rank), 0
        for name in ("data", "shard", "depth", "row"):
            index = index * self.sizes[name] + places[name]
        return index

    def rows(self, rank: int, batch_size: int) -> range:
        """Numbers, in the global batch of `batch_size`, of the rows that a rank computes."""
        n_rows = batch_size // self.n_row_parts
        first = self.data_index(rank) * n_rows
        return range(first, first + n_rows)

    def attention_rows(self, rank: int, batch_size: int) -> range:
        """Numbers of the rows that a rank has between two products of a layer: in three dimensions
        those that its mirror image, `depth` for `tensor`, has of the stream; else its own."""
        if self.tensor_mode != "3d":
            return self.rows(rank, batch_size)
        places = self.coordinates(rank)
        mirrored = {**places, "depth": places["tensor"], "tensor": places["depth"]}
        return self.rows(self.rank_of(**mirrored), batch_size)

    @property
    def chunks_of_time(self) -> int:
        """Pieces of each sequence that a process computes."""
        if self.context == 1:
            return 1
        key = "parallel.context_mode"
        return look_up(CHUNKS_OF_TIME, self.context_mode, key, "the layout")

    @property
    def exchanges_heads(self) -> bool:
        """Whether processes that divide time exchange it for heads."""
        mode, key = self.context_mode, "parallel.context_mode"
        return self.context > 1 and look_up(EXCHANGES_HEADS, mode, key, "the layout")

    def positions(self, context_place: int, context_length: int) -> tuple[range, ...]:
        """Positions in each sequence that the processes at `context_place` compute, in order.

        In a ring each has an early and a late chunk of 2 · context equal ones, so that all have as
        many earlier tokens to attend to (zig-zag); otherwise one piece.
        """
        n_chunks = self.chunks_of_time * self.context
        own = (context_place, n_chunks - 1 - context_place)[: self.chunks_of_time]
        size = context_length // n_chunks
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in own)

    def holder(self, position: int, context_length: int) -> tuple[int, int]:
        """The place along `context` of the processes that compute a position of each sequence, and
        its index among the positions that they compute."""
        for place in range(self.context):
            own = list(itertools.chain(*self.positions(place, context_length)))
            if position in own:
                return place, own.index(position)
        raise ValueError(f"position {position} is not in 0 … {context_length - 1}")

    def n_heads_here(self, n_heads: int) -> int:
        """Of so many heads those that a process computes, of all the time that it has."""
        return self.local_shape((n_heads,), ("heads",))[0]

    def n_kv_heads_here(self, n_heads: int) -> int:
        """Of so many heads of keys and values those that a process computes, of all the time that
        it has."""
        return self.local_shape((n_heads,), ("kv_heads",))[0]

    def stages_of(self, pipeline_index: int) -> tuple[int, ...]:
        """The stages that a process of the pipeline holds: every `pipeline`-th one, or of a V the
        one on the way there and the one on the way back."""
        if self.turns_back:
            return pipeline_index, self.n_stages - 1 - pipeline_index
        return tuple(range(pipeline_index, self.n_stages, self.pipeline))

    @property
    def turns_back(self) -> bool:
        """Whether the stages run through the pipeline's processes and back."""
        return look_up(TURNS_BACK, self.schedule, "parallel.schedule", "the layout")

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass is two: the gradients of inputs, then those of weights."""
        splits = look_up(SPLITS_BACKWARD, self.schedule, "parallel.schedule", "the layout")
        return splits and self.pipeline > 1

    @cached_property
    def place_of_stage(self) -> dict[int, int]:
        """The process of the pipeline that holds each stage."""
        return {stage: i for i in range(self.pipeline) for stage in self.stages_of(i)}

    def to_json(self) -> dict[str, Any]:
        """The degrees by name, as `train --dry-run` prints them."""
        return {name: value for name, value in asdict(self).items() if name != "kv_copies"}

    def degrees(self) -> dict[str, int]:
        """The degrees alone, which a checkpoint's manifest records."""
        return {name: value for name, value in self.to_json().items() if type(value) is int}

    def __str__(self) -> str:
        """The layout as it is written on a command line: what differs from one process."""
        plain = Layout().to_json()
        parts = [
            f"{name}={str(value).lower()}"
            for name, value in self.to_json().items()
            if value != plain[name]
        ]
        return ",".join(parts) or "data=1"


def parse_layout(text: str, *, also: Sequence[str] = ()) -> Layout:
    """The Layout that `data=2,tensor=2,pipeline=2,zero=3,schedule=1f1b` describes.

    What is left out is 1 (`zero` 0). Raises ConfigError for what cannot be, saying what can: `also`
    what else may stand where the text comes from.
    """
    return make_layout(parse_parallel(text, also=also))


def parse_parallel(
    text: str, base: ParallelConfig | None = None, *, also: Sequence[str] = ()
) -> ParallelConfig:
    """The `[parallel]` section that a layout's text describes; `data` is None where it is left out.
    What no layout names (`partition`, `timeout_seconds`) is that of `base`. Errors as
    `parse_layout`."""
    values: dict[str, Any] = {}
    known = [name for name in ParallelConfig.model_fields if name not in NOT_OF_A_LAYOUT]
    base = base or ParallelConfig()
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name not in known or not sign:
            names = [*known, *also]
            near = nearest(name, names)
            raise ConfigError(
                f"layout {text!r}: {part.strip()!r} must be NAME=VALUE with a name of: "
                f"{', '.join(names)}{f'; did you mean {near}?' if near else ''}"
            )
        if name in values:
            raise ConfigError(f"layout {text!r}: {name} stands there twice")
        values[name] = _value(text, name, value)
    try:
        return ParallelConfig(**{name: getattr(base, name) for name in NOT_OF_A_LAYOUT}, **values)
    except ValidationError as error:
        reasons = [
            f"{item['loc'][0]}={item['input']!r}: {item['msg']}"
            if item["loc"]
            else item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError(f"layout {text!r}: {'; '.join(reasons)}") from None


def _value(text: str, name: str, value: str) -> Any:
    if name in ("schedule", "context_mode", "tensor_mode"):
        return value
    if name == "sequence" and value.lower() in ("0", "1", "true", "false"):
        return value.lower() in ("1", "true")
    if value.isdecimal():
        return int(value)
    raise ConfigError(f"layout {text!r}: {name}={value!r} must be a whole number")


def grid_sizes(mode: TensorMode, tensor: int, depth: int) -> tuple[int, int, int]:
    """Processes along `depth`, `row` and `tensor` that `tensor` processes of a mode make up."""
    match mode:
        case "1d":
            return 1, 1, tensor
        case "2d" | "2.5d":
            q = math.isqrt(tensor // depth)
            return depth, q, q
        case "3d":
            edge = round(tensor ** (1 / 3))
            return edge, edge, edge
        case unknown:
            refuse_unknown(unknown, "parallel.tensor_mode", "the layout")


def _resolved_depth(parallel: ParallelConfig) -> int:
    """The depth of a configuration's tensor mode: its own, or the smallest above 1 that makes up
    `tensor`. Raises ConfigError, with the nearest numbers of processes that can be, for others."""
    mode, n, asked = parallel.tensor_mode, parallel.tensor, parallel.tensor_depth
    if n == 1:
        return 1
    depths = [1] if mode != "2.5d" else [asked] if asked is not None else range(2, n // 4 + 1)
    for depth in depths:
        sizes = grid_sizes(mode, n, depth)
        if math.prod(sizes) == n and (mode == "1d" or sizes[-1] > 1):
            return depth
    edges = range(2, n + 2)
    possible = {
        "2d": [q * q for q in edges],
        "2.5d": sorted({d * q * q for q in edges for d in ([asked] if asked else edges)}),
        "3d": [edge**3 for edge in edges],
    }[mode]
    near = [each for each in possible if each < n][-1:] + [each for each in possible if each > n][
        :1
    ]
    form = {"2d": "q · q", "2.5d": f"{asked or 'd'} · q · q", "3d": "l · l · l"}[mode]
    raise ConfigError(
        f"parallel.tensor={n} must be {form} for parallel.tensor_mode='{mode}'; nearest possible: "
        + listed(near)
    )


def make_layout(parallel: ParallelConfig, world_size: int | None = None) -> Layout:
    """The Layout that a configuration asks for, of `world_size` processes.

    Without `world_size`, `data` is the configuration's (1 when absent). Raises ConfigError where
    the degrees do not make up the number of processes.
    """
    sharing = ("context", "tensor", "pipeline")
    rest = math.prod(getattr(parallel, name) for name in sharing)
    degrees = [name for name in sharing if getattr(parallel, name) > 1]
    named = " × ".join(f"parallel.{name}={getattr(parallel, name)}" for name in degrees)
    lower = " ".join(f"--parallel.{name} 1" for name in degrees)
    are = "is" if world_size == 1 else "are"
    data = parallel.data
    if data is None:
        data, over = divmod(world_size or rest, rest)
        if over or data == 0:
            fitting = [n * rest for n in (data, data + 1) if n]
            raise ConfigError(
                f"{named} {'need' if len(degrees) > 1 else 'needs'} a multiple of {rest} "
                f"processes, there {are} {world_size}: start {either(fitting)} "
                f"({_starting(fitting[0])}), or lower a degree ({lower})"
            )
    elif world_size is not None and data * rest != world_size:
        raise ConfigError(
            f"parallel.data={data}{' × ' if named else ''}{named} {'need' if named else 'needs'} "
            f"{data * rest} processes, there {are} {world_size}: start {data * rest} "
            f"({_starting(data * rest)}), or leave parallel.data out to use those that are there"
        )
    if data % parallel.replicate:
        raise ConfigError(
            f"parallel.replicate={parallel.replicate} must divide parallel.data={data}; nearest "
            f"possible: {listed(nearest_divisors(data, parallel.replicate))}"
        )
    match parallel.zero:  # elsewhere it is compared as a number
        case 0 | 1 | 2 | 3:
            pass
        case unknown:
            refuse_unknown(unknown, "parallel.zero", "the layout")
    depth = _resolved_depth(parallel)
    copied = set(Layout.__dataclass_fields__) - {"data", "tensor_depth", "kv_copies"}
    values = parallel.model_dump(include=copied, warnings="none")
    layout = Layout(data=data, tensor_depth=depth, **values)
    if layout.tensor == 1:
        layout = replace(layout, tensor_mode="1d")
    if layout.context == 1:
        layout = replace(layout, context_mode="ring")
    return replace(layout, virtual_stages=1, schedule="1f1b") if layout.pipeline == 1 else layout


def part_size(n: int, n_parts: int, place: int) -> int:
    """Rows of the part at `place` of n rows: parts of ⌈n / n_parts⌉ each, as long as there are
    any. The first is the largest."""
    most = -(-n // n_parts)
    return min(most, max(0, n - place * most))


def stage_layers(
    n_layers: int, n_stages: int, first_weight: float = 0.0, last_weight: float = 0.0
) -> tuple[range, ...]:
    """Layer ranges of each pipeline stage, as even as can be; earlier stages take the remainder.

    Later stages also hold the head, so the extra layers of an uneven cut go to the front. The
    weights say how many layers the embedding and the head are worth: with them the slowest stage
    is as fast as possible, and of such cuts the most even one is taken. Each stage has a layer.
    """
    if not first_weight and not last_weight:
        size, rest = divmod(n_layers, n_stages)
        starts = [stage * size + min(stage, rest) for stage in range(n_stages + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(starts))
    counts = [1] * n_stages
    load = [1.0] * n_stages
    load[0] += first_weight
    load[-1] += last_weight
    for _ in range(n_layers - n_stages):  # to whoever is done first, the front before the back
        stage = min(range(n_stages), key=lambda index: (load[index], index))
        counts[stage] += 1
        load[stage] += 1
    starts = [0, *itertools.accumulate(counts)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def _places(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """The place of a rank along dimensions of these sizes; ranks count them row by row."""
    places: dict[str, int] = {}
    for name, size in reversed(sizes.items()):
        rank, places[name] = divmod(rank, size)
    return {name: places[name] for name in sizes}


def _starting(n_processes: int) -> str:
    return f"--nproc {n_processes}, or torchrun's --nproc-per-node"
