"""Export of a run's adapters as the two files that Hugging Face's PEFT opens.

adapter_model.safetensors names A and B by the `transformers` module that they adapt;
adapter_config.json holds the rank, the scale and the modules. This file does not import PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.folders.model_folder import Adapters, StoredModel
from pentameter.checkpoint.format.safetensors_format import plan_file
from pentameter.checkpoint.hugging_face.config_json import choose_family
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.checkpoint.hugging_face.folder import Exported
from pentameter.checkpoint.hugging_face.tensor_map import Strip, TensorMap
from pentameter.disk.atomic import refuse_existing, write_hashed
from pentameter.disk.lock import building
from pentameter.errors import ConfigError

if TYPE_CHECKING:
    import torch


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the adapted model's module names."""


def export_peft(
    stored: StoredModel, out: Path, beside: Mapping[str, bytes] | None = None
) -> Exported:
    """Write the folder `out` with a run's adapters, not merged into its weights, in PEFT's format.
    `peft.PeftModel.from_pretrained(base, out)` opens it together with `base`, the model that the
    run began with; `AutoPeftModelForCausalLM.from_pretrained(out)` does too if that was a Hugging
    Face folder. The files `beside`, name → content, such as a model card, are put there too. The
    folder appears whole or not at all. The result's `notes` say if no base model is known.

    Raises ConfigError for a model without adapters, for one that no Hugging Face family can
    express, and if `out` exists and is not an empty folder; StorageError if writing fails.
    """
    out = Path(out)
    refuse_existing(out)
    adapters = stored.adapters
    if adapters is None:
        raise ConfigError(
            f"{stored.path} has no adapters: its run trained every weight (no lora.rank); "
            "use --to hf or --to safetensors"
        )
    model = stored.config.model
    family = families()[choose_family(model)]
    modules: dict[str, list[Strip]] = {}
    for strip in TensorMap.of(family, model).strips:
        if strip.ours.removesuffix(".weight") in adapters.layers:
            modules.setdefault(strip.theirs.removesuffix(".weight"), []).append(strip)
    weights = dict(_tensors(modules, adapters))
    config = _config(family, modules, adapters, stored.base_model)
    content = json.dumps(config, indent=2) + "\n"
    with building(out) as folder:
        write_hashed(folder / WEIGHTS, plan_file(weights).chunks())
        write_hashed(folder / CONFIG, [content.encode()])
        for file, data in (beside or {}).items():
            write_hashed(folder / file, [data])
    no_base = (
        "the adapters name no base model, as the run did not begin with a Hugging Face folder: "
        "export what it began with (--to hf), and open them with "
        "peft.PeftModel.from_pretrained(base, DIR)"
    )
    return Exported(out, () if stored.base_model else (no_base,))


def _tensors(
    modules: Mapping[str, Sequence[Strip]], adapters: Adapters
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (PEFT name, tensor) for A (rank, n) and B (m, rank) of each `transformers` module, the
    keys in `modules`. Where one pentameter matrix corresponds to several modules, all get the same
    A, and each gets its rows of B, in its own order."""
    for theirs, strips in modules.items():
        path = strips[0].ours.removesuffix(".weight")
        a, b = (tensor[...] for tensor in adapters.layers[path])
        b_rows = b.new_empty(max(strip.their_rows[-1] for strip in strips) + 1, b.shape[1])
        for strip in strips:
            b_rows[list(strip.their_rows)] = b[strip.rows.start : strip.rows.stop]
        for name, tensor in (("A", a), ("B", b_rows)):
            yield f"{PREFIX}{theirs}.lora_{name}.weight", tensor.contiguous()


def _config(
    family: Family,
    modules: Mapping[str, Sequence[Strip]],
    adapters: Adapters,
    base_model: str | None,
) -> dict[str, Any]:
    """Return the content of adapter_config.json. The keys in `modules` are the adapted
    `transformers` modules; `base_model` is the name or folder of the model that the run began with,
    None if it is not known."""
    lora = adapters.lora
    # The last two names: c_proj alone would match both attention and feed-forward.
    targets = {".".join(path.split(".")[-2:]) for path in modules}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "fan_in_fan_out": family.transposed,
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
