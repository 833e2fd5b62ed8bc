"""The layout of a run: degrees of parallelism, the mesh of ranks, what divides which axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig, ParallelConfig, ScheduleName
from pentameter.errors import ConfigError, nearest, nearest_divisors
from pentameter.planning.architecture import Axis, even_sizes, padded_vocab_size

MESH_DIMENSIONS = ("pipeline", "data", "shard", "context", "tensor")
"""Dimensions of the mesh, from far apart to close together: neighbouring ranks, which share a
machine, differ in `tensor`. `data` holds copies, `shard` parts of what ZeRO shares out; together
they divide the batch."""

AXIS_DIMENSIONS: Mapping[Axis, str] = {
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "time": "tensor",
}
"""Axis of a parameter or an activation → the mesh dimension whose processes divide it; `time` is
divided with `sequence` only. An axis that is not here is whole in every process."""

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
    """Always 1: no engine divides the context yet. plan.json and checkpoints record it."""

    @property
    def world_size(self) -> int:
        """Processes the layout needs."""
        return math.prod(self.sizes.values())

    @property
    def shard(self) -> int:
        """Processes that share out what ZeRO shares."""
        return self.data // self.replicate if self.zero else 1

    @property
    def n_stages(self) -> int:
        """Slices of the model in a row: several to a process of an interleaved pipeline."""
        return self.pipeline * self.virtual_stages

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Processes along each of MESH_DIMENSIONS, by name and in their order."""
        return {
            "pipeline": self.pipeline,
            "data": self.data // self.shard,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of MESH_DIMENSIONS."""
        return tuple(self.sizes.values())

    @cached_property
    def divided_axes(self) -> dict[Axis, str]:
        """The axes that this layout divides, and the mesh dimension that does: AXIS_DIMENSIONS,
        where that dimension has several processes."""
        sizes = self.sizes
        return {
            axis: dimension
            for axis, dimension in AXIS_DIMENSIONS.items()
            if sizes[dimension] > 1 and (axis != "time" or self.sequence)
        }

    def local_shape(
        self, shape: Shape, axes: Sequence[Axis], places: Mapping[str, int] | None = None
    ) -> Shape:
        """The shape of what the process at `places` has of a tensor whose dimensions run over
        `axes`; a mesh dimension that is left out is at 0, which has the largest part."""
        divided, sizes, places = self.divided_axes, self.sizes, places or {}
        return tuple(
            part_size(n, sizes[divided[axis]], places.get(divided[axis], 0))
            if axis in divided
            else n
            for n, axis in zip(shape, axes, strict=True)
        )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each of MESH_DIMENSIONS; ranks count them row by row."""
        places: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, places[name] = divmod(rank, size)
        return places

    def rank_of(self, **places: int) -> int:
        """The rank at a place of the mesh; dimensions that are left out are at 0."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + places.get(name, 0)
        return rank

    def data_index(self, rank: int) -> int:
        """The part of the batch that a rank computes, in 0 … data - 1."""
        places = self.coordinates(rank)
        return places["data"] * self.shard + places["shard"]

    def rows(self, rank: int, batch_size: int) -> range:
        """Numbers, in the global batch of `batch_size`, of the rows that a rank computes."""
        n_rows = batch_size // self.data
        first = self.data_index(rank) * n_rows
        return range(first, first + n_rows)

    def stages_of(self, pipeline_index: int) -> tuple[int, ...]:
        """The stages that a process of the pipeline holds: every `pipeline`-th one."""
        return tuple(range(pipeline_index, self.n_stages, self.pipeline))

    def to_json(self) -> dict[str, Any]:
        """The degrees by name, as `train --dry-run` prints them."""
        return asdict(self)

    def degrees(self) -> dict[str, int]:
        """The degrees alone, which a checkpoint's manifest records."""
        return {name: value for name, value in asdict(self).items() if type(value) is int}

    def __str__(self) -> str:
        """The layout as it is written on a command line: what differs from one process."""
        plain = asdict(Layout())
        parts = [
            f"{name}={str(value).lower()}"
            for name, value in asdict(self).items()
            if value != plain[name]
        ]
        return ",".join(parts) or "data=1"


def parse_layout(text: str, world_size: int | None = None, *, also: Sequence[str] = ()) -> Layout:
    """The Layout that `data=2,tensor=2,pipeline=2,zero=3,schedule=1f1b` describes.

    What is left out is 1 (`zero` 0); `data` may be left out where `world_size` is given: it is
    that divided by the rest. Raises ConfigError for what cannot be, saying what can: `also` what
    else may stand where the text comes from.
    """
    values: dict[str, Any] = {}
    known = [name for name in ParallelConfig.model_fields if name != "partition"]
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name == "context" and value == "1":
            continue
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
        parallel = ParallelConfig(**values)
    except ValidationError as error:
        reasons = [
            f"{item['loc'][0]}={item['input']!r}: {item['msg']}"
            if item["loc"]
            else item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError(f"layout {text!r}: {'; '.join(reasons)}") from None
    return make_layout(parallel, world_size)


def _value(text: str, name: str, value: str) -> Any:
    if name == "schedule":
        return value
    if name == "sequence" and value.lower() in ("0", "1", "true", "false"):
        return value.lower() in ("1", "true")
    if value.isdecimal():
        return int(value)
    raise ConfigError(f"layout {text!r}: {name}={value!r} must be a whole number")


def make_layout(parallel: ParallelConfig, world_size: int | None = None) -> Layout:
    """The Layout that a configuration asks for, of `world_size` processes.

    Without `world_size`, `data` is the configuration's (1 when absent). Raises ConfigError where
    the degrees do not make up the number of processes.
    """
    rest = parallel.tensor * parallel.pipeline
    degrees = [name for name in ("tensor", "pipeline") if getattr(parallel, name) > 1]
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
                f"processes, there {are} {world_size}: start {_or(fitting)} "
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
            f"possible: {_listed(nearest_divisors(data, parallel.replicate))}"
        )
    match parallel.zero:  # elsewhere it is compared as a number
        case 0 | 1 | 2 | 3:
            pass
        case unknown:
            refuse_unknown(unknown, "parallel.zero", "the layout")
    copied = set(Layout.__dataclass_fields__) - {"data"}
    values = parallel.model_dump(include=copied, warnings="none")
    layout = Layout(data=data, **values)
    return replace(layout, virtual_stages=1, schedule="1f1b") if layout.pipeline == 1 else layout


def check_layout(layout: Layout, model: ModelConfig, local_size: int | None = None) -> None:
    """Raise ConfigError unless a model can be cut so, naming the values that are possible.

    `local_size` is the number of processes in each machine, where it is known.
    """
    for dimension in dict.fromkeys(layout.divided_axes.values()):
        _check_division(layout, model, dimension)
    t = layout.tensor
    if local_size is not None and local_size % t:
        raise ConfigError(
            f"parallel.tensor={t} must divide the {local_size} processes of a machine, as its "
            "processes exchange every layer's activations; possible: "
            + _listed(_divisors(local_size))
        )
    if layout.n_stages > model.n_layers:
        each = f" × parallel.virtual_stages={layout.virtual_stages}"
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline}{each if layout.virtual_stages > 1 else ''} makes "
            f"{layout.n_stages} stages of model.n_layers={model.n_layers} layers; at most "
            f"{model.n_layers} are possible"
        )


