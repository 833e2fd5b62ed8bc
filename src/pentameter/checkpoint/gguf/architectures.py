"""The models that llama.cpp computes, as `architectures.toml` lists them: families of Hugging Face,
their names there, and the settings that it knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from pentameter.checkpoint.hugging_face.config_json import choose_family
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.config.messages import shown
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.section import ABSENT
from pentameter.config.tables import packaged_table
from pentameter.errors import ConfigError

Values = Mapping[str, Collection[object] | Literal["any", "set"]]
"""Key of `[model]` → the values that are possible; "set" is any but none."""


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures, as the export of a family of Hugging Face."""

    family: str
    """`model_type` of the family in config.json."""
    architecture: str
    """Its name in llama.cpp."""
    values: Values
    """The values that llama.cpp computes; a key that is not listed is at its default."""
    neighbors: bool = False
    """True if the channels of a head that turn together lie beside each other, and not half a head
    apart."""
    needs_head: bool = False
    """True if a tied head is written as a tensor of its own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules, where they differ from the family's."""
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Size of a model, or switch, → the keys in a GGUF file, without the architecture's name, that
    hold it."""
    entries: Mapping[str, int] = field(default_factory=dict)
    """Keys in a GGUF file that always hold the same."""
    rope_scalings: Collection[str] = ("linear", "yarn")
    """The types of `rope_scaling` that it computes."""
    by_layers: Mapping[str, Values] = field(default_factory=dict)
    """A number of layers, as text → values that differ with so many, as llama.cpp tells some models
    by their depth."""

    def as_family(self) -> Family:
        """Return the family with its tensors as llama.cpp has them: parameters as they are, no
        matrix transposed, rows of queries, keys and values one after the other, all experts of a
        layer in one tensor."""
        family = families()[self.family]
        order = family.projections.order
        return replace(
            family,
            transposed=False,
            packing=None,
            projections=replace(family.projections, order="parts" if order == "heads" else order),
            names={**family.names, **self.names},
        )


@cache
def _table() -> dict[str, Any]:
    """Return the content of `architectures.toml`."""
    return packaged_table("checkpoint/gguf/architectures.toml")


@cache
def architectures() -> Mapping[str, Architecture]:
    """Return the families that llama.cpp knows, by their `model_type` in config.json."""
    table = _table()
    return {
        name: Architecture(
            name,
            row["architecture"],
            {**table["values"], **row.get("values", {})},
            row.get("neighbors", False),
            row.get("needs_head", False),
            {**table["names"], **row.get("names", {})},
            {**table["keys"], **row.get("keys", {})},
            row.get("entries", {}),
            row.get("rope_scalings", Architecture.rope_scalings),
            row.get("by_layers", {}),
        )
        for name, row in _rows()
    }


def _rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each family's name and row, with what it `extends`."""
    rows = _table()["families"]
    for name, row in rows.items():
        base = rows.get(row.get("extends"), {})
        both = base.keys() & row.keys()
        merged = {key: {**base[key], **row[key]} for key in both if isinstance(row[key], dict)}
        yield name, {**base, **row, **merged}


def choose_architecture(model: ModelConfig) -> Architecture:
    """Return the architecture under which llama.cpp computes a model as it is computed here.

    Raises ConfigError if no family of Hugging Face can express the model, or llama.cpp does not
    compute its family, or one of its settings; the message names every such key and value.
    """
    name = choose_family(model)
    if name not in architectures():
        known = ", ".join(families()[each].label for each in architectures())
        raise ConfigError(
            f"--to gguf knows no {families()[name].label}: {known}; --to hf writes it, and "
            "llama.cpp's own convert_hf_to_gguf.py may know it"
        )
    found = architectures()[name]
    if problems := list(_not_computed(found, model)):
        raise ConfigError(
            f"llama.cpp's {found.architecture!r} computes no {'; '.join(problems)}; --to hf "
            "writes the model for transformers and vLLM"
        )
    return found


def _not_computed(found: Architecture, model: ModelConfig) -> Iterator[str]:
    """Yield each key of `[model]`, with its value, that llama.cpp does not compute."""
    possible = {**found.values, **found.by_layers.get(str(model.n_layers), {})}
    defaults = architecture(type(model)())
    window, context = model.attention.sliding_window, model.context_length
    for key, value in architecture(model).items():
        match listed := possible.get(key):
            case None:
                is_computed, others = value == defaults[key], ""
            case "any":
                is_computed, others = True, ""
            case "set":
                is_computed, others = value is not None, "a number"
            case _:
                is_computed = (ABSENT if value is None else value) in listed
                others = ", ".join(map(shown, listed))
        if is_computed:
            continue
        if key.startswith("attention.sliding_window") and window is not None and window >= context:
            continue  # such a window leaves out nothing
        if key == "attention.score_size" and value == model.head_channels:
            continue  # by which scores are divided anyway
        if key == "attention.head_size" and value == model.d_model / model.attention.n_heads:
            continue  # as it is when absent
        by_depth = {each for values in found.by_layers.values() for each in values} - {"n_layers"}
        depth = f" with {model.n_layers} layers" if key in by_depth else ""
        wanted = f" (only {others})" if others else ""
        yield f"model.{key}={shown(value)}{depth}{wanted}"
