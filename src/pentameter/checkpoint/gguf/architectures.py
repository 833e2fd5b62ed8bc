"""The models that llama.cpp computes, as `architectures.toml` lists them: families of Hugging Face,
their names there, and the settings that it knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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

Values = Mapping[str, Collection[object] | Literal["any"]]
"""Key of `[model]` → the values that are possible."""


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

    def as_family(self) -> Family:
        """Return the family with its tensors as llama.cpp has them: no matrix transposed, rows of
        queries, keys and values one after the other, all experts of a layer in one tensor."""
        family = families()[self.family]
        order: Literal["apart", "parts"] = (
            "apart" if family.projections.order == "apart" else "parts"
        )
        return replace(
            family,
            transposed=False,
            projections=replace(family.projections, order=order),
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
            table["names"],
        )
        for name, row in table["families"].items()
    }


def keys_in_file() -> Mapping[str, list[str]]:
    """Return key of `[model]` → the keys in a GGUF file, without the architecture's name, that hold
    its value."""
    keys: dict[str, list[str]] = _table()["keys"]
    return keys


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
    if problems := list(_not_computed(found.values, model)):
        raise ConfigError(
            f"llama.cpp's {found.architecture!r} computes no {'; '.join(problems)}; --to hf "
            "writes the model for transformers and vLLM"
        )
    return found


def _not_computed(possible: Values, model: ModelConfig) -> Iterator[str]:
    """Yield each key of `[model]`, with its value, that llama.cpp does not compute."""
    defaults = architecture(type(model)())
    window, context = model.attention.sliding_window, model.context_length
    for key, value in architecture(model).items():
        listed = possible.get(key)
        if listed == "any" or (listed is None and value == defaults[key]):
            continue
        if (ABSENT if value is None else value) in (listed or ()):
            continue
        if key.startswith("attention.sliding_window") and window is not None and window >= context:
            continue  # such a window leaves out nothing
        wanted = f" (only {', '.join(map(shown, listed))})" if listed else ""
        yield f"model.{key}={shown(value)}{wanted}"