def _check_division(layout: Layout, model: ModelConfig, dimension: str) -> None:
    """Raise ConfigError unless a mesh dimension can divide its axes: those of `even_sizes` into
    equal parts, the vocabulary so that every process has rows."""
    n = layout.sizes[dimension]
    axes = [axis for axis, divider in layout.divided_axes.items() if divider == dimension]
    even = even_sizes(model)
    sizes = {k: v for axis in axes for k, v in even.get(axis, {}).items()}
    for key, size in sizes.items():
        if size % n:
            raise ConfigError(
                f"parallel.{dimension}={n} must divide model.{key}={size}; possible: "
                + _listed(_divisors(math.gcd(*sizes.values())))
            )
    if "vocab" in axes and model.vocab_size is not None:
        n_rows = padded_vocab_size(model)
        if not part_size(n_rows, n, n - 1):
            raise ConfigError(
                f"parallel.{dimension}={n} cuts the {n_rows} rows of the vocabulary into parts of "
                f"{part_size(n_rows, n, 0)}, which leaves the last process none; pad it: "
                f"--model.vocab-multiple {n}"
            )
    if "time" in axes and model.context_length % n:
        raise ConfigError(
            f"parallel.sequence=true: parallel.{dimension}={n} must divide model.context_length="
            f"{model.context_length}; nearest possible: "
            f"{_listed(nearest_divisors(model.context_length, n))}"
        )


def check_micro_batches(layout: Layout, n_micro_batches: int, micro_batch_size: int) -> None:
    """Raise ConfigError unless the pipeline's schedule can take so many micro-batches.

    1F1B fills the pipeline before it alternates between forward and backward; schedules that
    alternate between stages too work in rounds of `pipeline` micro-batches.
    """
    if layout.pipeline == 1:
        return
    match layout.schedule:
        case "gpipe":
            pass
        case "1f1b" if n_micro_batches < layout.pipeline:
            remedy = "lower train.micro_batch_size"
            if n_micro_batches * micro_batch_size < layout.pipeline:
                least = layout.data * layout.pipeline
                remedy = f"raise train.batch_size to {least}, or lower parallel.data or pipeline"
            raise ConfigError(
                f"parallel.schedule='1f1b' over parallel.pipeline={layout.pipeline} processes "
                f"takes at least as many micro-batches, there are {n_micro_batches}; {remedy}, or "
                "use 'gpipe'"
            )
        case "1f1b":
            pass
        case "interleaved" | "zero-bubble":
            rounds = max(1, n_micro_batches // layout.pipeline)
            if n_micro_batches % rounds:
                raise ConfigError(
                    f"parallel.schedule='{layout.schedule}' takes {n_micro_batches} micro-batches "
                    f"in {rounds} equal rounds: choose train.micro_batch_size so that they are a "
                    f"multiple of parallel.pipeline={layout.pipeline}, or fewer than twice as many"
                )
        case unknown:
            refuse_unknown(unknown, "parallel.schedule", "the layout")


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


def _starting(n_processes: int) -> str:
    return f"--nproc {n_processes}, or torchrun's --nproc-per-node"


def _divisors(n: int) -> Sequence[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def _or(values: Any) -> str:
    return " or ".join(map(str, values))
