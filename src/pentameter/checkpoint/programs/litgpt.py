"""litgpt's folders: `lit_model.pth` with `model_config.yaml` and the tokenizer's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentameter.checkpoint.hugging_face.families.table import family_in
from pentameter.checkpoint.hugging_face.tokenizer_files import read_tokenizer
from pentameter.checkpoint.programs.program_model import (
    ProgramModel,
    load_tensors_file,
    tensors_in,
)
from pentameter.config.tables import packaged_table
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.disk.atomic import read_text
from pentameter.errors import ConfigError, CorruptError, missing_package

NAME, SIZES = "lit_model.pth", "model_config.yaml"
FAMILY, CONFIG = "checkpoint/programs/litgpt.toml", "checkpoint/programs/litgpt_config.toml"


def read(path: Path, tokenizer: Tokenizer | None) -> ProgramModel:
    """Return the model in a `lit_model.pth`. Raises ConfigError for an architecture that no model
    here has and where the tokenizer is missing, CorruptError for other content."""
    sizes = _sizes(path.with_name(SIZES))
    section = section_of(sizes, path.with_name(SIZES))
    family = family_in(FAMILY)
    if sizes.get("mlp_class_name") == "GptNeoxMLP":
        names = {**family.names, "mlp.up": "mlp.fc", "mlp.down": "mlp.proj"}
        family = dataclasses.replace(family, names=names)
    content = load_tensors_file(path)
    whole = content["model"] if isinstance(content, Mapping) and "model" in content else content
    if tokenizer is None:
        tokenizer = read_tokenizer(path.parent, [], {})
    if tokenizer is None:
        raise ConfigError(
            f"{path.parent} has no tokenizer.json; copy the model's there, or give --tokenizer FILE"
        )
    return ProgramModel(family, section, tensors_in(whole, path), tokenizer, path)


def _sizes(path: Path) -> Mapping[str, Any]:
    """Return the keys and values of litgpt's `Config` in a YAML file."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing; litgpt writes it beside {NAME}")
    try:
        import yaml
    except ImportError as error:
        raise missing_package(f"reading {path}", "pyyaml", "litgpt") from error
    try:
        found = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise CorruptError(f"{path} is no YAML: {str(error).splitlines()[0]:.120}") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path} holds no keys and values")
    return found


def section_of(sizes: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return litgpt's `Config` as keys of `[model]`. Raises ConfigError, naming the key of the file
    `where`, for a value that no model here has."""
    table = packaged_table(CONFIG)
    for key, value in sizes.items():
        known = key in table["ours"] or key in table["passed_over"] or key in table["read_below"]
        if not known and value not in (table["only"].get(key), None):
            raise ConfigError(f"{where}: {key}={value!r} is no part of a model here")
    for word in table["named_otherwise"]:
        if word in str(sizes.get("name")):
            raise ConfigError(f"{where}: litgpt computes norms of {word} in another way")
    section = {
        ours: sizes[key] for key, ours in table["ours"].items() if sizes.get(key) is not None
    }
    norms = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
    section["norm"] = _one_of(norms, "norm_class_name", sizes, where)
    forms = {"default": "head", "olmo2": "width"}
    if sizes.get("norm_qk"):
        section["attention.qk_norm"] = _one_of(forms, "norm_qk_type", sizes, where)
    gelu = {"none": "", "tanh": "_tanh"}
    activations = {
        "GptNeoxMLP": "gelu" + _one_of(gelu, "gelu_approximate", sizes, where),
        "LLaMAMLP": "swiglu",
        "LLaMAMoE": "swiglu",
    }
    section["feed_forward.activation"] = _one_of(activations, "mlp_class_name", sizes, where)
    section["attention.qkv_bias"] = bool(sizes.get("bias") or sizes.get("attn_bias"))
    if sizes.get("mlp_class_name") == "LLaMAMoE":
        section |= {
            "experts.count": sizes.get("n_expert"),
            "experts.per_token": sizes.get("n_expert_per_token"),
            "experts.width": sizes.get("moe_intermediate_size") or sizes.get("intermediate_size"),
            "router.top_k_first": True,
        }
    window, layers = sizes.get("sliding_window_size"), sizes.get("sliding_window_indices") or [1]
    if window is not None:
        if not all(layers):
            raise ConfigError(
                f"{where}: sliding_window_indices={layers!r} is not read: either all layers have a "
                "window or none"
            )
        section["attention.sliding_window"] = window
    return section | table["always"] | _rope_scaling(sizes, where)


def _one_of(possible: Mapping[str, str], key: str, sizes: Mapping[str, Any], where: Path) -> str:
    """Return what `possible` has for the value of `key`, by default the first one. Raises
    ConfigError for another value."""
    value = sizes.get(key, next(iter(possible)))
    if value not in possible:
        raise ConfigError(f"{where}: {key}={value!r} is not read; possible: {', '.join(possible)}")
    return possible[value]


def _rope_scaling(sizes: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the keys of `[model.rope_scaling]`: positions divided by `rope_condense_ratio`, or
    frequencies as Llama 3.1 has them."""
    ratio, adjusted = sizes.get("rope_condense_ratio") or 1, sizes.get("rope_adjustments")
    if adjusted is None:
        scaled = {"type": "linear", "factor": ratio} if ratio != 1 else {}
    else:
        names = {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
            "original_max_seq_len": "original_context_length",
        }
        if not isinstance(adjusted, Mapping) or adjusted.keys() != names.keys() or ratio != 1:
            raise ConfigError(
                f"{where}: rope_adjustments={adjusted!r} is not read; it is with the keys "
                f"{', '.join(names)} and rope_condense_ratio=1"
            )
        scaled = {"type": "llama3"} | {names[key]: value for key, value in adjusted.items()}
    return {f"rope_scaling.{key}": value for key, value in scaled.items()}
