"""A run's layout: degrees of parallelism, the device mesh, and the batch rows and positions on each
rank."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
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
from pentameter.config.messages import shown
from pentameter.config.schema import Config, ContextMode, ParallelConfig, ScheduleName, TensorMode
from pentameter.errors import ConfigError, did_you_mean, either, listed, nearest_divisors

MESH_DIMENSIONS = ("pipeline", "data", "shard", "context", "depth", "row", "tensor")
"""The device mesh's dimensions, outermost first. Neighbouring ranks, which are on the same machine,
differ in `tensor`. `shard` holds ZeRO's shards and `data` the replicas; together they split the
batch. `context` splits each sequence. `depth` and `row` have more than one rank only in tensor
modes with two or three dimensions, and split the batch there."""

BATCH_DIMENSIONS = ("data", "shard", "depth", "row")
"""Mesh dimensions whose ranks have different batch rows, outermost first."""

PARAMETER_DIMENSIONS = ("pipeline", "data", "shard", "row", "tensor")
"""Mesh dimensions for parameter placement. Ranks that split the sequence hold the same parameters,
as ranks that split the batch do: `context` is folded into `shard` with ZeRO, and into `data`
without. `depth` is folded likewise in mode 2.5d; in mode 3d it shards parameters, and is folded
into `row`."""

EXPERT_DIMENSIONS = ("pipeline", "expert_data", "expert_shard", "expert", "expert_tensor")
"""Mesh dimensions for the placement of experts that `parallel.expert` or `parallel.expert_tensor`
shard: another factorization of the ranks in a pipeline stage, outermost first. `expert` shards the
experts, `expert_tensor` each expert's matrices; the rest holds replicas in `expert_data`, which
ZeRO shards over `expert_shard`."""

MOST_DIGITS = 100
"""Most digits of a degree in a layout's text; Python refuses to read thousands."""

