"""The Hugging Face architectures ("families") that can be read and written. Each is a TOML file in
this folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pentameter.checkpoint.hugging_face import expert_rules, rules
from pentameter.checkpoint.hugging_face.family import Family, Projections
from pentameter.checkpoint.hugging_face.rotary_rules import rotary_rule
from pentameter.checkpoint.hugging_face.weights.norms_from_zero import NORMS_FROM_ZERO
from pentameter.checkpoint.hugging_face.weights.packed_experts import PACKED_EXPERTS
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.tables import packaged_table

FOLDER = "checkpoint/hugging_face/families"

IN_ORDER = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "olmo2", "qwen3_moe", "mixtral"),
    *("olmoe", "qwen2_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "phi3", "smollm3"),
    *("gemma3_text", "gemma2"),
)
"""`model_type` in config.json of each family. If several can express a model, the first one is
written."""

PACKINGS = {"PACKED_EXPERTS": PACKED_EXPERTS, "NORMS_FROM_ZERO": NORMS_FROM_ZERO}
"""`packing` in a family's file → its Packing."""


@cache
def not_read() -> Mapping[str, str]:
    """Return the architectures that are known and not read: `model_type` → why not."""
    return packaged_table("checkpoint/hugging_face/families/not_read.toml")


@cache
def families() -> Mapping[str, Family]:
    """Return the families by their `model_type` in config.json, in the order of IN_ORDER."""
    return {name: family_in(f"{FOLDER}/{name}.toml") for name in IN_ORDER}


def family_in(file: str) -> Family:
    """Return the family that a TOML file describes, by its path in the package."""
    table = _merged(file)
    defaults, activations = table.pop("defaults"), table.pop("activation_names")
    rotary, known_rules = table.pop("rotary"), vars(rules) | vars(expert_rules)
    own_rules = [known_rules[rule] for rule in table.pop("rules")]
    return Family(
        written={
            ours: (theirs, defaults.get(ours)) for ours, theirs in table.pop("written").items()
        },
        neutral=_with_values(table.pop("neutral"), architecture(ModelConfig())),
        not_ours=_with_values(table.pop("not_ours"), {}),
        activations=activations[table.pop("activations")],
        projections=Projections(**table.pop("projections")),
        rules=[*own_rules, rotary_rule(**rotary)] if rotary else own_rules,
        packing=PACKINGS[table.pop("packing")] if "packing" in table else None,
        **table,
    )


def _merged(file: str) -> dict[str, Any]:
    """Return what a family's file says, on top of the file that it `extends`, by default Llama's.
    Tables are merged; an entry that is "" is left out."""
    said = packaged_table(file)
    if file == f"{FOLDER}/llama.toml":
        return said
    merged = _merged(f"{FOLDER}/{said.pop('extends', 'llama')}.toml")
    for key, value in said.items():
        if isinstance(value, dict):
            entries = merged.get(key, {}) | value
            merged[key] = {name: entry for name, entry in entries.items() if entry != ""}
        else:
            merged[key] = value
    return merged


def _with_values(
    said: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Return key → (value, reason) for entries that are [value, reason], or a reason alone, which
    stands for the key's default (None without one)."""
    return {
        key: (defaults.get(key), each) if isinstance(each, str) else (each[0], each[1])
        for key, each in said.items()
    }
