"""ZeRO's shards of parameters, the units that FSDP gathers together, and the tables of stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pentameter.config.schema import Config
from pentameter.planning.adapters import training_table
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.layout import Layout, Shape, part_size

ROOT = ""
"""The unit of what is in no block's attention or feed-forward layer: embeddings, norms, head."""


def shard_elements(shape: Shape, n_shards: int, place: int) -> int:
    """Numbers in the shard at `place` of a tensor that is divided by its first dimension."""
    return part_size(shape[0], n_shards, place) * math.prod(shape[1:])


def gathered_elements(shape: Shape, n_shards: int) -> int:
    """Numbers that a process receives to have such a tensor whole: shards are padded to the
    largest, so that all send the same."""
    return n_shards * shard_elements(shape, n_shards, 0)


def units(specs: Sequence[ParameterSpec]) -> dict[str, list[ParameterSpec]]:
    """FSDP's units of a stage, whose parameters are gathered and reduced together: each attention
    and each feed-forward layer, in the order in which they run, norms within them for themselves,
    and at last the rest, ROOT."""
    found: dict[str, list[ParameterSpec]] = {}
    rest: list[ParameterSpec] = []
    for spec in specs:
        pieces = spec.name.split(".")  # blocks.3.attention.qkv.weight
        in_unit = pieces[0] == "blocks" and pieces[2] in ("attention", "mlp")
        depth = 4 if pieces[3:4] in (["q_norm"], ["k_norm"]) else 3
        (found.setdefault(".".join(pieces[:depth]), []) if in_unit else rest).append(spec)
    return {**found, ROOT: rest}


def is_rounded(unit: str) -> bool:
    """Whether a unit's parameters are rounded before they are gathered, as products alone read
    them."""
    return unit != ROOT and not unit.endswith("_norm")


def stage_tables(
    config: Config, layout: Layout, stages: Sequence[range], pipeline_index: int
) -> Iterator[tuple[int, tuple[ParameterSpec, ...]]]:
    """Number and parameters of each stage that a process of the pipeline holds, each parameter in
    the first that has it."""
    held: set[str] = set()
    for number in layout.stages_of(pipeline_index):
        layers = stages[number]
        table = training_table(config, first_layer=layers.start, last_layer=layers.stop)
        yield number, tuple(spec for spec in table if spec.name not in held)
        held.update(spec.name for spec in table)


def alike_places(layout: Layout, stages: Sequence[range]) -> list[list[int]]:
    """The processes of a pipeline, those together that hold as many layers and the same ends of the
    model in each stage."""
    last = layout.n_stages - 1
    found: dict[object, list[int]] = {}
    for place in range(layout.pipeline):
        numbers = layout.stages_of(place)
        key = tuple((len(stages[n]), n == 0, n == last, (n - 1) in numbers) for n in numbers)
        found.setdefault(key, []).append(place)
    return list(found.values())