NOT_OF_A_LAYOUT = ("partition", "timeout_seconds")
"""Keys in `[parallel]` that are not part of a layout's text (`data=2,tensor=2`)."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, as in `[parallel]`; a frozen record. A degree of 1, or ZeRO stage 0,
    means that it is not used. The default is a single rank."""

    data: int = 1
    """Data-parallel degree: replicas × ZeRO shards."""
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
    expert: int = 1
    expert_tensor: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks that the layout needs."""
        return math.prod(self.sizes.values())

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank computes with the whole model, though ZeRO may shard it: without
        tensor and pipeline parallelism. Context parallelism is allowed."""
        sizes = self.parameter_sizes
        return sizes["data"] * sizes["shard"] == self.world_size and not self.shards_experts

    @property
    def shards_experts(self) -> bool:
        """Whether ranks hold different experts, or different shards of an expert's matrices. Tokens
        are then sent to them, and experts lie along EXPERT_DIMENSIONS."""
        return self.expert * self.expert_tensor > 1

    @property
    def n_stages(self) -> int:
        """Pipeline stages in total: `pipeline` × `virtual_stages`, the stages per rank."""
        return self.pipeline * self.virtual_stages

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Maps each of MESH_DIMENSIONS, in that order, to the number of ranks along it."""
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
        """Maps each of PARAMETER_DIMENSIONS, in that order, to the number of ranks along it."""
        sizes = dict(self.sizes)
        replicas = "shard" if self.zero else "data"
        sizes[replicas] *= sizes.pop("context")
        sizes["row" if self.is_3d else replicas] *= sizes.pop("depth")
        return sizes

    @cached_property
    def expert_sizes(self) -> dict[str, int]:
        """Maps each of EXPERT_DIMENSIONS, in that order, to the number of ranks along it. With
        ZeRO, the number of experts' replicas is the largest that divides both `replicate` and the
        ranks that are left for them."""
        left = self.world_size // (self.pipeline * self.expert * self.expert_tensor)
        replicas = math.gcd(self.replicate, left) if self.zero else left
        sizes = (self.pipeline, replicas, left // replicas, self.expert, self.expert_tensor)
        return dict(zip(EXPERT_DIMENSIONS, sizes, strict=True))

    @cached_property
    def placement_sizes(self) -> dict[str, int]:
        """Maps each dimension along which parameters are placed to the number of ranks along it:
        PARAMETER_DIMENSIONS, and EXPERT_DIMENSIONS if the layout shards experts."""
        return self.parameter_sizes | (self.expert_sizes if self.shards_experts else {})

    @property
    def is_grid(self) -> bool:
        """Whether the tensor mode is not `1d`: ranks along `depth`, `row` and `tensor` then shard
        matrices in 2, 2.5 or 3 dimensions."""
        return self.tensor_mode != "1d"

    @property
    def is_3d(self) -> bool:
        """Whether the tensor mode is 3-D, in which depth and tensor swap roles from matmul to
        matmul."""
        return self.tensor_mode == "3d"

    @property
    def grid_width(self) -> str:
        """The mesh dimension that shards heads, feed-forward width and vocabulary between a layer's
        two matmuls: `depth` in mode 3d, else `tensor`."""
        return "depth" if self.is_3d else "tensor"

    @property
    def grid_setting(self) -> str:
        """The tensor mode as a setting, for error messages: `parallel.tensor_mode='2d'`."""
        return f"parallel.tensor_mode='{self.tensor_mode}'"

    @property
    def n_batch_shards(self) -> int:
        """Equal shards into which the global batch is split: `data` × `depth` × `row`, the last two
        being 1 in tensor mode 1d."""
        return self.data * self.sizes["depth"] * self.sizes["row"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each of MESH_DIMENSIONS, by name; ranks are in row-major
        order."""
        return _coordinates(rank, self.sizes)

    def parameter_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each dimension in `placement_sizes`, by name."""
        experts = _coordinates(rank, self.expert_sizes) if self.shards_experts else {}
        return _coordinates(rank, self.parameter_sizes) | experts

    def rank_of(self, **coordinates: int) -> int:
        """Return the rank at mesh coordinates; an omitted dimension has coordinate 0."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def ranks_along(self, dimension: str, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` only along one of MESH_DIMENSIONS, ordered by
        their coordinate there."""
        own = self.coordinates(rank)
        return [self.rank_of(**{**own, dimension: each}) for each in range(self.sizes[dimension])]

    def data_index(self, rank: int) -> int:
        """Return the number of the batch shard that a rank computes, in 0 … n_batch_shards - 1."""
        coordinates, index = self.coordinates(rank), 0
        for name in BATCH_DIMENSIONS:
            index = index * self.sizes[name] + coordinates[name]
        return index

    def rows(self, rank: int, batch_size: int) -> range:
        """Return the batch rows that a rank computes, as indices into the global batch (batch_size
        rows)."""
        n_rows = batch_size // self.n_batch_shards
        first = self.data_index(rank) * n_rows
        return range(first, first + n_rows)

    def attention_rows(self, rank: int, batch_size: int) -> range:
        """Return the batch rows that a rank computes between a layer's two matmuls, in attention
        for example, as indices into the global batch of `batch_size` rows. They equal `rows`,
        except in tensor mode 3d, where matmuls move rows between ranks: there they are the rows of
        the rank with `depth` and `tensor` coordinates swapped."""
        if not self.is_3d:
            return self.rows(rank, batch_size)
        coordinates = self.coordinates(rank)
        mirrored = {**coordinates, "depth": coordinates["tensor"], "tensor": coordinates["depth"]}
        return self.rows(self.rank_of(**mirrored), batch_size)

    @property
    def chunks_of_time(self) -> int:
        """Chunks that one rank computes from each sequence: 2 in a context-parallel ring; 1 with
        all-to-all, or without context parallelism."""
        mode, key = self.context_mode, "parallel.context_mode"
        return 1 if self.context == 1 else look_up(CHUNKS_OF_TIME, mode, key, "the layout")

    @property
    def has_ring(self) -> bool:
        """Whether keys and values travel round a ring of ranks."""
        return self.context > 1 and not self.exchanges_heads

    @property
    def exchanges_heads(self) -> bool:
        """Whether context-parallel ranks exchange sequence shards for head shards (mode all-to-all)
        instead of passing keys and values round a ring; False without context parallelism."""
        mode, key = self.context_mode, "parallel.context_mode"
        return self.context > 1 and look_up(EXCHANGES_HEADS, mode, key, "the layout")

    def positions(self, context_place: int, context_length: int) -> tuple[range, ...]:
        """Return the positions in each sequence that ranks with `context` coordinate
        `context_place` compute, as ranges in order, one per chunk.

        In a ring, the sequence has 2 · context equal chunks and each rank has an early and a late
        one, so that all ranks attend to equally many earlier tokens (zig-zag). In other modes each
        rank has one contiguous chunk.
        """
        n_chunks = self.chunks_of_time * self.context
        chunks = (context_place, n_chunks - 1 - context_place)[: self.chunks_of_time]
        size = context_length // n_chunks
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)

    def holder(self, position: int, context_length: int) -> tuple[int, int]:
        """Return (coordinate, index): the `context` coordinate whose ranks compute a position in
        each sequence, and the position's index among their local ones. Raises ValueError for a
        position outside the context."""
        for coordinate in range(self.context):
            local = list(itertools.chain(*self.positions(coordinate, context_length)))
            if position in local:
                return coordinate, local.index(position)
        raise ValueError(f"position {position} is not in 0 … {context_length - 1}")

    def stages_of(self, pipeline_index: int) -> tuple[int, ...]:
        """Return the stage numbers on the ranks with `pipeline` coordinate `pipeline_index`: every
        `pipeline`-th stage, beginning with that number. In a V schedule, two stages:
        `pipeline_index`, and its mirror `n_stages` - 1 - `pipeline_index`."""
        if self.turns_back:
            return pipeline_index, self.n_stages - 1 - pipeline_index
        return tuple(range(pipeline_index, self.n_stages, self.pipeline))

    @property
    def turns_back(self) -> bool:
        """Whether stages run down the pipeline's ranks and back up, so that the first rank has the
        first and the last stage: schedule `zero-bubble-v`."""
        return look_up(TURNS_BACK, self.schedule, "parallel.schedule", "the layout")

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass is split in two, first the inputs' gradients, then the
        weights': with a zero-bubble schedule in a pipeline."""
        splits = look_up(SPLITS_BACKWARD, self.schedule, "parallel.schedule", "the layout")
        return splits and self.pipeline > 1

    @cached_property
    def pipeline_rank_of_stage(self) -> dict[int, int]:
        """Maps each stage number to the `pipeline` coordinate whose ranks run it."""
        return {stage: i for i in range(self.pipeline) for stage in self.stages_of(i)}

    def to_json(self) -> dict[str, Any]:
        """Return every field by name, as `train --dry-run` prints them."""
        return asdict(self)

    def degrees(self) -> dict[str, int]:
        """Return the fields that are integers, by name, which a checkpoint's manifest records."""
        return {name: value for name, value in self.to_json().items() if type(value) is int}

    def __str__(self) -> str:
        """Format the layout as on a command line, `data=2,tensor=2`: the values that differ from a
        single rank's, or `data=1`."""
        plain = Layout().to_json()
        changed = [
            f"{name}={str(value).lower()}"
            for name, value in self.to_json().items()
            if value != plain[name]
        ]
        return ",".join(changed) or "data=1"


