"""FSDP's units, and parameter tables per pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pentameter.config.schema import Config, ModelConfig
from pentameter.planning.adapters import training_table
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.layouts.layout import Layout

ROOT = ""
"""Name of the FSDP unit for parameters outside any sub-layer: embeddings, last norm, head."""


def units(specs: Sequence[ParameterSpec]) -> dict[str, list[ParameterSpec]]:
    """Group a stage's parameters as FSDP gathers and reduces them: return unit's name → its
    parameters. Each sub-layer is a unit, in the order of execution. Norms, routers, and what every
    token takes beside the experts, are units of their own. All others form the unit ROOT, which
    comes last."""
    found: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        names = spec.name.split(".")  # blocks.LAYER.SUB_LAYER.MODULE.weight
        is_norm = len(spec.shape) == 1 and names[-1] == "weight"
        is_apart = is_norm or bool({"router", "shared", "shared_gate"} & set(names[3:4]))
        unit = names[: 4 if is_apart else 3] if spec.layer is not None and len(names) > 4 else []
        found.setdefault(".".join(unit), []).append(spec)
    rest = found.pop(ROOT, [])
    return {**found, ROOT: rest}


def is_rounded(unit: str) -> bool:
    """Whether the parameters of the FSDP unit with this name are rounded to the matmul dtype before
    they are gathered, because only matmuls read them."""
    return unit != ROOT and not unit.endswith(("_norm", ".router"))


def stage_tables(
    config: Config, layout: Layout, stages: Sequence[range], pipeline_index: int
) -> Iterator[tuple[int, tuple[ParameterSpec, ...]]]:
    """Yield (stage number, parameters) for each stage on the pipeline rank `pipeline_index`;
    `stages` lists each stage's layers. A parameter in several stages is listed with the first
    only."""
    held: set[str] = set()
    for number in layout.stages_of(pipeline_index):
        layers = stages[number]
        table = training_table(config, first_layer=layers.start, last_layer=layers.stop)
        yield number, tuple(spec for spec in table if spec.name not in held)
        held.update(spec.name for spec in table)


def alike_stages(model: ModelConfig, layout: Layout, stages: Sequence[range]) -> list[list[int]]:
    """Return the `pipeline` coordinates in groups, of which one estimate serves all: their ranks
    have equal kinds of stages (`stage_kind`), and the same of these stages directly follow another
    stage on their rank. `stages` lists the layers of each stage."""
    found: dict[object, list[int]] = {}
    for coordinate in range(layout.pipeline):
        numbers = layout.stages_of(coordinate)
        key = tuple((stage_kind(model, stages[n]), (n - 1) in numbers) for n in numbers)
        found.setdefault(key, []).append(coordinate)
    return list(found.values())


def stage_kind(model: ModelConfig, layers: range) -> object:
    """Return a hashable key that is equal for stages that cost the same: they have the same of
    embedding and head, and equally many layers of each kind (with experts or without, of each
    attention window and rotation)."""
    kinds = Counter(
        (model.experts.are_in(layer), model.window(layer), model.rotates_by(layer))
        for layer in layers
    )
    return frozenset(kinds.items()), layers.start == 0, layers.stop == model.n_layers