BEST = "best"
"""The word on a command line for the layout that a search chooses."""


def layout_overrides(layout: str | None) -> dict[str, Any]:
    """Return a layout's text as configuration overrides, `parallel.KEY` → value for every degree;
    empty for None. For `best`, return a placeholder (ZeRO stage 1) that passes the checks on any
    configuration, until the search replaces it."""
    if layout is None:
        return {}
    if layout == BEST:
        return {"parallel.zero": 1}
    chosen = parse_parallel(layout, also=[BEST]).model_dump(exclude=set(NOT_OF_A_LAYOUT))
    return {f"parallel.{name}": value for name, value in chosen.items()}


def layout_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a configuration that state its layout, its micro-batch and its
    activation checkpointing."""
    values = {f"parallel.{name}": value for name, value in config.parallel.model_dump().items()}
    for name in ("micro_batch_size", "activation_checkpoint"):
        values[f"train.{name}"] = getattr(config.train, name)
    return values


def parse_layout(text: str, *, also: Sequence[str] = ()) -> Layout:
    """Return the Layout for text such as `data=2,tensor=2,pipeline=2,zero=3,schedule=1f1b`.

    Omitted degrees are 1 (`zero` 0). Raises ConfigError for an unknown name or an impossible value,
    naming the possible ones. `also` lists names that the caller accepts besides, such as
    `micro_batches`; only that message uses them.
    """
    return make_layout(parse_parallel(text, also=also))


def parse_parallel(
    text: str, base: ParallelConfig | None = None, *, also: Sequence[str] = ()
) -> ParallelConfig:
    """Return the `[parallel]` section for a layout's text; `data` is None if omitted. `partition`
    and `timeout_seconds` are not in the text: they are taken from `base`, or are the defaults if
    `base` is None. Raises ConfigError for an unknown or repeated name or an impossible value;
    `also` lists names that the message adds to the possible ones."""
    values: dict[str, Any] = {}
    known = [name for name in ParallelConfig.model_fields if name not in NOT_OF_A_LAYOUT]
    base = base or ParallelConfig()
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name not in known or not sign:
            names = [*known, *also]
            raise ConfigError(
                f"layout {text!r}: {part.strip()!r} must be NAME=VALUE with a name of: "
                f"{', '.join(names)}{did_you_mean(name, names)}"
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
    if value.isdecimal() and len(value) <= MOST_DIGITS:
        return int(value)
    raise ConfigError(
        f"layout {shown(text)}: {name}={shown(value)} must be a whole number of at most "
        f"{MOST_DIGITS} digits"
    )


def grid_sizes(mode: TensorMode, tensor: int, depth: int) -> tuple[int, int, int]:
    """Return the number of ranks along (`depth`, `row`, `tensor`) when `tensor` ranks form a grid:
    (1, 1, tensor) in 1d; (depth, q, q) in 2d and 2.5d, with q² = tensor ÷ depth; (l, l, l) in 3d,
    with l³ = tensor. `depth` is ignored in 1d and 3d. Sizes are rounded: the caller checks that
    their product is `tensor`."""
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


def _fitting_depth(mode: TensorMode, n: int, asked: int | None) -> int | None:
    """Return the depth of the grid that `n` ranks form in this tensor mode; None if `n` ranks form
    no such grid. `asked` is the configured depth; if it is None, the smallest depth above 1 that
    fits is taken (`_resolved_depth`)."""
    depths = [1]
    if mode == "2.5d":
        edges = range(math.isqrt(n // 2), 1, -1)  # the largest edge has the smallest depth
        depths = [asked] if asked else [n // (q * q) for q in edges if n % (q * q) == 0]
    for depth in depths:
        sizes = grid_sizes(mode, n, depth)
        if math.prod(sizes) == n and (mode == "1d" or sizes[-1] > 1):
            return depth
    return None


def _resolved_depth(parallel: ParallelConfig) -> int:
    """Return the grid's depth for a tensor mode: in 2.5d the configured one, or the smallest above
    1 that fits the `tensor` ranks; 1 in other modes. Raises ConfigError, with the nearest possible
    rank counts, if the ranks form no such grid."""
    mode, n, asked = parallel.tensor_mode, parallel.tensor, parallel.tensor_depth
    if n == 1:
        return 1
    depth = _fitting_depth(mode, n, asked)
    if depth is not None:
        return depth
    # From 8 on, every fourth number is a grid of mode 2.5d if no depth is asked for.
    edge = max(1, round((n // (asked or 1)) ** (1 / 3 if mode == "3d" else 1 / 2)))
    possible: Iterable[int] = {
        "2d": [q * q for q in range(edge - 1, edge + 2)],
        "2.5d": [asked * q * q for q in range(edge - 1, edge + 2)]
        if asked
        else range(n - 4, n + 9),
        "3d": [q**3 for q in range(edge - 1, edge + 2)],
    }[mode]
    fits = [each for each in possible if each > 1 and _fitting_depth(mode, each, asked) is not None]
    near = [each for each in fits if each < n][-1:] + [each for each in fits if each > n][:1]
    form = {"2d": "q · q", "2.5d": f"{asked or 'd'} · q · q", "3d": "l · l · l"}[mode]
    raise ConfigError(
        f"parallel.tensor={n} must be {form} for parallel.tensor_mode='{mode}'; nearest possible: "
        + listed(near)
    )


def make_layout(parallel: ParallelConfig, world_size: int | None = None) -> Layout:
    """Return the Layout for a `[parallel]` section on `world_size` ranks (None: as many as the
    section implies). If `data` is left open, it is `world_size` ÷ (context × tensor × pipeline), or
    1 if `world_size` is None. A mode without effect becomes the default: `tensor_mode` if tensor =
    1, `context_mode` if context = 1, `schedule` and `virtual_stages` if pipeline = 1.

    Raises ConfigError if the product over all degrees is not `world_size`, if `replicate` does not
    divide `data`, or if `tensor` ranks do not form the grid that `tensor_mode` needs.
    """
    model_parallel = ("context", "tensor", "pipeline")
    rest = math.prod(getattr(parallel, name) for name in model_parallel)
    degrees = [name for name in model_parallel if getattr(parallel, name) > 1]
    named = " × ".join(f"parallel.{name}={getattr(parallel, name)}" for name in degrees)
    lower = " ".join(f"--parallel.{name} 1" for name in degrees)
    are = "is" if world_size == 1 else "are"
    data = parallel.data
    n_expert_ranks = parallel.expert * parallel.expert_tensor
    if data is None:
        if world_size is None:  # as many as the experts need
            world_size = (
                rest * n_expert_ranks // math.gcd(rest // parallel.pipeline, n_expert_ranks)
            )
        data, over = divmod(world_size, rest)
        if over or data == 0:
            fitting = [n * rest for n in (data, data + 1) if n]
            raise ConfigError(
                f"{named} {'need' if len(degrees) > 1 else 'needs'} a multiple of {rest} "
                f"processes, there {are} {world_size}: start {either(fitting)} "
                f"({_launcher(fitting[0])}), or lower a degree ({lower})"
            )
    elif world_size is not None and data * rest != world_size:
        raise ConfigError(
            f"parallel.data={data}{' × ' if named else ''}{named} {'need' if named else 'needs'} "
            f"{data * rest} processes, there {are} {world_size}: start {data * rest} "
            f"({_launcher(data * rest)}), or leave parallel.data out to use those that are there"
        )
    if data % parallel.replicate:
        raise ConfigError(
            f"parallel.replicate={parallel.replicate} must divide parallel.data={data}; nearest "
            f"possible: {listed(nearest_divisors(data, parallel.replicate))}"
        )
    _check_expert_degrees(parallel, data * rest // parallel.pipeline)
    match parallel.zero:  # other code compares it as a number
        case 0 | 1 | 2 | 3:
            pass
        case unknown:
            refuse_unknown(unknown, "parallel.zero", "the layout")
    depth = _resolved_depth(parallel)
    copied = set(Layout.__dataclass_fields__) - {"data", "tensor_depth"}
    values = parallel.model_dump(include=copied, warnings="none")
    layout = Layout(data=data, tensor_depth=depth, **values)
    if layout.tensor == 1:
        layout = replace(layout, tensor_mode="1d")
    if layout.context == 1:
        layout = replace(layout, context_mode="ring")
    return replace(layout, virtual_stages=1, schedule="1f1b") if layout.pipeline == 1 else layout


def _check_expert_degrees(parallel: ParallelConfig, n_ranks: int) -> None:
    """Raise ConfigError unless the degrees of experts divide the `n_ranks` ranks in a pipeline
    stage."""
    n_expert_ranks = parallel.expert * parallel.expert_tensor
    if n_ranks % n_expert_ranks == 0:
        return
    degrees = ("expert", "expert_tensor")
    named = " × ".join(
        f"parallel.{name}={value}" for name in degrees if (value := getattr(parallel, name)) > 1
    )
    raise ConfigError(
        f"{named} must divide the {n_ranks} process{'' if n_ranks == 1 else 'es'} of "
        "parallel.data × parallel.context × parallel.tensor; nearest possible: "
        f"{listed(nearest_divisors(n_ranks, n_expert_ranks))}, or start more processes (--nproc)"
    )


def exchange_ranks(layout: Layout, rank: int) -> list[int]:
    """Return the ranks that exchange tokens with `rank`, ordered by their coordinates along
    `expert` and `expert_tensor`: together they hold every expert once."""
    n_ranks = layout.expert * layout.expert_tensor
    first = rank - rank % n_ranks
    return list(range(first, first + n_ranks))


def activation_ranks(layout: Layout, rank: int) -> dict[str, list[int]]:
    """Return, for each mesh dimension that shards activations, the ranks with which `rank` shares
    them, ordered by their coordinate along it. The dimensions are `context`, a grid's `depth`,
    `row` and `tensor`, and `expert` (`exchange_ranks`), if they have several ranks. `tensor` in
    mode 1d is in `placement_ranks`."""
    in_grid = ("depth", "row", "tensor") if layout.is_grid else ()
    found = {
        dimension: layout.ranks_along(dimension, rank)
        for dimension in ("context", *in_grid)
        if layout.sizes[dimension] > 1
    }
    return found | ({"expert": exchange_ranks(layout, rank)} if layout.shards_experts else {})


def placement_ranks(layout: Layout, rank: int) -> list[dict[str, list[int]]]:
    """Return, for each mesh dimension along which parameters are placed, the ranks that differ from
    `rank` only along it, ordered by their coordinate there. The first dict has
    PARAMETER_DIMENSIONS; if the layout shards experts, a second one has EXPERT_DIMENSIONS."""
    found: list[dict[str, list[int]]] = []
    meshes = [layout.parameter_sizes]
    if layout.shards_experts:
        meshes.append(layout.expert_sizes)
    for sizes in meshes:
        ranks_along: dict[str, list[int]] = {}
        stride = 1  # distance between neighbours along a dimension, the innermost first
        for name, size in reversed(sizes.items()):
            first = rank - rank // stride % size * stride
            ranks_along[name] = [first + index * stride for index in range(size)]
            stride *= size
        found.append({name: ranks_along[name] for name in sizes})
    return found


def stage_layers(
    n_layers: int, n_stages: int, first_weight: float = 0.0, last_weight: float = 0.0
) -> tuple[range, ...]:
    """Return each pipeline stage's layer range; every stage has a layer. With weights of 0 the
    split is as even as possible, and earlier stages take the remainder, because the last one also
    holds the head.

    first_weight, last_weight: the embedding's and the head's cost, in units of one layer. With
        them, the slowest stage is as fast as possible; of equally fast splits the most even one is
        chosen.
    """
    if not first_weight and not last_weight:
        size, rest = divmod(n_layers, n_stages)
        starts = [stage * size + min(stage, rest) for stage in range(n_stages + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(starts))
    counts = [1] * n_stages
    load = [1.0] * n_stages
    load[0] += first_weight
    load[-1] += last_weight
    least = [(each, stage) for stage, each in enumerate(load)]
    heapq.heapify(least)
    for _ in range(n_layers - n_stages):  # next to the least loaded stage, earlier stages first
        each, stage = least[0]
        counts[stage] += 1
        heapq.heapreplace(least, (each + 1, stage))
    starts = [0, *itertools.accumulate(counts)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Return a rank's coordinate along each dimension in `sizes` (name → ranks), in row-major
    order."""
    coordinates: dict[str, int] = {}
    for name, size in reversed(sizes.items()):
        rank, coordinates[name] = divmod(rank, size)
    return {name: coordinates[name] for name in sizes}


def _launcher(n_processes: int) -> str:
    return f"--nproc {n_processes}, or torchrun's --nproc-per-node"
